"""Load the encoder that an adaptation starts from, and save the adapted one."""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from rayembed.assets.finite import check_finite
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.backbones import torch_dtype
from rayembed.models.loading.files import read_json
from rayembed.models.loading.start import part_within
from rayembed.models.nomic_moe.checkpoint import read_weights
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.nomic_moe.encoder import NomicEncoder
from rayembed.models.nomic_moe.shape import is_nomic_layout, shape_of
from rayembed.models.nomic_moe.start import empty_encoder, load_start
from rayembed.models.passes.encoding import PROBES
from rayembed.models.tokens import pretrained_tokenizer
from rayembed_extras.adaptation.masked_language import (
    MaskedLanguageHead,
    MaskedLanguageModel,
    collate_masked,
)
from rayembed_extras.adaptation.settings import RotaryEncoderConfig
from rayembed_extras.adaptation.vocabulary import MaskingVocabulary, vocabulary_of

HEAD_FILE = "mlm_head.safetensors"
"""File of the head next to an adapted encoder; a later adaptation continues from it, others ignore
it."""

_FAMILIES: dict[str, dict[str, tuple[str, ...]]] = {
    "lm_head": {"dense": ("dense",), "layer_norm": ("layer_norm",)},
    "cls.predictions": {
        "dense": ("transform.dense",),
        "layer_norm": ("transform.LayerNorm", "transform.layer_norm"),
    },
}
"""Names of the head's weights in RoBERTa and XLM-R, and in BERT and NomicBert; they differ in one
name."""

_INITIAL_STD = 0.02
"""Standard deviation of a fresh head's weights, BERT's initialisation."""


def load_masked_language_model(
    folder: Path, config: RotaryEncoderConfig, *, max_length: int, seed: int
) -> MaskedLanguageModel:
    """Load the encoder with rotary positions and its prediction head, on the CPU, in
    training mode.

    The head is the folder's own; where it has none, as models for embeddings do not, a fresh one
    drawn by the seed. Everything is in the config's dtype.

    Args:
        folder: a transformer's, or in sentence-transformers format.
        max_length: tokens of the sequences that it will have been trained on.

    Raises:
        ArtifactError: no such model there, damaged, or with a head that does not share its words.
        ConfigError: its rotary base is not the config's, or its experts.
    """
    transformer = part_within(folder, "backbone")
    _check_dense(read_json(transformer / "config.json"), str(transformer))
    dtype = torch_dtype(config.backbone.dtype)
    encoder = load_start(transformer, _dense(config), dtype)
    encoder.config = dataclasses.replace(
        encoder.config, max_length=_trained_length(transformer, encoder, max_length)
    )
    num_words = vocabulary(transformer, encoder.config.vocab_size).num_words
    head = MaskedLanguageHead(encoder.config, num_words)
    found = read_head(transformer, num_words)
    if found is None:
        generator = torch.Generator().manual_seed(seed)
        nn.init.normal_(head.dense.weight, std=_INITIAL_STD, generator=generator)
        nn.init.zeros_(head.dense.bias)
    else:
        _fill(head, found, transformer)
    return MaskedLanguageModel(encoder, head.to(dtype)).train()


def empty_masked_language_model(
    settings: Mapping[str, Any], config: RotaryEncoderConfig, where: str
) -> MaskedLanguageModel:
    """Build the masked-language model without weights (meta device) from the content of a
    config.json.

    Raises:
        ArtifactError, ConfigError: as `load_masked_language_model`, but for the weights.
    """
    _check_dense(settings, where)
    encoder = empty_encoder(dict(settings), _dense(config), where)
    with torch.device("meta"):
        head = MaskedLanguageHead(encoder.config, encoder.config.vocab_size)
    return MaskedLanguageModel(encoder, head)


def check_adaptable(folder: Path, config: RotaryEncoderConfig) -> MaskingVocabulary:
    """Check an encoder's files to see whether it can be adapted; return the vocabulary of its
    tokenizer.

    Raises:
        ArtifactError, ConfigError: as `load_masked_language_model`.
    """
    transformer = part_within(folder, "backbone")
    settings = read_json(transformer / "config.json")
    _check_dense(settings, str(transformer))
    shape = empty_encoder(settings, _dense(config), str(transformer)).config
    return vocabulary(transformer, shape.vocab_size)


def vocabulary(transformer: Path, num_vectors: int) -> MaskingVocabulary:
    """Read the special tokens and the number of words of the folder's tokenizer, for
    masking.

    Raises:
        ArtifactError: no fast tokenizer, none with a mask, or more words than word vectors.
    """
    found = vocabulary_of(pretrained_tokenizer(transformer), str(transformer))
    if found.num_words > num_vectors:
        raise ArtifactError(
            f"the tokenizer in {str(transformer)!r} has {found.num_words} words, but the model "
            f"has only {num_vectors} word vectors; use the tokenizer and weights of one model"
        )
    return found


