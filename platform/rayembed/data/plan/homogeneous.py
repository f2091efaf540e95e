"""The `homogeneous` policy: every batch has a single data set and language.

As in Nomic Embed v2 (section 4.3) and Causal2Vec (its experimental details): a query's negatives
are then of its own kind and not recognisable by another data set's style.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from rayembed.data.plan.sampling import (
    DatasetRows,
    EpochSampler,
    PlannedBatch,
    sequence,
    shares,
    whole_numbers,
)
from rayembed.errors import DataError


def homogeneous(
    datasets: Sequence[DatasetRows],
    global_pairs: int,
    num_steps: int,
    seed: int,
    key: str,
    temperature: float | None = None,
) -> Iterator[PlannedBatch]:
    """Batches of all steps, in order.

    Steps are divided among data sets by share, and a data set's steps among its languages by rows
    to the power 1/T (None: by rows), in whole numbers by largest remainder. The steps are in seeded
    order. Rows are drawn as in `blended`, separately for each language. Another number of steps
    gives another order.

    Args:
        datasets: with `language_hash`; each language has rows for a batch, see `large_enough`. One
            without rows has weight 0.
        key: names the stage, so that two stages with one seed differ.
        temperature: T.

    Raises:
        DataError: a language has fewer rows than a batch.
    """
    num_rows = [len(rows.query_hash) for rows in datasets]
    share = shares([rows.weight for rows in datasets], num_rows, temperature)
    steps_of = whole_numbers(share * num_steps, num_steps)
    dataset_of: list[int] = []
    rows_of: list[np.ndarray] = []
    samplers: list[EpochSampler] = []
    counts: list[int] = []
    for number, rows in enumerate(datasets):
        if not len(rows.query_hash):
            continue
        assert rows.language_hash is not None
        languages, sizes = np.unique(rows.language_hash, return_counts=True)
        if sizes.min() < global_pairs:
            raise DataError(
                f"data set {rows.name!r} has a language with {sizes.min()} rows, fewer than one "
                f"batch of {global_pairs} pairs; lower batch.global_pairs or leave it out"
            )
        parts = shares([1.0] * len(sizes), sizes.tolist(), temperature or 1.0)
        steps = int(steps_of[number])
        counts += whole_numbers(parts * steps, steps).tolist()
        by_language = np.split(np.argsort(rows.language_hash, kind="stable"), sizes.cumsum()[:-1])
        for language, chosen in zip(languages.tolist(), by_language, strict=True):
            dataset_of.append(number)
            rows_of.append(chosen)
            samplers.append(
                EpochSampler(f"{rows.name}\0{language}", rows.query_hash[chosen], seed, key)
            )
    for group in sequence(np.array(counts), seed, key).tolist():
        drawn = samplers[group].draw(global_pairs, set())
        yield PlannedBatch(
            np.full(global_pairs, dataset_of[group], dtype=np.int32), rows_of[group][drawn]
        )


def large_enough(language_hash: np.ndarray, global_pairs: int) -> np.ndarray:
    """(n,) bool mask of rows whose language has enough rows for at least one batch.

    Args:
        language_hash: (n,) int64.
    """
    _, place, sizes = np.unique(language_hash, return_inverse=True, return_counts=True)
    return np.asarray(sizes[place] >= global_pairs)
