"""Convert a dense encoder to rotary positions, and turn its MLPs into mixtures of experts
(upcycling).

Sections 4.1 and 4.3 of arXiv 2502.07972; sparse upcycling is of arXiv 2212.05055. Functions of
shapes and weights by their names, in their dtype; nothing is read or written.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rayembed.errors import ArtifactError
from rayembed.models.nomic_moe.config import ExpertsConfig
from rayembed.models.nomic_moe.shape import EncoderShape

CONVERTIBLE = ("bert", "roberta", "xlm-roberta", "camembert")
"""Families of transformers with absolute positions that otherwise equal the nomic encoder."""

_VOCABULARY_MULTIPLE = 64
"""Vocabulary padding; the published model has 250,048 words for XLM-R's 250,002."""

_PREFIXES = ("bert.", "roberta.")

INITIALIZER_RANGE = 0.02
"""Standard deviation of weights of BERT's families, where a config.json names no other."""

_RELEASED_ROUTER_STD = 0.02
_EVEN_ROUTER_STD = 1e-7
"""Standard deviation of an even router: probabilities differ by less than 1e-6 of their size, but
tokens spread over the experts, unlike with a router of zeros."""

_LAYER_NAMES = {
    "attention.output.dense": "attn.out_proj",
    "attention.output.LayerNorm": "norm1",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
    "output.LayerNorm": "norm2",
}

_CONVERTIBLE = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
"""Settings of a convertible model, with the supported values."""

Weights = dict[str, Tensor]


