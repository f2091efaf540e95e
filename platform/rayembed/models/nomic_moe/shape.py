"""Shape of the encoder (sizes, layers, experts), and the published config.json that states
it.

nomic-ai/nomic-embed-text-v2-moe has that layout, and so has everything that rayembed saves of such
an encoder. Experts with a bias before GELU, which no published model has, are
`expert_hidden_bias`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rayembed.errors import ArtifactError
from rayembed.models.loading.files import read_json

MODEL_TYPE = "nomic_bert"

_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu",),
    "causal": (False,),
    "prenorm": (False,),
    "parallel_block": (False,),
    "use_rms_norm": (None, False),
    "qkv_proj_bias": (True,),
    "mlp_fc1_bias": (True,),
    "mlp_fc2_bias": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "rotary_scaling_factor": (None, 1, 1.0),
    "ffn_div": (1,),
    "num_shared_experts": (0,),
    "expert_choice_router": (False,),
    "moe_normalize_expert_weights": (False,),
}
"""Settings that change the forward pass, with the values that this encoder supports."""

_REQUIRED = ("vocab_size", "n_embd", "n_layer", "n_head", "activation_function")


@dataclass(frozen=True)
class EncoderShape:
    """Sizes and options of an encoder that determine its weights and forward pass."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    inner_size: int
    type_vocab_size: int
    layer_norm_eps: float
    rotary_base: float
    max_length: int
    """Maximum tokens in training."""
    pad_token_id: int | None
    num_experts: int = 0
    """Number of experts; 0 for dense MLPs only."""
    top_k: int = 0
    moe_every: int = 0
    expert_hidden_bias: bool = False
    """Whether experts have a bias before GELU; the published ones do not."""

    def is_moe(self, layer: int) -> bool:
        """Whether the layer, counted from 0, has experts."""
        return self.num_experts > 0 and layer % self.moe_every == 1 % self.moe_every

    @property
    def moe_layers(self) -> list[int]:
        """Indices of the layers with experts, counted from 0."""
        return [layer for layer in range(self.num_layers) if self.is_moe(layer)]


def is_nomic_layout(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json has the published layout of NomicBert's own code.

    transformers has a class of the same name with other settings.
    """
    return settings.get("model_type") == MODEL_TYPE and "activation_function" in settings


def check_not_nomic_layout(folder: Path) -> None:
    """Raise if the folder's NomicBert would be loaded as a different model by transformers.

    Raises:
        ArtifactError: it is a NomicBert of the published layout, which transformers' own class
            takes without a word and computes with SwiGLU, another rotary base and no experts.
    """
    path = folder / "config.json"
    settings = read_json(path) if path.is_file() else {}
    if is_nomic_layout(settings) and settings["activation_function"] != "swiglu":
        raise ArtifactError(
            f"{str(folder)!r} is a NomicBert with {settings['activation_function']!r} and "
            f"{settings.get('num_experts') or 0} experts, which transformers' own class would "
            "silently compute as another model. To train it, set model.kind=nomic-moe; to evaluate "
            "it, give its folder or hf:// reference without st:; to register it, load it with "
            "rayembed.models.loading.load.load_model and save it"
        )


def read_shape(folder: Path) -> EncoderShape:
    """Read the encoder's shape from a folder's config.json.

    Raises:
        ArtifactError: it is of another layout, or asks for another forward pass than this one.
    """
    return shape_of(read_json(folder / "config.json"), str(folder))


def shape_of(settings: Mapping[str, Any], where: str) -> EncoderShape:
    """Read the encoder's shape from the content of a config.json; raises the same errors as
    `read_shape`.

    Args:
        where: what to call it in messages.
    """
    missing = [name for name in _REQUIRED if name not in settings]
    if settings.get("model_type") != MODEL_TYPE or missing:
        raise ArtifactError(
            f"{where!r} is not a NomicBert in its published layout: its config.json has "
            f"model_type {settings.get('model_type')!r} and lacks the settings {missing}"
        )
    for name, allowed in _FIXED.items():
        if name in settings and settings[name] not in allowed:
            raise ArtifactError(
                f"{where!r} has {name}={settings[name]!r}, but only {allowed[0]!r} is supported"
            )
    every = int(settings.get("moe_every_n_layers") or 0)
    return EncoderShape(
        vocab_size=int(settings["vocab_size"]),
        hidden_size=int(settings["n_embd"]),
        num_layers=int(settings["n_layer"]),
        num_heads=int(settings["n_head"]),
        inner_size=int(settings.get("n_inner") or 4 * settings["n_embd"]),
        type_vocab_size=int(settings.get("type_vocab_size", 1)),
        layer_norm_eps=float(settings.get("layer_norm_epsilon", 1e-5)),
        rotary_base=float(settings.get("rotary_emb_base", 10_000)),
        max_length=int(settings.get("n_positions") or settings.get("max_trained_positions") or 0),
        pad_token_id=settings.get("pad_token_id"),
        num_experts=int(settings.get("num_experts") or 0) if every else 0,
        top_k=int(settings.get("moe_top_k") or 1) if every else 0,
        moe_every=every,
        expert_hidden_bias=bool(settings.get("expert_hidden_bias", False)),
    )


def published_settings(shape: EncoderShape) -> dict[str, Any]:
    """Return the content of config.json for a shape."""
    return {
        "model_type": MODEL_TYPE,
        "architectures": ["NomicBertModel"],
        **{name: allowed[0] for name, allowed in _FIXED.items()},
        "rotary_emb_fraction": 1.0,
        "vocab_size": shape.vocab_size,
        "n_embd": shape.hidden_size,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": shape.inner_size,
        "n_positions": shape.max_length,
        "max_trained_positions": shape.max_length,
        "type_vocab_size": shape.type_vocab_size,
        "layer_norm_epsilon": shape.layer_norm_eps,
        "rotary_emb_base": shape.rotary_base,
        "pad_token_id": shape.pad_token_id,
        "num_experts": shape.num_experts,
        "moe_top_k": shape.top_k,
        "moe_every_n_layers": shape.moe_every,
        "expert_hidden_bias": shape.expert_hidden_bias,
        "add_pooling_layer": False,
    }
