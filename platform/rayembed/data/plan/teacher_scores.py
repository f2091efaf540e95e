"""Scores of a row's positive and hard negatives, all from the model that mined or rescored them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.data.records import Record
from rayembed.errors import DataError

SCORES_COLUMN = "positive_cross_score"
"""Column of `parts.OPTIONAL` that plans of losses over a teacher's scores have."""

SCORES_OF_POSITIVES = {
    "positive_score": "positive_scores",
    SCORES_COLUMN: "positive_cross_scores",
}
"""Column of the first positive's score → column of all positives' scores (`parts.OPTIONAL`)."""


def teacher_scores(record: Record) -> tuple[float | None, list[float | None]]:
    """Return the scores of the record's first positive and of its negatives, all by one model: the
    cross-encoder if it scored them, else the teacher.
    """
    if record.positive_cross_score is not None:
        return record.positive_cross_score, [n.cross_score for n in record.negatives]
    return record.positive_score, [n.score for n in record.negatives]


def scores_of_positives(
    own: Sequence[float | None], crossed: Sequence[float | None] | None
) -> dict[str, Any]:
    """Make the fields of a record that hold the scores of its positives.

    Args:
        own: the teacher's, in the order of the positives.
        crossed: the cross-encoder's; None: there is none.
    """
    crossed = [None] * len(own) if crossed is None else crossed

    def of_several(scores: Sequence[float | None]) -> tuple[float | None, ...] | None:
        known = any(score is not None for score in scores)
        return tuple(scores) if len(scores) > 1 and known else None

    return {
        "positive_score": own[0],
        "positive_cross_score": crossed[0],
        "positive_scores": of_several(own),
        "positive_cross_scores": of_several(crossed),
    }


def scored_rows(table: pa.Table) -> np.ndarray:
    """(n,) bool mask of plan rows with known `teacher_scores` of the positive and of at least one
    negative.

    Args:
        table: n rows with `SCORES_COLUMN`, whose negatives are those that the stage takes.
    """
    negatives = table["negatives"].combine_chunks()
    rows = pc.list_parent_indices(negatives).to_numpy(zero_copy_only=False)
    flat = pc.list_flatten(negatives)

    def has(name: str) -> np.ndarray:
        known = pc.is_valid(pc.struct_field(flat, name)).to_numpy(zero_copy_only=False)
        return np.bincount(rows[known], minlength=len(table)) > 0

    def given(name: str) -> np.ndarray:
        return np.asarray(pc.is_valid(table[name]).to_numpy(), dtype=bool)

    by_teacher = given("positive_score") & has("score")
    return np.where(given(SCORES_COLUMN), has("cross_score"), by_teacher)


def score_counts(table: pa.Table) -> dict[str, dict[str, int]]:
    """Count for each data set the rows that are `scored`, and those `unscored`, which have hard
    negatives without scores.
    """
    scored = scored_rows(table)
    some = pc.greater(pc.list_value_length(table["negatives"]), 0).to_numpy().astype(bool)
    counts: dict[str, dict[str, int]] = {}
    for name, rows in (("scored", scored), ("unscored", some & ~scored)):
        for item in pc.value_counts(table["dataset"].filter(pa.array(rows))).to_pylist():
            found = counts.setdefault(item["values"], {"scored": 0, "unscored": 0})
            found[name] = item["counts"]
    return counts


def check_scored(
    stage: str, columns: Sequence[str], datasets: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise if the stage's loss reads teacher scores but no drawn row has any.

    Args:
        columns: those of `parts.OPTIONAL` that the loss asks for.
        datasets: entries of a plan's manifest.

    Raises:
        DataError: none has.
    """
    if SCORES_COLUMN not in columns or any(of["scores"]["scored"] for of in datasets.values()):
        return
    counts = ", ".join(f"0 of {drawn['drawn']:,} of {name}" for name, drawn in datasets.items())
    name = min(datasets)
    raise DataError(
        f"stage {stage!r}: its loss reads a teacher's scores of hard negatives, but none of the "
        f"rows that the stage draws has such scores ({counts}), so the model would learn nothing "
        f"from the teacher: set data.datasets.{name}.mining={{teacher: …}}, with pool=given for "
        "negatives that are already in the rows, or use a loss without scores "
        f"(stages.{stage}.loss={{kind: infonce}})"
    )
