"""Judge whether measured vectors equal the reference vectors, or name the likely mistake.

A mistake is recognised by the share of the way from the right vectors to its own that the measured
ones have gone: 1 where it is made, 0 where rounding alone moves them, since rounding has no
direction. So a small mistake is seen in an int8 server, whose rounding moves vectors further.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed.proof.check import LENGTH_ERROR, changed_packages
from rayembed.proof.proof import Mistake, NumberType, Proof
from rayembed_extras.verification.advice import advice_for
from rayembed_extras.verification.cuts import find_cut, one_limit
from rayembed_extras.verification.measure import (
    MeasuredVectors,
    Target,
    notes_on,
    refused_that_fit,
)

_NOT_TOLD_APART = 3
"""Tolerances of float32 between two vectors that are no more told apart."""
_BETWEEN = 4
"""Tolerances between two vectors that are both within one of a third: angles add up."""
_SHARE = 0.5
"""Share of the way to a mistake's vectors, less two standard errors, from which it is named."""
_NAMED = 4
"""Texts or mistakes that a line names at most."""


@dataclass(frozen=True)
class Diagnosis:
    """Result of a verification: verdict, cosines, likely mistakes and advice."""

    same: bool
    line: str
    """The verdict in one line."""
    cosine: float
    """Lowest cosine of a text with its right vector, in all repetitions, alone and in batches."""
    number_type: NumberType | None
    """Strictest number type within whose tolerance all cosines are; None: none."""
    mistakes: tuple[str, ...] = ()
    """Names of the mistakes that explain the vectors; several cannot be told apart."""
    advice: tuple[str, ...] = ()
    """What to change in the server."""
    notes: tuple[str, ...] = ()
    """Further findings: assumptions, refused texts, texts that differ."""
    figures: Mapping[str, Any] | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the result as values for JSON."""
        return {
            "same": self.same,
            "verdict": self.line,
            "cosine": self.cosine,
            "within_tolerance_of": self.number_type,
            "mistakes": list(self.mistakes),
            "advice": list(self.advice),
            "notes": list(self.notes),
            **(self.figures or {}),
        }


@dataclass(frozen=True)
class _Explained:
    """A known mistake, and the measured vectors' distance from it."""

    mistake: Mistake
    distance: float
    """Mean of 1 - cosine with the mistake's vectors."""
    right_distance: float
    """Mean of 1 - cosine with the right vectors of the same texts."""
    share: float
    """Share of the way to the mistake's vectors."""
    error: float
    """Standard error of the share."""

    def is_made(self, rounding: float) -> bool:
        """Whether the mistake explains the vectors, apart from differences by rounding."""
        near = self.distance <= max(rounding, self.right_distance / 2)
        return near and self.share - 2 * self.error > _SHARE


