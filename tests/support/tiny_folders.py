"""Tiny models of every architecture: their settings and parts, and saved ones."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tiny_models import made_once, save_decoder, save_encoder

from rayembed.config.model import ARCHITECTURES as TABLE
from rayembed.config.model import ModelConfig
from rayembed.config.settings import parse
from rayembed.models.loading.build import build_model

LENGTHS = {"query_max_length": 48, "document_max_length": 48}
"""Below the 64 positions of the tiny encoders."""

GIVEN = {"path": "given", "dtype": "float32"}


class Tiny(NamedTuple):
    """How a tiny model of an architecture is made."""

    settings: dict[str, Any]
    parts: dict[str, Callable[..., Any]]
    """What saves each pretrained part in a folder; `seed` is an argument."""


TINY: dict[str, Tiny] = {
    "nvembed": Tiny(
        {
            "backbone": GIVEN,
            "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
        },
        {"backbone": save_decoder},
    ),
    "biencoder": Tiny(
        {
            "backbone": GIVEN,
            "query_prefix": "where ",
            "document_prefix": "the world ",
            "query_max_length": 20,
            "document_max_length": 20,
        },
        {"backbone": save_encoder},
    ),
    "causal2vec": Tiny(
        {
            "backbone": GIVEN,
            "encoder": {"path": "given", "max_length": 48},
            "lora": None,
            "query_max_length": 96,
            "document_max_length": 48,
        },
        {"backbone": save_decoder, "encoder": save_encoder},
    ),
    "cde": Tiny(
        {
            "backbone": GIVEN,
            "encoder": {"path": "given"},
            "num_context": 4,
            "sequence_dropout": 0.0,
            "output": "residual",
            **LENGTHS,
        },
        {"backbone": save_encoder, "encoder": save_encoder},
    ),
    "nomic-moe": Tiny(
        {
            "backbone": GIVEN,
            "experts": {"num_experts": 3, "top_k": 2},
            "dimensions": [16],
            **LENGTHS,
        },
        {"backbone": save_encoder},
    ),
}
"""`kind` of a model's settings → a tiny one of width 32, or 64 for Causal2Vec."""


def tiny_settings(kind: str, **changes: Any) -> ModelConfig:
    """Settings of a tiny model whose parts have no place."""
    return parse(TABLE.classes()[kind], {**TINY[kind].settings, **changes})


def tiny_parts(kind: str, folder: Path, *, seed: int = 1) -> Mapping[str, Path]:
    """Its pretrained parts, in folders below one."""
    parts = enumerate(TINY[kind].parts.items(), start=seed)
    return {name: Path(save(folder / name, seed=own)) for own, (name, save) in parts}


def save_tiny(kind: str, folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """A tiny model, saved in the folder; its parts lie beside."""
    return _save(folder, kind, seed, changes)


@made_once
def _save(folder: Path, kind: str, seed: int, changes: Mapping[str, Any]) -> Path:
    parts = tiny_parts(kind, folder.with_name(f"{folder.name}-parts"), seed=seed)
    build_model(tiny_settings(kind, **changes), parts, seed=seed).eval().save(folder)
    return folder


def save_biencoder(folder: Path, *, seed: int = 1, **changes: Any) -> Path:
    """A bi-encoder of width 32 with prefixes, in plain sentence-transformers format."""
    return save_tiny("biencoder", folder, seed=seed, **changes)


def save_nvembed(folder: Path, *, seed: int = 1) -> Path:
    """An NV-Embed of width 32 with latent attention."""
    return save_tiny("nvembed", folder, seed=seed)


KINDS = [kind for kind, cls in TABLE.classes().items() if cls.embeds]
"""Kinds of all architectures that give vectors; those of further packages may give scores."""

ARCHITECTURES = {kind: partial(save_tiny, kind) for kind in TINY}
"""`kind` of a model's settings → what saves a tiny one."""
