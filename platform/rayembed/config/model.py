"""Model settings: one of the architectures."""

from pathlib import PurePath
from typing import Annotated

from pydantic import Field

from rayembed.config.backbone import BackboneConfig, Dtype
from rayembed.config.biencoder import BiEncoderConfig, ProjectionConfig
from rayembed.config.causal2vec import Causal2VecConfig, EncoderConfig, ExamplesConfig
from rayembed.config.cde import CDEConfig, FirstStageConfig
from rayembed.config.lora import LoraConfig
from rayembed.config.nomic_moe import NomicMoeConfig
from rayembed.config.nvembed import NVEmbedConfig

ModelConfig = Annotated[
    NVEmbedConfig | BiEncoderConfig | Causal2VecConfig | CDEConfig | NomicMoeConfig,
    Field(discriminator="kind"),
]


def pretrained_parts(model: ModelConfig) -> dict[str, str]:
    """Asset references of a model's pretrained parts by setting, the backbone first."""
    parts = {"backbone": model.backbone.path}
    if isinstance(model, Causal2VecConfig | CDEConfig) and model.encoder is not None:
        parts["encoder"] = model.encoder.path
    return parts


def without_place(reference: str) -> str:
    """Publishable form of a model reference: local paths are reduced to their last part."""
    return reference if ":/" in reference else PurePath(reference).name


def has_plain_format(model: ModelConfig) -> bool:
    """Whether sentence-transformers can load the exported model without rayembed."""
    return isinstance(model, BiEncoderConfig) and (
        model.query_max_length == model.document_max_length
    )


__all__ = [
    "BackboneConfig",
    "BiEncoderConfig",
    "CDEConfig",
    "Causal2VecConfig",
    "Dtype",
    "EncoderConfig",
    "ExamplesConfig",
    "FirstStageConfig",
    "LoraConfig",
    "ModelConfig",
    "NVEmbedConfig",
    "NomicMoeConfig",
    "ProjectionConfig",
    "has_plain_format",
    "pretrained_parts",
    "without_place",
]