def diagnose(
    proof: Proof, target: Target, measured: MeasuredVectors, *, within: NumberType = "bfloat16"
) -> Diagnosis:
    """Compare measured vectors with a model's proof (its stored reference vectors).

    Args:
        within: number type of the target: a verdict of `same` needs the cosines of its tolerance.
    """
    allowed = _types_within(proof, within)
    width = measured.alone.shape[2]
    right = proof.vectors[list(measured.texts)].astype(np.float64)
    alone, batch = _unit(measured.alone), _unit(measured.batch)
    figures = {
        "texts": len(measured.texts),
        "repetitions": len(alone),
        "refused": {str(i): reason for i, reason in measured.refused.items()},
        "left_out": list(measured.left_out),
        "dimensions": width,
        "software": target.software,
    }
    notes = notes_on(proof, target, measured)
    if width != right.shape[1]:
        return _other_width(proof, target, measured, right, notes, figures)
    to_right = (alone * _unit(right)).sum(2), (batch * _unit(right)).sum(2)
    worst = float(min(one.min() for one in to_right))
    steady = float(min(_steadiness(alone), _steadiness(batch)))
    figures |= {
        "cosine_alone": float(to_right[0].min()),
        "cosine_in_batch": float(to_right[1].min()),
        "cosine_of_repetitions": steady,
    }
    strictest = _strictest(proof, allowed, worst)
    problems: list[str] = []
    made: list[Mistake] = []
    least = _least_between(proof, allowed, float(to_right[0].min()))
    if steady < least:
        problems.append(
            f"another vector for the same text in another call; cosine {_shown(steady)}"
        )
    if worst < proof.tolerance[allowed[0]]:
        made, line = _turned(proof, measured, alone[0], batch[0], to_right, least)
        if all(one.name.startswith("cut_at_") for one in made):
            cut = find_cut(proof, target, measured)
            if cut is not None and cut.name not in {one.name for one in made}:
                made, line = [cut], f"{cut.what}; cosine {_shown(worst)}"
        if line is None and strictest is None and not problems:
            near = np.minimum(*(one.min(0) for one in to_right))
            made, line = _unknown(proof, measured, alone[0], near, proof.tolerance[allowed[-1]])
            if worst >= min(proof.tolerance.values()):
                line += "; int8 rounds as far: --within int8 if the server does"
        problems += [line] if line else []
    lengths = np.linalg.norm(measured.alone, axis=2)
    if proof.normalised and np.abs(lengths - 1).max() > LENGTH_ERROR:
        by_name = [one for one in proof.mistakes if _is_of_length(one)]
        what = by_name[0].what if by_name else "vectors that are not of length 1"
        made += by_name
        problems.append(f"{what}; lengths {lengths.min():.3g} to {lengths.max():.3g}")
    refused = refused_that_fit(proof, measured)
    if refused:
        about = proof.texts[refused[0]].about
        problems.append(
            f"{len(refused)} texts within the length limit are refused ({about}: "
            f"{measured.refused[refused[0]]})"
        )
    if problems:
        if target.in_process and (changed := changed_packages(proof)):
            notes += (f"{changed}, which may turn vectors, too",)
        advice = advice_for(proof, made, target.software)
        line = "; also: ".join(problems)
        names = tuple(one.name for one in made)
        return Diagnosis(False, line, worst, strictest, names, advice, notes, figures)
    return Diagnosis(True, _same(proof, strictest, worst), worst, strictest, (), (), notes, figures)


def _turned(
    proof: Proof,
    measured: MeasuredVectors,
    alone: np.ndarray,
    batch: np.ndarray,
    to_right: tuple[np.ndarray, np.ndarray],
    least: float,
) -> tuple[list[Mistake], str | None]:
    """Return the mistakes that change vectors' directions, and a sentence for the verdict.

    Args:
        alone: (n, D) unit vectors of texts alone, `batch` of texts in batches.
        to_right: cosines of all repetitions with the right vectors, alone and in batches.
        least: cosine between two vectors of a text that counts as the same.
    """
    of_alone, of_batch = (float(one.min()) for one in to_right)
    found, rows, where = _explained(proof, measured.texts, alone), alone, ""
    only_in_batch = of_batch < least <= of_alone
    if not found and only_in_batch:
        found, rows, where = _explained(proof, measured.texts, batch), batch, "in a batch, "
    if found:
        made = _alike(found, rows, measured.texts, proof)
        return made, f"{where}{_named(made)}; cosine {_shown(min(of_alone, of_batch))}"
    if only_in_batch:
        return [], (
            "other vectors for texts in a batch than for each alone; cosine "
            f"{_shown(of_batch)}, alone {_shown(of_alone)}"
        )
    return [], None


def _least_between(proof: Proof, allowed: Sequence[NumberType], alone: float) -> float:
    """Return the lowest cosine at which two vectors of one text count as the same.

    Args:
        alone: lowest cosine with a right vector, which shows the target's own number type.
    """
    own = _strictest(proof, allowed, alone) or allowed[-1]
    return 1 - _BETWEEN * (1 - proof.tolerance[own])


def _same(proof: Proof, strictest: NumberType | None, worst: float) -> str:
    if strictest in (None, "float32"):
        return f"same vectors (cosine ≥ {_floored(worst)})"
    return (
        f"same within the tolerance of {strictest} (cosine ≥ {_floored(worst)}, allowed "
        f"{proof.tolerance[strictest]:g})"
    )


def _types_within(proof: Proof, within: NumberType) -> list[NumberType]:
    """Return the number types whose tolerance is at most that of `within`, the strictest first."""
    order = sorted(proof.tolerance, key=lambda kind: -proof.tolerance[kind])
    return [kind for kind in order if proof.tolerance[kind] >= proof.tolerance[within]]


def _strictest(proof: Proof, allowed: Sequence[NumberType], worst: float) -> NumberType | None:
    return next((kind for kind in allowed if worst >= proof.tolerance[kind]), None)


