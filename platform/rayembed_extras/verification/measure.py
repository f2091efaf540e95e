"""Embed a proof's texts with a verification target: each text alone and in batches, several
times.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.errors import ArtifactError, RayembedError
from rayembed.proof.proof import Proof, ProofText

Embed = Callable[[Sequence[ProofText]], np.ndarray]
"""Function from n texts to vectors (n, D); raises `TextsRefusedError` if it refuses them."""

TEXTS_PER_BATCH = 16
"""Texts of a batch: servers in their defaults take so many in a request."""

_LONG = 250
"""Characters from which a text counts as long."""
_VERY_LONG = 4_000
"""Characters from which a text is embedded alone only: in a batch it would show nothing more."""
_TEXTS_OF_LONG = 3
"""Long texts of a batch."""


class TextsRefusedError(RayembedError):
    """A verification target answered, but refused the texts of a request, for example too long
    ones.
    """


@dataclass(frozen=True)
class Target:
    """A model under verification: the function that embeds with it, and assumptions about it."""

    name: str
    embed: Embed
    assumed: str
    """Who puts the prompt before a text, in a sentence."""
    software: str | None = None
    """Software behind it, a key of `advice.ADVICE`; None: unknown."""
    takes_instructions: bool = True
    """Whether texts with an instruction of their own can be embedded with it."""
    in_process: bool = False
    """Whether packages of this process compute its vectors."""


@dataclass(frozen=True)
class MeasuredVectors:
    """Vectors of the texts that a target accepts, for R repetitions, n texts and D
    dimensions.

    Of long texts all repetitions are the first one.
    """

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


def measure(target: Target, texts: Sequence[ProofText], repeat: int) -> MeasuredVectors:
    """Embed each text alone and in batches.

    Long texts cost most of the time. So those that both roles share are embedded once, and none is
    repeated: what differs from call to call differs for short ones, too.

    Args:
        repeat: times, at least 1.

    Raises:
        ArtifactError: vectors are missing, not finite, or of several widths.
        TextsRefusedError: the target takes none of the texts.
    """
    chosen = [i for i, one in enumerate(texts) if target.takes_instructions or not one.instruction]
    firsts: dict[tuple[str, ...], int] = {}
    first = {i: firsts.setdefault(_request_of(texts[i]), i) for i in chosen}
    refused: dict[int, str] = {}
    vectors: dict[int, np.ndarray] = {}
    for i in firsts.values():
        try:
            vectors[i] = _embed(target, [texts[i]])
        except TextsRefusedError as error:
            refused[i] = str(error)
    if not vectors:
        reason = next(iter(refused.values()), "none of its texts is without an instruction")
        raise TextsRefusedError(
            f"{target.name} refuses all texts of the stored reference vectors (proof/): {reason}"
        )
    places = list(vectors)
    own = [texts[i] for i in places]
    again = [row for row, text in enumerate(own) if _length(text) <= _LONG]
    repeated = [own[row] for row in again]
    alone = [_stacked(target, list(vectors.values()))]
    together = [row for row, text in enumerate(own) if _length(text) <= _VERY_LONG]
    batch = [alone[0].copy()]
    if together:
        batch[0][together] = _stacked(
            target, [batch[0][:0], _in_batches(target, [own[row] for row in together])]
        )
    for _ in range(repeat - 1 if again else 0):
        for made in (alone, batch):
            made.append(made[0].copy())
        alone[-1][again] = _stacked(target, [_embed(target, [text]) for text in repeated])
        batch[-1][again] = _in_batches(target, repeated)
    taken = tuple(i for i in chosen if first[i] in vectors)
    rows = [places.index(first[i]) for i in taken]
    return MeasuredVectors(
        taken,
        np.stack(alone)[:, rows],
        np.stack(batch)[:, rows],
        {i: refused[first[i]] for i in chosen if first[i] in refused},
        tuple(i for i in range(len(texts)) if i not in first),
    )


def _length(text: ProofText) -> int:
    return len(text.prompt) + len(text.text)


def _request_of(text: ProofText) -> tuple[str, ...]:
    """Return the key by which texts share one request: prompt, text and instruction, and for short
    texts also the role.
    """
    role = text.role if _length(text) <= _LONG else ""
    return (text.prompt, text.text, str(text.instruction), role)


def _in_batches(target: Target, texts: Sequence[ProofText]) -> np.ndarray:
    places = _batches([_length(one) for one in texts])
    parts = [_together(target, [texts[i] for i in batch]) for batch in places]
    return _stacked(target, parts)[np.argsort([i for batch in places for i in batch])]


def _batches(lengths: Sequence[int]) -> list[list[int]]:
    """Divide texts into batches of mixed lengths; return their indices, each in one batch.

    A text is padded to the longest of its batch, which costs time: beside long texts, of which
    some have a thousand tokens, are few short ones.
    """
    long = [i for i, length in enumerate(lengths) if length > _LONG]
    short = [i for i, length in enumerate(lengths) if length <= _LONG]
    beside, short = short[: len(long) // _TEXTS_OF_LONG], short[len(long) // _TEXTS_OF_LONG :]
    size = math.ceil(len(short) / TEXTS_PER_BATCH)
    batches = [short[start::size] for start in range(size)]
    for start in range(0, len(long), _TEXTS_OF_LONG):
        batches.append([*long[start : start + _TEXTS_OF_LONG], *beside[:1]])
        beside = beside[1:]
    return batches


def _together(target: Target, texts: Sequence[ProofText]) -> np.ndarray:
    """Embed a batch of texts; halve it if the target refuses that many tokens at once."""
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


def notes_on(proof: Proof, target: Target, measured: MeasuredVectors) -> tuple[str, ...]:
    """Sentences on what was assumed, left out or refused, and on what cannot be seen."""
    notes = [f"prompts: {target.assumed}"]
    if measured.left_out:
        notes.append(
            f"{len(measured.left_out)} texts with an instruction of their own are left out: the "
            "target has no place for it (--prompts client sends it as text)"
        )
    fit = refused_that_fit(proof, measured)
    if long := [i for i in measured.refused if i not in fit]:
        notes.append(
            f"{len(long)} texts beyond the length limit are refused, where the model cuts them: "
            f"{measured.refused[long[0]]}"
        )
    longest = max((one.tokens or 0 for one in proof.texts), default=0)
    if longest <= max(proof.lengths.values()):
        notes.append(
            f"no text is as long as the model's limit of {max(proof.lengths.values())} tokens, so "
            f"a server that cuts longer texts than {longest or 'these'} is not noticed"
        )
    notes += [f"the proof leaves out {reason}" for reason in proof.left_out]
    return tuple(notes)


def refused_that_fit(proof: Proof, measured: MeasuredVectors) -> list[int]:
    """Return the refused texts that are within the model's maximum length."""
    texts = proof.texts
    return [i for i in measured.refused if (texts[i].tokens or 0) <= proof.lengths[texts[i].role]]
