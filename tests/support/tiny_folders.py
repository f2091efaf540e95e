"""Saved tiny models as a registry or a server gets them."""

from pathlib import Path

from tiny_models import save_cde_stages, save_decoder, save_encoder

from rayembed.config.backbone import BackboneConfig
from rayembed.config.settings import parse
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.build import build_model
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.cde.config import CDEConfig
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.nvembed.config import NVEmbedConfig


def save_biencoder(folder: Path, *, seed: int = 1, **changes) -> Path:
    """A bi-encoder of width 32 with prefixes, in plain sentence-transformers format."""
    backbone = save_encoder(folder.with_name(f"{folder.name}-backbone"), seed=seed)
    settings = {
        "query_prefix": "where ",
        "document_prefix": "the world ",
        "query_max_length": 20,
        "document_max_length": 20,
        **changes,
    }
    config = BiEncoderConfig(backbone=BackboneConfig(path="unused", dtype="float32"), **settings)
    build_model(config, backbone, seed=seed).eval().save(folder)
    return folder


def save_nvembed(folder: Path, *, seed: int = 1) -> Path:
    """An NV-Embed of width 32 with latent attention."""
    backbone = save_decoder(folder.with_name(f"{folder.name}-backbone"), seed=seed)
    config = parse(
        NVEmbedConfig,
        {
            "backbone": {"path": str(backbone), "dtype": "float32"},
            "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
        },
    )
    build_model(config, backbone, seed=seed).eval().save(folder)
    return folder


LENGTHS = {"query_max_length": 48, "document_max_length": 48}
"""Below the 64 positions of the tiny encoders."""


def save_causal2vec(folder: Path) -> Path:
    """A Causal2Vec of width 64: a decoder of width 32 beside an encoder of width 32."""
    parts = {
        "backbone": save_decoder(folder.with_name(f"{folder.name}-llm")),
        "encoder": save_encoder(folder.with_name(f"{folder.name}-encoder")),
    }
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given", "max_length": 48},
        "lora": None,
        "query_max_length": 96,
        "document_max_length": 48,
    }
    build_model(parse(Causal2VecConfig, config), parts, seed=1).eval().save(folder)
    return folder


def save_cde(folder: Path) -> Path:
    """A CDE of width 32 with four context documents and without a corpus."""
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": 4,
        "output": "residual",
        **LENGTHS,
    }
    stages = save_cde_stages(folder.with_name(f"{folder.name}-stages"))
    build_model(parse(CDEConfig, config), stages, seed=1).eval().save(folder)
    return folder


def save_nomic_moe(folder: Path) -> Path:
    """A mixture of three experts of width 32 that can be cut to 16."""
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "experts": {"num_experts": 3, "top_k": 2},
        "dimensions": [16],
        **LENGTHS,
    }
    backbone = save_encoder(folder.with_name(f"{folder.name}-backbone"))
    build_model(parse(NomicMoeConfig, config), backbone, seed=1).eval().save(folder)
    return folder


ARCHITECTURES = {
    "nvembed": save_nvembed,
    "biencoder": save_biencoder,
    "causal2vec": save_causal2vec,
    "cde": save_cde,
    "nomic-moe": save_nomic_moe,
}
"""`kind` of a model's settings → what saves a tiny one."""
