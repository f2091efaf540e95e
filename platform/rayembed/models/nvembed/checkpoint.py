"""Load the published checkpoints nvidia/NV-Embed-v1 and v2."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rayembed.config.backbone import BackboneConfig, Dtype, LatentAttentionPooling
from rayembed.errors import ArtifactError
from rayembed.models.loading.backbones import finish_backbone, remove_causal_mask, torch_dtype
from rayembed.models.loading.files import load_weights, read_json, weight_paths
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.nvembed.model import NVEmbed
from rayembed.models.nvembed.pooling import LatentAttention
from rayembed.models.nvembed.tokens import make_tokenizer

MAX_LENGTH = 32768
"""Text length in tokens on v2's model page; v1's says 4,096."""

# The published config.json leaves most of the decoder to defaults of the transformers version it
# was written with; those of Mistral-7B-v0.1 are stated here.
_DECODER: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT_ATTENTION: dict[str, Any] = {
    "num_latents_value": 512,
    "num_cross_heads": 8,
    "hidden_dim": 4096,
    "latent_dim": 4096,
    "cross_dim_head": 4096,
    "mult": 4,
}
_TRUNK, _LATENT = "embedding_model.", "latent_attention_model."


def load_nvidia_checkpoint(
    folder: Path, *, dtype: Dtype = "bfloat16", max_length: int = MAX_LENGTH
) -> NVEmbed:
    """Load the published model from a local copy of its repository, in evaluation mode.

    Raises:
        ArtifactError: files are missing, or weights have other names or shapes.
    """
    settings = read_json(folder / "config.json")
    backbone, pooling, _ = empty_nvembed(
        settings.get("text_config") or {}, settings.get("latent_attention_config") or {}
    )
    _fill(backbone, pooling, folder, torch_dtype(dtype))
    config = published_config(folder, dtype=dtype, max_length=max_length)
    tokenizer = make_tokenizer(config, folder)
    finish_backbone(backbone, mask="bidirectional")
    return NVEmbed(config, backbone, pooling, tokenizer).eval()


def is_published(folder: Path) -> bool:
    """Whether the folder's config.json is that of a published NV-Embed model."""
    path = folder / "config.json"
    return path.is_file() and read_json(path).get("model_type") == "nvembed"


def published_config(
    folder: Path, *, dtype: Dtype = "bfloat16", max_length: int = MAX_LENGTH
) -> NVEmbedConfig:
    """Make the settings of the published model in a local copy of its repository."""
    stated = read_json(folder / "config.json").get("latent_attention_config") or {}
    values = _LATENT_ATTENTION | {k: v for k, v in stated.items() if k in _LATENT_ATTENTION}
    return NVEmbedConfig(
        backbone=BackboneConfig(path=str(folder), dtype=dtype),
        pooling=LatentAttentionPooling(
            num_latents=values["num_latents_value"],
            num_heads=values["num_cross_heads"],
            head_dim=values["cross_dim_head"],
            mlp_ratio=values["mult"],
        ),
        lora=None,
        token_layout="released",
        query_max_length=max_length,
        document_max_length=max_length,
    )


def published_width(folder: Path) -> int:
    """Read the vector width of the published model in a local copy of its repository."""
    stated = read_json(folder / "config.json").get("text_config") or {}
    return int(stated.get("hidden_size", _DECODER["hidden_size"]))


def empty_nvembed(
    text_config: dict[str, Any], latent_config: dict[str, Any]
) -> tuple[Any, LatentAttention, dict[str, Any]]:
    """Build decoder and latent attention on the meta device; also return the complete settings of
    the latent attention.

    Both configurations state only what differs from the published sizes.

    Raises:
        ArtifactError: sizes that the published code does not combine.
    """
    import transformers
    from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding

    decoder = _DECODER | {k: v for k, v in text_config.items() if k in _DECODER}
    if isinstance(text_config.get("rope_parameters"), dict):
        decoder["rope_theta"] = text_config["rope_parameters"]["rope_theta"]
    theta = decoder.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": theta}
    settings = transformers.MistralConfig(
        **decoder, rope_parameters=rope, head_dim=text_config.get("head_dim"), use_cache=False
    )
    settings.sliding_window = None
    settings._attn_implementation = "sdpa"
    remove_causal_mask(settings)
    values = _LATENT_ATTENTION | {k: v for k, v in latent_config.items() if k in _LATENT_ATTENTION}
    if not values["hidden_dim"] == values["latent_dim"] == settings.hidden_size:
        raise ArtifactError(
            f"latent attention of width {values['hidden_dim']} over latents of width "
            f"{values['latent_dim']} does not fit a decoder of hidden size {settings.hidden_size}"
        )
    with torch.device("meta"):
        backbone = transformers.MistralModel(settings)
        pooling = LatentAttention(
            settings.hidden_size,
            num_latents=values["num_latents_value"],
            num_heads=values["num_cross_heads"],
            head_dim=values["cross_dim_head"],
            mlp_ratio=values["mult"],
        )
    # Frequencies are computed, not loaded.
    backbone.rotary_emb = MistralRotaryEmbedding(config=settings)
    return backbone, pooling, values


def _fill(backbone: Any, pooling: LatentAttention, folder: Path, dtype: torch.dtype) -> None:
    """Load the weights of all files into the empty modules, one file at a time."""
    expected = {_TRUNK + name for name in backbone.state_dict()}
    expected |= {_LATENT + name for name in pooling.state_dict()}
    found: set[str] = set()
    if not (paths := weight_paths(folder)):
        raise ArtifactError(
            f"no weights in {str(folder)!r}: neither model.safetensors nor its index"
        )
    for path in paths:
        loaded = load_weights(path)
        found |= loaded.keys()
        for module, prefix in ((backbone, _TRUNK), (pooling, _LATENT)):
            part: dict[str, Tensor] = {
                name.removeprefix(prefix): value.to(dtype)
                for name, value in loaded.items()
                if name in expected and name.startswith(prefix)
            }
            try:
                module.load_state_dict(part, strict=False, assign=True)
            except RuntimeError as error:
                raise ArtifactError(
                    f"the weights in {str(path)!r} do not fit the model: {error}"
                ) from error
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        raise ArtifactError(
            f"the weights in {str(folder)!r} are not those of NV-Embed: "
            f"missing {len(missing)} {missing[:20]}, unexpected {len(unexpected)} {unexpected[:20]}"
        )
