"""Find the length at which a server cuts texts, and cut vectors to fewer dimensions."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayembed.errors import ConfigError
from rayembed.proof.proof import Mistake, Proof, ProofText
from rayembed_extras.verification.advice import length_advice
from rayembed_extras.verification.measure import MeasuredVectors, Target, TextsRefusedError

_SAME = 1 - 1e-5
"""Cosine of two texts of which a server reads the same tokens."""
_WITHOUT_END = 0.98
"""Largest share of a text that gives the vector of the whole one only where the rest is not
read."""
_PRECISION = 0.02
"""Precision of the measured length, relative."""
_NEAR = 0.08
"""Relative distance to a usual length at which it is meant."""
_USUAL = tuple(2**power for power in range(5, 17))
_FEWEST = 16
"""Tokens below which nothing is a cut: the server may give the same vector for all texts."""


def find_cut(proof: Proof, target: Target, measured: MeasuredVectors) -> Mistake | None:
    """Measure at which length a server cuts texts, by embedding the beginning of one that has
    another vector than it should; None if it reads the whole text.

    The beginning has the vector of the whole text only if the server reads no more of it. About ten
    more texts are embedded, if it cuts, and else one.
    """
    whole = {text: _unit(measured.alone[0][row]) for row, text in enumerate(measured.texts)}
    right = {i: _unit(proof.vectors[i]) for i in whole if proof.texts[i].tokens}
    least = proof.tolerance["float32"]
    changed = [i for i in right if float(whole[i] @ right[i]) < least]
    if not changed:
        return None
    chosen = max(changed, key=lambda i: proof.texts[i].tokens or 0)
    text = proof.texts[chosen]

    def is_enough(characters: int) -> bool:
        try:
            found = target.embed([replace(text, text=text.text[:characters])])
        except TextsRefusedError:
            return False
        return float(_unit(np.asarray(found, np.float64)[0]) @ whole[chosen]) >= _SAME

    limit = max(proof.lengths.values())
    share = min(_WITHOUT_END, (proof.lengths[text.role] - 2) / (text.tokens or 1))
    low, high = 1, int(share * len(text.text))
    if not is_enough(high):
        return None
    while high - low > max(1, _PRECISION * high):
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    number = _usual(_tokens(proof, chosen, high), tuple(proof.lengths.values()))
    if number < _FEWEST:
        return None
    what = f"texts cut at about {number} tokens where the model reads {limit}"
    return Mistake(f"cut_at_{number}", what, length_advice(limit), (), proof.vectors[:0])


def one_limit(proof: Proof, wrong: Sequence[int]) -> Mistake | None:
    """Return the mistake of a target that reads texts of both roles to the longer of the model's
    two limits; None if other texts have wrong vectors, too.

    Args:
        wrong: indices of the texts with another vector than they should have.
    """
    short, long = sorted(proof.lengths, key=lambda role: proof.lengths[role])
    limit = proof.lengths[short]
    texts = [proof.texts[i] for i in wrong]
    # A token has at least one byte; of the texts that were made to a length the tokens are known.
    beyond = all(
        one.role == short and (one.tokens or len((one.prompt + one.text).encode())) > limit
        for one in texts
    )
    shown = any((one.tokens or 0) > limit for one in texts)
    if not (beyond and shown) or limit == proof.lengths[long]:
        return None
    plural = {"query": "queries", "document": "documents"}
    what = (
        f"one length limit in the target, where the model reads {limit} tokens of {plural[short]} "
        f"and {proof.lengths[long]} of {plural[long]}"
    )
    advice = (
        f"cut {plural[short]} to {limit} tokens before they are sent, or serve them by a server of "
        "their own with this limit"
    )
    return Mistake("one_limit", what, advice, (), proof.vectors[:0])


def _tokens(proof: Proof, chosen: int, characters: int) -> float:
    """Estimate the tokens of the beginning of a text, between texts of known length."""
    role = proof.texts[chosen].role
    known = sorted(
        (len(one.prompt) + len(one.text), one.tokens)
        for one in proof.texts
        if one.tokens and one.role == role
    )
    lengths, tokens = zip((0, 0), *known, strict=True)
    return float(np.interp(len(proof.texts[chosen].prompt) + characters, lengths, tokens))


def _usual(tokens: float, limits: Sequence[int]) -> int:
    """Return the usual length that is near a measured one, else the measured one."""
    nearest = min((*_USUAL, *limits), key=lambda one: abs(one - tokens))
    return nearest if abs(nearest - tokens) <= _NEAR * nearest else round(tokens)


def narrowed(proof: Proof, width: int) -> Proof:
    """Return the proof of the same model with all vectors cut to `width` numbers and normalised.

    Raises:
        ConfigError: the model's vectors have fewer numbers.
    """
    from rayembed.proof.write import tolerances

    full = proof.dimensions[0]
    if not 1 <= width <= full:
        raise ConfigError(
            f"dimensions = {width} (--dimensions): the model has vectors of {full} numbers; give 1 "
            f"to {full}, it is trained for {', '.join(map(str, proof.dimensions))}"
        )
    if width == full:
        return proof
    right = _rows(proof.vectors[:, :width])
    mistakes = []
    for one in proof.mistakes:
        if one.name == f"cut_to_{width}":
            continue
        vectors = one.vectors[:, :width]
        is_length = one.name == "no_normalisation"
        mistakes.append(replace(one, vectors=vectors if is_length else _rows(vectors)))
    return replace(
        proof,
        dimensions=(width, *(one for one in proof.dimensions if one < width)),
        vectors=right,
        mistakes=tuple(mistakes),
        tolerance=tolerances(right, mistakes),
    )


def cutting(target: Target, width: int) -> tuple[Target, set[int]]:
    """Return the target with its vectors cut to `width` numbers, and a set that collects the
    widths of those that were longer. Their length (norm) stays.
    """
    uncut: set[int] = set()

    def embed(texts: Sequence[ProofText]) -> np.ndarray:
        found = np.asarray(target.embed(texts), np.float64)
        if found.ndim != 2 or found.shape[1] <= width:
            return found
        uncut.add(found.shape[1])
        cut: np.ndarray = _rows(found[:, :width]) * np.linalg.norm(found, axis=1, keepdims=True)
        return cut

    return replace(target, embed=embed), uncut


def not_cut(given: int, full: int, width: int) -> Mistake:
    """Return the mistake of a target that gives `given` numbers where it is to cut the model's
    `full` ones to `width`.
    """
    what = f"vectors of {given} numbers where {width} are right: the target did not cut them"
    if given == full:
        what = f"all {full} numbers of the vectors: the target did not cut them to {width}"
    advice = (
        f"have the server cut vectors to {width} numbers: requests ask for it by dimensions "
        "(Cohere's schema: output_dimension), which it ignores or refuses if it is an address; or "
        f"take the first {width} numbers after it, divided by their length"
    )
    return Mistake("not_cut", what, advice, (), np.empty((0, width), np.float32))


def _rows(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), np.float32)


def _unit(vector: np.ndarray) -> np.ndarray:
    unit: np.ndarray = _rows(np.asarray(vector, np.float64)[None])[0].astype(np.float64)
    return unit