def rotary_shape(settings: Mapping[str, Any], rotary_base: float, where: str) -> EncoderShape:
    """Return the encoder shape that a BERT-like model of transformers has after conversion to
    rotary positions.

    Args:
        settings: the content of its config.json.
        where: what to call it in messages.

    Raises:
        ArtifactError: another family, or parts that the encoder does not have.
    """
    family = settings.get("model_type")
    found = {
        "hidden_act": settings.get("hidden_act", "gelu"),
        "position_embedding_type": settings.get("position_embedding_type") or "absolute",
        "is_decoder": bool(settings.get("is_decoder")),
    }
    odd = {name: value for name, value in found.items() if value != _CONVERTIBLE[name]}
    if family not in CONVERTIBLE or odd:
        raise ArtifactError(
            f"{where!r} is a model of the family {family!r} {odd or ''}; a nomic-moe starts from "
            f"{', '.join(CONVERTIBLE)} with GELU and absolute positions, or from a NomicBert in "
            "its published layout"
        )
    vocabulary = int(settings.get("vocab_size", 30522))
    # The families' own defaults, which a config.json may leave out.
    bert = family == "bert"
    return EncoderShape(
        vocab_size=-(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE,
        hidden_size=int(settings.get("hidden_size", 768)),
        num_layers=int(settings.get("num_hidden_layers", 12)),
        num_heads=int(settings.get("num_attention_heads", 12)),
        inner_size=int(settings.get("intermediate_size", 3072)),
        type_vocab_size=int(settings.get("type_vocab_size", 2)),
        layer_norm_eps=float(settings.get("layer_norm_eps", 1e-12)),
        rotary_base=rotary_base,
        max_length=int(settings.get("max_position_embeddings", 512)),
        pad_token_id=settings.get("pad_token_id", 0 if bert else 1),
    )


def rotary_weights(weights: Mapping[str, Tensor], shape: EncoderShape, where: str) -> Weights:
    """Rename a BERT-like model's weights to the encoder's names, and drop absolute
    positions.

    Queries, keys and values become one layer; rows of zeros fill up the vocabulary.

    Raises:
        ArtifactError: weights are missing.
    """
    plain = {_without_prefix(name): value for name, value in weights.items()}
    try:
        words = plain["embeddings.word_embeddings.weight"]
        found = {
            "embeddings.word_embeddings.weight": _padded(words, shape.vocab_size),
            "embeddings.token_type_embeddings.weight": plain[
                "embeddings.token_type_embeddings.weight"
            ],
        }
        for kind in ("weight", "bias"):
            found[f"emb_ln.{kind}"] = _of_norm(plain, "embeddings.LayerNorm", kind)
            for layer in range(shape.num_layers):
                old, new = f"encoder.layer.{layer}", f"encoder.layers.{layer}"
                heads = [
                    plain[f"{old}.attention.self.{name}.{kind}"]
                    for name in ("query", "key", "value")
                ]
                found[f"{new}.attn.Wqkv.{kind}"] = torch.cat(heads)
                for name, renamed in _LAYER_NAMES.items():
                    found[f"{new}.{renamed}.{kind}"] = _of_norm(plain, f"{old}.{name}", kind)
    except KeyError as error:
        raise ArtifactError(f"the weights in {where!r} lack {error}") from error
    return found


def upcycled_shape(shape: EncoderShape, experts: ExpertsConfig) -> EncoderShape:
    """Return the shape of a dense encoder after its MLPs are turned into experts."""
    return dataclasses.replace(
        shape,
        num_experts=experts.num_experts,
        top_k=experts.top_k,
        moe_every=experts.every,
        expert_hidden_bias=experts.start != "released",
    )


def upcycled_weights(
    weights: Mapping[str, Tensor],
    shape: EncoderShape,
    experts: ExpertsConfig,
    *,
    initializer_range: float = INITIALIZER_RANGE,
) -> Weights:
    """Turn a dense encoder's MLPs into experts, which are copies or random as the setting `start`
    says.

    Routers and, where the start is `random`, experts are drawn from the global CPU generator;
    routers first, so that they are the same for experts that are copied and that are drawn.

    Args:
        shape: what `upcycled_shape` gave.
        initializer_range: standard deviation of experts that are drawn.
    """
    released = experts.start == "released"
    found = dict(weights)
    for layer in shape.moe_layers:
        name = f"encoder.layers.{layer}.mlp"
        fc1, fc2 = found.pop(f"{name}.fc1.weight"), found.pop(f"{name}.fc2.weight")
        b1, b2 = found.pop(f"{name}.fc1.bias"), found.pop(f"{name}.fc2.bias")
        copies = experts.num_experts
        std = _RELEASED_ROUTER_STD if released else _EVEN_ROUTER_STD
        router = torch.randn(copies, shape.hidden_size) * std
        found[f"{name}.router.layer.weight"] = router.to(fc1.dtype)
        found[f"{name}.experts.mlp.w1"] = fc1.repeat(copies, 1)
        found[f"{name}.experts.mlp.w2"] = (fc2.T * _output_scale(experts)).repeat(copies, 1)
        found[f"{name}.experts.bias"] = torch.zeros_like(b2) if released else b2.clone()
        if not released:
            found[f"{name}.experts.mlp.b1"] = b1.repeat(copies)
    if experts.start == "random":
        found |= _drawn_experts(found, shape, experts, initializer_range)
    return found


def _output_scale(experts: ExpertsConfig) -> float:
    """Factor for the experts' output weights that cancels the router's initial probability 1 / E
    for each of the k chosen experts.
    """
    return 1.0 if experts.start == "released" else experts.num_experts / experts.top_k


def _drawn_experts(
    copied: Weights, shape: EncoderShape, experts: ExpertsConfig, std: float
) -> Weights:
    """Draw random expert matrices with zero biases, to replace the copied experts.

    Their outputs are scaled as those of copies, so that the mixture is of the size of one such MLP.
    """
    found = {}
    for layer in shape.moe_layers:
        name = f"encoder.layers.{layer}.mlp.experts"
        for part, size in (("mlp.w1", std), ("mlp.w2", std * _output_scale(experts))):
            found[f"{name}.{part}"] = torch.randn_like(copied[f"{name}.{part}"]) * size
        for part in ("mlp.b1", "bias"):
            found[f"{name}.{part}"] = torch.zeros_like(copied[f"{name}.{part}"])
    return found


def _without_prefix(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _of_norm(plain: Mapping[str, Tensor], module: str, kind: str) -> Tensor:
    """Return a norm's weight or bias, which old checkpoints call gamma and beta."""
    old = {"weight": "gamma", "bias": "beta"}[kind]
    return plain[f"{module}.{old}" if f"{module}.{old}" in plain else f"{module}.{kind}"]


def _padded(rows: Tensor, wanted: int) -> Tensor:
    if len(rows) > wanted:
        raise ArtifactError(
            f"the weights have {len(rows)} word embeddings, but config.json requires {wanted} "
            "(rounded up); use weights and config.json of the same model"
        )
    return torch.cat([rows, rows.new_zeros(wanted - len(rows), rows.shape[1])])
