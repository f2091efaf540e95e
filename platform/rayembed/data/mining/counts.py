"""Mining statistics: counts, histograms and examples, summed over all parts."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import join
from rayembed.data.engine.parts import remedy
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import mixed, text_hash
from rayembed.data.mining.candidates import EMPTY, REASONS, MinedCandidates
from rayembed.data.records import Record

EXAMPLES = 20
"""Examples shown in the audit, over all rows."""

HISTOGRAM_EDGES = np.linspace(-1.0, 1.0, 101)
"""Edges of 100 bins of width 0.02; cosines outside by rounding count in the outer bins."""

_COUNTS = ("mined", "without_negatives", "short", "vague", "candidates")
_SHOWN_CHARACTERS = 300


def histogram(scores: np.ndarray) -> list[int]:
    """Count the scores in each of the 100 bins of `HISTOGRAM_EDGES`."""
    inside = np.clip(scores.astype(np.float64), -1.0, 1.0)
    counts: list[int] = np.histogram(inside, bins=HISTOGRAM_EDGES)[0].tolist()
    return counts


def refused_counts(lists: Sequence[MinedCandidates], copies: int, given: int) -> dict[str, int]:
    """Count the refused candidates by reason, over all rows and teachers; reasons without any
    candidate are left out.

    Args:
        copies: near-duplicates that were met while negatives were chosen.
        given: negatives that rows bring and that are positives; no candidates.
    """
    status = np.concatenate([candidates.status.ravel() for candidates in lists])
    counts = np.bincount(status, minlength=max(REASONS) + 1)
    by_reason = {name: int(counts[code]) for code, name in REASONS.items()}
    by_reason["near-duplicate of a positive"] += copies
    by_reason["given, but a positive"] = given
    return {name: count for name, count in by_reason.items() if count}


def count_candidates(lists: Sequence[MinedCandidates]) -> int:
    """Count the candidates that mining considered, over all rows and teachers."""
    return sum(int((candidates.status != EMPTY).sum()) for candidates in lists)


def rows_to_show(records: Sequence[Record]) -> list[tuple[int, int]]:
    """Sort keys and row numbers of the rows that serve as examples: those with the lowest id
    hashes.
    """
    keys = mixed(np.array([text_hash(record.id) for record in records], dtype=np.int64))
    return [(int(keys[row]), int(row)) for row in np.argsort(keys, kind="stable")[:EXAMPLES]]


def example(
    record: Record, refused: Sequence[tuple[str, float]], positive_score: float
) -> dict[str, Any]:
    """Describe one mined row for the audit page: query, positive, negatives and refused
    candidates.

    Args:
        refused: texts that the rule refused, with the scores by which it did.
        positive_score: what the rule went by.
    """
    return {
        "query": _shown(record.query),
        "positive": _shown(record.positives[0]),
        "positive_score": round(positive_score, 4),
        "negatives": [
            {
                "text": _shown(negative.text),
                "score": _rounded(negative.score),
                "rank": negative.rank,
                "rule": negative.rule,
                "teacher": negative.teacher,
                "cross_score": _rounded(negative.cross_score),
            }
            for negative in record.negatives
        ],
        "refused": [{"text": _shown(text), "score": round(score, 4)} for text, score in refused],
    }


def write_examples(folder: str, part: str, examples: Mapping[int, Mapping[str, Any]]) -> None:
    """Write the examples of a mining unit under their sort keys, for `add_up_mining`."""
    values = {str(order): one for order, one in examples.items()}
    write_json(join(folder, f"{part}.json"), values)


def add_up_blocks(results: Sequence[Result]) -> Result:
    """Sum the results of all blocks of parts within a unit."""
    return {
        **_sums(results),
        "rows_in": sum(result["rows_in"] for result in results),
        "rows_out": sum(result["rows_out"] for result in results),
        "rejected": {},
        "parts": [part for result in results for part in result["parts"]],
    }


def add_up_mining(results: Sequence[Result], folder: str) -> dict[str, Any]:
    """Make the manifest entries of mining: statistics summed over all results, and examples read
    from `folder`.
    """
    return {**_sums(results), "mining_examples": shown_examples(results, folder)}


def _sums(results: Sequence[Result]) -> dict[str, Any]:
    refused: Counter[str] = Counter()
    for result in results:
        refused.update(result["refused"])
    return {
        **{name: sum(result[name] for result in results) for name in _COUNTS},
        "refused": dict(sorted(refused.items())),
        "histograms": [
            {
                name: np.sum([one[name] for one in of_teacher], axis=0).tolist()
                for name in of_teacher[0]
            }
            for of_teacher in zip(*(result["histograms"] for result in results), strict=True)
        ],
    }


def shown_examples(results: Sequence[Result], folder: str) -> list[dict[str, Any]]:
    """Read the examples that the manifest shows: those with the lowest sort keys over all
    parts.

    Args:
        results: `part`, and the orders of its examples, `examples_at`.
        folder: what `write_examples` was given; only the files of rows that are shown are read.
    """
    shown = heapq.nsmallest(
        EXAMPLES, ((order, r["part"]) for r in results for order in r["examples_at"])
    )
    files = {
        part: read_json(path := join(folder, f"{part}.json"), remedy(path))
        for part in dict.fromkeys(part for _, part in shown)
    }
    return [files[part][str(order)] for order, part in shown]


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _rounded(score: float | None) -> float | None:
    return None if score is None else round(score, 4)
