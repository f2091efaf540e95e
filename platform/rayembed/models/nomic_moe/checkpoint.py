"""Published layout of NomicBert: config.json, model.safetensors, weight names and shapes.

nomic-ai/nomic-embed-text-v2-moe has it, and so has everything that rayembed saves of such an
encoder. Experts with a bias before GELU, which no published model has, are `expert_hidden_bias`.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from rayembed.assets.sentence_modules import is_own_format
from rayembed.errors import ArtifactError
from rayembed.models.files import load_weights, read_header, read_json, weight_paths, write_json
from rayembed.models.nomic_moe.encoder import EncoderShape, NomicEncoder

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


def is_nomic_layout(settings: Mapping[str, Any]) -> bool:
    """Whether a config.json is in the layout of NomicBert's own code.

    transformers has a class of the same name with other settings.
    """
    return settings.get("model_type") == MODEL_TYPE and "activation_function" in settings


def check_not_nomic_layout(folder: Path) -> None:
    """Check that transformers computes what the folder's config.json says.

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
            "silently compute as another model. To train it take model.kind=nomic-moe, to evaluate "
            "it its folder or hf:// reference without st:; what rayembed.models.load.load_model "
            "loads and saves can be registered"
        )


def check_for_sentence_transformers(folder: Path) -> None:
    """Check that sentence-transformers computes the same as the folder's transformers.

    Raises:
        ArtifactError: one of them is of the published layout, see `check_not_nomic_layout`.
    """
    if not is_own_format(folder):
        for path in sorted(folder.rglob("config.json")):
            check_not_nomic_layout(path.parent)


def read_shape(folder: Path) -> EncoderShape:
    """Encoder shape stated in a folder's config.json.

    Raises:
        ArtifactError: it is of another layout, or asks for another forward pass than this one.
    """
    return shape_of(read_json(folder / "config.json"), str(folder))


def shape_of(settings: Mapping[str, Any], where: str) -> EncoderShape:
    """Encoder shape stated in the content of a config.json; raises as `read_shape`.

    Args:
        where: what to call it in messages.
    """
    missing = [name for name in _REQUIRED if name not in settings]
    if settings.get("model_type") != MODEL_TYPE or missing:
        raise ArtifactError(
            f"{where!r} is no NomicBert in its published layout: model_type "
            f"{settings.get('model_type')!r}, lacking {missing}"
        )
    for name, allowed in _FIXED.items():
        if name in settings and settings[name] not in allowed:
            raise ArtifactError(
                f"{where!r} has {name}={settings[name]!r}; computed here is {allowed[0]!r}"
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
    """Content of config.json for a shape."""
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


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Weights of a folder by name.

    Raises:
        ArtifactError: none there, or damaged ones.
    """
    if paths := weight_paths(folder):
        return {name: value for path in paths for name, value in load_weights(path).items()}
    path = folder / "pytorch_model.bin"
    try:
        found: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, UnpicklingError) as error:
        raise ArtifactError(f"cannot read the weights {str(path)!r}: {error}") from error
    return found


def load_encoder_weights(folder: Path) -> NomicEncoder:
    """Load an encoder from a folder in its published layout, in its weights' dtype, on the CPU.

    Raises:
        ArtifactError: settings that are not computed here, or weights of other names or shapes.
    """
    stored = read_weights(folder)
    weights = {own: stored[name] for name, own in _encoder_names(stored).items()}
    return filled(read_shape(folder), weights, str(folder))


def check_encoder_names(folder: Path, shape: EncoderShape) -> None:
    """Check by names and sizes that the folder has the weights of the shape.

    Only safetensors files tell without being read.

    Raises:
        ArtifactError: as `load_encoder_weights`.
    """
    stored = {name: t for path in weight_paths(folder) for name, t in read_header(path).items()}
    if stored:
        names = _encoder_names(stored)
        shapes = {own: tuple(stored[name]["shape"]) for name, own in names.items()}
        _check_shapes(_empty(shape), shapes, str(folder))


def _encoder_names(stored: Iterable[str]) -> dict[str, str]:
    """Stored name → name in the encoder. Heads and poolers are dropped, and the prefix of the
    larger model that the encoder was saved in: `bert` for masked language, `trunk` for embeddings.
    """
    names = {name: re.sub(r"^(trunk|bert)\.", "", name) for name in stored}
    return {n: own for n, own in names.items() if not own.startswith(("pooler.", "cls."))}


def filled(shape: EncoderShape, weights: Mapping[str, Tensor], where: str) -> NomicEncoder:
    """An encoder with the weights.

    Raises:
        ArtifactError: they are not those of the shape.
    """
    encoder = _empty(shape)
    _check_shapes(encoder, {name: tuple(value.shape) for name, value in weights.items()}, where)
    encoder.load_state_dict(dict(weights), assign=True)
    encoder.requires_grad_(True)
    return encoder


def _empty(shape: EncoderShape) -> NomicEncoder:
    with torch.device("meta"):
        return NomicEncoder(shape)


def _check_shapes(encoder: NomicEncoder, found: Mapping[str, tuple[int, ...]], where: str) -> None:
    expected = {name: tuple(value.shape) for name, value in encoder.state_dict().items()}
    missing, unexpected = sorted(expected.keys() - found), sorted(found.keys() - expected)
    other = [
        f"{name} {found[name]} for {wanted}"
        for name, wanted in expected.items()
        if name in found and found[name] != wanted
    ]
    if missing or unexpected or other:
        raise ArtifactError(
            f"the weights in {where!r} are not those of its config.json: missing {len(missing)} "
            f"{missing[:10]}, unexpected {len(unexpected)} {unexpected[:10]}, of other shapes "
            f"{len(other)} {other[:10]}"
        )


def save_encoder(
    encoder: NomicEncoder, folder: Path, state: Mapping[str, Tensor] | None = None
) -> None:
    """Write config.json and model.safetensors into a folder, which is created if missing."""
    import safetensors.torch

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", published_settings(encoder.config))
    weights = encoder.state_dict() if state is None else state
    safetensors.torch.save_file(
        {name: value.contiguous() for name, value in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