def _explained(proof: Proof, texts: Sequence[int], found: np.ndarray) -> list[_Explained]:
    """Return the mistakes that explain the unit vectors (n, D) of the texts, the nearest first."""
    compared = [_compared(proof, one, texts, found) for one in _mistakes(proof)]
    rounding = _BETWEEN * (1 - min(proof.tolerance.values()))
    shown = [one for one in compared if one is not None and one.is_made(rounding)]
    return sorted(shown, key=lambda one: one.distance)


def _mistakes(proof: Proof) -> list[Mistake]:
    """Return the mistakes stored in a proof, without its entries for rounding to a number type."""
    return [one for one in proof.mistakes if one.name not in proof.tolerance]


def _compared(
    proof: Proof, mistake: Mistake, texts: Sequence[int], found: np.ndarray
) -> _Explained | None:
    """Compare unit vectors with a mistake's; None if too few texts or dimensions allow it."""
    rows = {text: row for row, text in enumerate(texts)}
    places = [i for i, text in enumerate(mistake.texts) if text in rows]
    if len(places) < 2 or mistake.vectors.shape[1] != found.shape[1] or _is_of_length(mistake):
        return None
    chosen = [mistake.texts[i] for i in places]
    own = _unit(mistake.vectors[places].astype(np.float64))
    right = _unit(proof.vectors[chosen].astype(np.float64))
    if _distance(own, right) < _least(proof):
        return None
    measured = found[[rows[text] for text in chosen]]
    share, error = _share(right, own, measured)
    return _Explained(mistake, _distance(measured, own), _distance(measured, right), share, error)


def _share(start: np.ndarray, end: np.ndarray, measured: np.ndarray) -> tuple[float, float]:
    """Share of the way from `start` to `end` that all rows together cover, with its
    standard error.
    """
    way = ((end - start) ** 2).sum(1)
    gone = ((measured - start) * (end - start)).sum(1)
    share = gone.sum() / way.sum()
    rest = way.sum() - way
    if (rest <= 0).any():
        return float(share), 0.0
    without = (gone.sum() - gone) / rest  # of each row: jackknife
    count = len(way)
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    return float(share), float(error)


def _alike(
    explained: Sequence[_Explained], found: np.ndarray, texts: Sequence[int], proof: Proof
) -> list[Mistake]:
    """Return the nearest mistake, and others that explain the vectors equally well."""
    best = explained[0]
    kinds = sorted(proof.tolerance.values(), reverse=True)
    tolerance = next((1 - low for low in kinds if best.distance <= 1 - low), best.distance)
    alike = [best.mistake]
    for other in explained[1:]:
        if other.distance > best.distance + _NOT_TOLD_APART * tolerance:
            continue
        common = [text for text in best.mistake.texts if text in other.mistake.texts]
        common = [text for text in common if text in texts]
        if len(common) < 2:
            alike.append(other.mistake)
            continue
        rows = found[[list(texts).index(text) for text in common]]
        nearest, further = (_vectors(one.mistake, common) for one in (best, other))
        if _distance(nearest, further) < _least(proof):
            alike.append(other.mistake)
            continue
        share, error = _share(further, nearest, rows)
        if share - 2 * error <= _SHARE:
            alike.append(other.mistake)
    return alike


def _vectors(mistake: Mistake, texts: Sequence[int]) -> np.ndarray:
    rows = [mistake.texts.index(text) for text in texts]
    return _unit(mistake.vectors[rows].astype(np.float64))


