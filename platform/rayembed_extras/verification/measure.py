"""Vectors of a target for a proof's texts: each alone and in batches, several times."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.errors import ArtifactError, RayembedError
from rayembed.proof.proof import ProofText

Embed = Callable[[Sequence[ProofText]], np.ndarray]
"""Function from n texts to vectors (n, D); raises `TextsRefusedError` if it refuses them."""

TEXTS_PER_BATCH = 16
"""Texts of a batch: servers in their defaults take so many in a request."""


class TextsRefusedError(RayembedError):
    """A target that is there does not take the texts of a request, such as too long ones."""


@dataclass(frozen=True)
class Target:
    """What is verified: how to embed with it, and what is assumed of it."""

    name: str
    embed: Embed
    assumed: str
    """Who puts the prompt before a text, in a sentence."""
    software: str | None = None
    """Software behind it, a key of `advice.ADVICE`; None: unknown."""
    takes_instructions: bool = True
    """Whether texts with an instruction of their own can be embedded with it."""


@dataclass(frozen=True)
class Measured:
    """Vectors of the texts that a target takes; R repetitions, n texts, D numbers."""

    texts: tuple[int, ...]
    """Index in the proof of each of the n texts."""
    alone: np.ndarray
    """(R, n, D) float64 vectors of texts that are embedded alone."""
    batch: np.ndarray
    """(R, n, D) float64 vectors of texts that are embedded together."""
    refused: Mapping[int, str]
    """Index in the proof of each refused text → reason."""
    left_out: tuple[int, ...] = ()
    """Indices in the proof of texts whose instruction the target has no place for."""


def measure(target: Target, texts: Sequence[ProofText], repeat: int) -> Measured:
    """Embed each text alone and in batches.

    Args:
        repeat: times, at least 1.

    Raises:
        ArtifactError: vectors are missing, not finite, or of several widths.
        TextsRefusedError: the target takes none of the texts.
    """
    chosen = [i for i, one in enumerate(texts) if target.takes_instructions or not one.instruction]
    refused: dict[int, str] = {}
    first: dict[int, np.ndarray] = {}
    for i in chosen:
        try:
            first[i] = _embed(target, [texts[i]])
        except TextsRefusedError as error:
            refused[i] = str(error)
    if not first:
        reason = next(iter(refused.values()), "none of its texts is without an instruction")
        raise TextsRefusedError(f"{target.name} takes none of the proof's texts: {reason}")
    taken = list(first)
    own = [texts[i] for i in taken]
    alone, batch = [_stacked(target, list(first.values()))], []
    for done in range(repeat):
        batch.append(_in_batches(target, own))
        if done + 1 < repeat:
            alone.append(_stacked(target, [_embed(target, [text]) for text in own]))
    found = _stacked(target, [*alone, *batch])
    width = found.shape[1]
    shaped = found.reshape(2, repeat, len(own), width)
    left_out = tuple(i for i in range(len(texts)) if i not in {*chosen})
    return Measured(tuple(taken), shaped[0], shaped[1], refused, left_out)


def _in_batches(target: Target, texts: Sequence[ProofText]) -> np.ndarray:
    parts = math.ceil(len(texts) / TEXTS_PER_BATCH)
    return _stacked(target, [_together(target, texts[start::parts]) for start in range(parts)])[
        np.argsort([i for start in range(parts) for i in range(start, len(texts), parts)])
    ]


def _together(target: Target, texts: Sequence[ProofText]) -> np.ndarray:
    """Vectors of a batch; of two halves where the target refuses so many tokens at once."""
    try:
        return _embed(target, texts)
    except TextsRefusedError:
        if len(texts) == 1:
            raise
    half = len(texts) // 2
    return _stacked(target, [_together(target, texts[:half]), _together(target, texts[half:])])


def _embed(target: Target, texts: Sequence[ProofText]) -> np.ndarray:
    found = np.asarray(target.embed(texts), dtype=np.float64)
    if found.ndim != 2 or len(found) != len(texts):
        raise ArtifactError(
            f"{target.name} gives {len(found)} vectors for {len(texts)} texts (shape "
            f"{found.shape}); expected one vector for each text"
        )
    if not np.isfinite(found).all():
        raise ArtifactError(
            f"{target.name} gives numbers that are not finite for {str(texts[0].text)[:40]!r}"
        )
    return found


def _stacked(target: Target, parts: Sequence[np.ndarray]) -> np.ndarray:
    widths = sorted({part.shape[1] for part in parts})
    if len(widths) > 1:
        raise ArtifactError(f"{target.name} gives vectors of several widths: {widths}")
    return np.concatenate(parts)