def read_head(transformer: Path, num_words: int) -> dict[str, Tensor] | None:
    """Read the prediction head's float32 weights under the names of `MaskedLanguageHead`; None if
    the folder has no head.

    Raises:
        ArtifactError: one whose word vectors are not the encoder's, or with too few words.
    """
    path = transformer / HEAD_FILE
    if path.is_file():
        try:
            stored = safetensors.torch.load_file(path)
        except (OSError, safetensors.SafetensorError) as error:
            raise ArtifactError(f"cannot read the head {str(path)!r}: {error}") from error
        return {name: value.float() for name, value in stored.items()}
    weights = read_weights(transformer)
    for prefix, names in _FAMILIES.items():
        if f"{prefix}.bias" in weights or f"{prefix}.decoder.bias" in weights:
            return _head_of(weights, prefix, names, num_words, str(transformer))
    return None


def _head_of(
    weights: Mapping[str, Tensor],
    prefix: str,
    names: Mapping[str, tuple[str, ...]],
    num_words: int,
    where: str,
) -> dict[str, Tensor]:
    words = next(w for n, w in weights.items() if n.endswith("word_embeddings.weight"))
    decoder = weights.get(f"{prefix}.decoder.weight", words)
    bias = weights.get(f"{prefix}.bias", weights.get(f"{prefix}.decoder.bias"))
    assert bias is not None
    if decoder.shape != words.shape or not torch.equal(decoder, words) or len(bias) < num_words:
        raise ArtifactError(
            f"the head for masked-language modelling in {where!r} does not share the encoder's "
            f"word vectors: it has output vectors {tuple(decoder.shape)} and {len(bias)} biases, "
            f"but the encoder's word vectors are {tuple(words.shape)} or differ in value; only "
            "models whose head shares the encoder's word vectors can be adapted"
        )
    found = {"bias": bias[:num_words].float()}
    try:
        for ours, theirs in names.items():
            for kind, old in (("weight", "gamma"), ("bias", "beta")):
                known = [f"{prefix}.{name}.{end}" for end in (kind, old) for name in theirs]
                found[f"{ours}.{kind}"] = next(weights[n] for n in known if n in weights).float()
    except StopIteration:
        raise ArtifactError(
            f"the head for masked-language modelling in {where!r} lacks the weight "
            f"{' or '.join(known)}"
        ) from None
    return found


def save_adapted(
    model: MaskedLanguageModel, folder: Path, tokenizer_from: Path, config: RotaryEncoderConfig
) -> None:
    """Save the encoder in its published layout, with its tokenizer and the prediction head.

    Args:
        tokenizer_from: the folder that the model was loaded from.

    Raises:
        ArtifactError: a weight is not finite, or what the model predicts; nothing is written then.
    """
    transformer = part_within(tokenizer_from, "backbone")
    tokenizer = pretrained_tokenizer(transformer)
    check_finite(model.state_dict().items(), f"the encoder {str(folder)!r}")
    _check_predicts(model, tokenizer, f"the encoder {str(folder)!r}")
    model.encoder.save_pretrained(str(folder))
    head = {name: value.contiguous() for name, value in model.head.state_dict().items()}
    safetensors.torch.save_file(head, folder / HEAD_FILE, metadata={"format": "pt"})
    tokenizer.save_pretrained(str(folder))
    for path in folder.iterdir():
        os.chmod(path, 0o644)  # noqa: PTH101


@torch.inference_mode()
def _check_predicts(model: MaskedLanguageModel, tokenizer: Any, what: str) -> None:
    """Check that the model gives the first token of each text in `PROBES` a finite probability."""
    rows = [np.array(tokenizer(text)["input_ids"]) for text in PROBES]
    first = np.zeros(1, dtype=np.int64)
    words = [row[first] for row in rows]
    batch = collate_masked(rows, [first] * len(rows), words, tokenizer.pad_token_id or 0)
    was_training = model.training
    losses = model.eval()(batch).losses
    model.train(was_training)
    if not losses.isfinite().all():
        raise ArtifactError(
            f"{what}: the losses per token on {len(PROBES)} short texts are {losses.tolist()}, "
            "although all weights are finite: the computation overflows, so the encoder was not "
            "exported. Training has diverged, or the initial model was broken: lower "
            "training.optimizer.learning_rate or raise training.optimizer.warmup_steps, and "
            "adapt the encoder again under another --name"
        )


def _dense(config: RotaryEncoderConfig) -> NomicMoeConfig:
    """Convert the settings to a NomicBert configuration without experts."""
    return NomicMoeConfig(
        backbone=config.backbone, experts=None, rotary_base=config.rotary_base, dimensions=()
    )


def _check_dense(settings: Mapping[str, Any], where: str) -> None:
    if is_nomic_layout(settings) and shape_of(settings, where).num_experts:
        raise ConfigError(
            f"model.backbone.path {where!r} is a mixture of experts, but only dense encoders can "
            "be adapted. Adapt the dense encoder; training a nomic-moe model from it makes the "
            "experts later"
        )


def _trained_length(transformer: Path, encoder: NomicEncoder, max_length: int) -> int:
    """Return the training length in tokens; a length learned with absolute positions does not
    count, because rotary ones replace them.
    """
    if is_nomic_layout(read_json(transformer / "config.json")):
        return max(max_length, encoder.config.max_length)
    return max_length


def _fill(head: MaskedLanguageHead, found: Mapping[str, Tensor], transformer: Path) -> None:
    try:
        head.load_state_dict(dict(found))
    except RuntimeError as error:
        raise ArtifactError(
            f"the head for masked-language modelling in {str(transformer)!r} does not fit its "
            f"encoder: {error}"
        ) from error