def _unknown(
    proof: Proof, measured: MeasuredVectors, found: np.ndarray, cosines: np.ndarray, floor: float
) -> tuple[list[Mistake], str]:
    """Return the verdict's sentence for vectors that no stored mistake explains, after a mistake
    that the lengths of the texts show, if any.
    """
    wrong = [measured.texts[i] for i in np.flatnonzero(cosines < floor)]
    if (made := one_limit(proof, wrong)) is not None:
        return [made], f"{made.what}; cosine {_shown(cosines.min())}"
    which = "all texts" if len(wrong) == len(measured.texts) else f"{len(wrong)} texts"
    about = list(dict.fromkeys(proof.texts[i].about for i in wrong if proof.texts[i].about))
    if about and len(wrong) < len(measured.texts):
        which += f" ({', '.join(about[:_NAMED])}{', …' if len(about) > _NAMED else ''})"
    line = (
        f"other vectors for {which}, by none of the known mistakes; cosine {_shown(cosines.min())}"
    )
    length = [len(proof.texts[i].prompt + proof.texts[i].text) for i in measured.texts]
    near = [length[i] for i in np.flatnonzero(cosines >= floor)]
    most = 2 * len(near) > len(length)
    if most and max(near) < min(length[i] for i in np.flatnonzero(cosines < floor)):
        limit = max(proof.lengths.values())
        line += f"; the longest texts alone: the server may cut them before {limit} tokens"
        return [], line
    compared = [_compared(proof, one, measured.texts, found) for one in _mistakes(proof)]
    alike = [one for one in compared if one and one.distance < one.right_distance / 2]
    if not alike:
        return [], line
    best = min(alike, key=lambda one: one.distance)
    line += f"; nearest is {best.mistake.what}, cosine {_shown(1 - best.distance)} with it"
    return [], line


def _other_width(
    proof: Proof,
    target: Target,
    measured: MeasuredVectors,
    right: np.ndarray,
    notes: tuple[str, ...],
    figures: Mapping[str, Any],
) -> Diagnosis:
    """Judge vectors that have another number of dimensions than the model's."""
    width, full = measured.alone.shape[2], right.shape[1]
    found = _unit(measured.alone[0])
    own = [one for one in proof.mistakes if one.vectors.shape[1] == width]
    shown = [
        one
        for mistake in own
        if (one := _compared_with_own(mistake, measured.texts, found)) is not None
        and one[0] <= 1 - min(proof.tolerance.values())
    ]
    made = [mistake for _, mistake in sorted(shown, key=lambda one: one[0])[:1]]
    line = f"vectors of {width} numbers where the model has {full}"
    cosine = 0.0
    if width < full:
        cosine = float((found * _unit(right[:, :width])).sum(1).min())
    if made:
        line = f"{made[0].what} ({line})"
    elif cosine >= min(proof.tolerance.values()):
        line = f"vectors cut to {width} numbers where the model has {full}"
        advice = f"ask for {full} numbers (dimensions, truncate_dim)"
        made = [Mistake(f"cut_to_{width}", line, advice, (), right[:0])]
    else:
        line += ": another model, or another of its layers"
    names = tuple(one.name for one in made)
    changes = advice_for(proof, made, target.software)
    return Diagnosis(False, line, cosine, None, names, changes, notes, figures)


def _compared_with_own(
    mistake: Mistake, texts: Sequence[int], found: np.ndarray
) -> tuple[float, Mistake] | None:
    rows = {text: row for row, text in enumerate(texts)}
    places = [i for i, text in enumerate(mistake.texts) if text in rows]
    if not places:
        return None
    own = _unit(mistake.vectors[places].astype(np.float64))
    return _distance(found[[rows[mistake.texts[i]] for i in places]], own), mistake


def _named(mistakes: Sequence[Mistake]) -> str:
    texts = [one.what for one in mistakes[:_NAMED]]
    if len(texts) == 1:
        return texts[0]
    return f"{' or '.join(texts)} (their vectors cannot be told apart)"


def _is_of_length(mistake: Mistake) -> bool:
    """Whether the mistake changes the length (norm) of vectors."""
    lengths = np.linalg.norm(mistake.vectors.astype(np.float64), axis=1)
    return bool(np.abs(lengths - 1).max() > LENGTH_ERROR)


def _least(proof: Proof) -> float:
    """Return the mean of 1 - cosine above which two sets of vectors count as different."""
    return _NOT_TOLD_APART * (1 - max(proof.tolerance.values()))


def _steadiness(vectors: np.ndarray) -> float:
    """Lowest cosine between the first and a later repetition, from vectors (R, n, D)."""
    return float((vectors * vectors[0]).sum(2).min())


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Mean over all rows of 1 - cosine between two arrays of unit vectors."""
    return float(1 - (one * other).sum(1).mean())


def _unit(vectors: np.ndarray) -> np.ndarray:
    unit: np.ndarray = vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)
    return unit


def _shown(cosine: float) -> str:
    return f"{cosine:.2f}" if cosine < 0.98 else f"{cosine:.5f}"


def _floored(cosine: float) -> str:
    """Format a cosine with 5 digits, rounded down."""
    return f"{np.floor(min(cosine, 1.0) * 1e5) / 1e5:.5f}"
