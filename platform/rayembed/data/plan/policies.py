"""Batching policies: which rows share a batch.

`blended`: every batch draws from all data sets by share (NV-Embed). `homogeneous`: every batch has
a single data set and language, as in Nomic Embed v2 (section 4.3) and Causal2Vec (its experimental
details); a query's negatives are then of its own kind and not recognisable by another data set's
style. `clustered`: batches as contextual clustering packed them (CDE, section 4.1).
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rayembed.data.plan.sampling import (
    DatasetRows,
    EpochSampler,
    PlannedBatch,
    frequent,
    generator,
    rows_of_queries,
    sequence,
    shares,
    whole_numbers,
)
from rayembed.errors import DataError


def blended(
    datasets: Sequence[DatasetRows],
    global_pairs: int,
    num_steps: int,
    seed: int,
    key: str,
    temperature: float | None = None,
) -> Iterator[PlannedBatch]:
    """Yield the batches of all steps, each mixed from all data sets by their shares.

    Each batch holds each data set's share of rows; rounding remainders are carried to the next
    step, so that shares are exact to one row over any number of steps. Data sets are sampled by
    epoch in seeded permutations, without replacement. A row whose query text is already in the
    batch waits for the next one, unless its epoch has no other row left. Of a query that more rows
    of a data set have than its epoch has batches, the rows of all data sets are spread over their
    epochs, several in a batch. A larger number of steps only extends the order.

    Args:
        key: names the stage, so that two stages with one seed differ.
        temperature: of the shares; None: the weights alone.

    Raises:
        DataError: a data set has fewer rows than a batch takes of it.
    """
    share = shares([r.weight for r in datasets], [len(r.query_hash) for r in datasets], temperature)
    for rows, part in zip(datasets, share.tolist(), strict=True):
        needed = min(global_pairs, math.ceil(part * global_pairs - 1e-9))
        if len(rows.query_hash) < needed:
            raise DataError(
                f"data set {rows.name!r} has {len(rows.query_hash)} rows, but each batch of "
                f"{global_pairs} pairs takes up to {needed} of them (share {part:.4g}); lower "
                "batch.global_pairs or the weight of the data set, or add rows"
            )
    spread = {
        query
        for rows, part in zip(datasets, share.tolist(), strict=True)
        for query in frequent(rows.query_hash, math.ceil(part * global_pairs))
    }
    samplers = [
        EpochSampler(
            rows.name, rows.query_hash, seed, key, rows_of_queries(rows.query_hash, spread)
        )
        for rows in datasets
    ]
    owed = np.zeros(len(datasets))
    for step in range(num_steps):
        owed += share * global_pairs
        counts = whole_numbers(owed, global_pairs)
        owed -= counts
        used: set[int] = set()
        drawn = [
            sampler.draw(int(count), used) for sampler, count in zip(samplers, counts, strict=True)
        ]
        places = np.repeat(np.arange(len(datasets), dtype=np.int32), counts)
        mixed = generator(seed, key, "slots", step).permutation(global_pairs)
        yield PlannedBatch(places[mixed], np.concatenate(drawn)[mixed])


def homogeneous(
    datasets: Sequence[DatasetRows],
    global_pairs: int,
    num_steps: int,
    seed: int,
    key: str,
    temperature: float | None = None,
) -> Iterator[PlannedBatch]:
    """Yield the batches of all steps, each from a single data set and language.

    Steps are divided among data sets by share, and a data set's steps among its languages by rows
    to the power 1/T (None: by rows), in whole numbers by largest remainder. The steps are in seeded
    order. Rows are drawn as in `blended`, separately for each language. Another number of steps
    gives another order.

    Args:
        datasets: with `rows_of`; each language has rows for a batch. One without rows has weight
            0.
        key: names the stage, so that two stages with one seed differ.
        temperature: T.

    Raises:
        DataError: a language has fewer rows than a batch.
    """
    num_rows = [len(rows.query_hash) for rows in datasets]
    share = shares([rows.weight for rows in datasets], num_rows, temperature)
    steps_of = whole_numbers(share * num_steps, num_steps)
    dataset_of: list[int] = []
    firsts: list[int] = []
    samplers: list[EpochSampler] = []
    counts: list[int] = []
    for number, rows in enumerate(datasets):
        if not len(rows.query_hash):
            continue
        assert rows.rows_of is not None
        sizes = list(rows.rows_of.values())
        if min(sizes) < global_pairs:
            raise DataError(
                f"data set {rows.name!r} has a language with {min(sizes)} rows, fewer than one "
                f"batch of {global_pairs} pairs; lower batch.global_pairs or leave this language "
                "out"
            )
        parts = shares([1.0] * len(sizes), sizes, temperature or 1.0)
        steps = int(steps_of[number])
        counts += whole_numbers(parts * steps, steps).tolist()
        first = 0
        for language, size in rows.rows_of.items():
            dataset_of.append(number)
            firsts.append(first)
            queries = rows.query_hash[first : first + size]
            spread = rows_of_queries(queries, frequent(queries, global_pairs))
            samplers.append(EpochSampler(f"{rows.name}\0{language}", queries, seed, key, spread))
            first += size
    for group in sequence(np.array(counts), seed, key).tolist():
        drawn = samplers[group].draw(global_pairs, set())
        yield PlannedBatch(
            np.full(global_pairs, dataset_of[group], dtype=np.int32), firsts[group] + drawn
        )


def clustered(
    datasets: Sequence[DatasetRows],
    global_pairs: int,
    num_steps: int,
    seed: int,
    key: str,
    temperature: float | None = None,
) -> Iterator[PlannedBatch]:
    """Yield the batches of all steps, each as contextual clustering made it.

    Steps are divided among data sets by share, in whole numbers by largest remainder, and mixed in
    seeded order. A data set's batches come in seeded permutations, one for each epoch, without
    replacement. Rows of a batch are mixed over its slots, so that workers get similar ones. Another
    number of steps gives another order.

    Args:
        datasets: batch b of a data set is its rows [b·G, (b + 1)·G).
        key: names the stage, so that two stages with one seed differ.
        temperature: of the shares; None: the weights alone.
    """
    num_rows = [len(rows.query_hash) for rows in datasets]
    assert all(count and count % global_pairs == 0 for count in num_rows), num_rows
    share = shares([rows.weight for rows in datasets], num_rows, temperature)
    steps_of = whole_numbers(share * num_steps, num_steps)
    samplers = [
        _batches(rows.name, count // global_pairs, seed, key)
        for rows, count in zip(datasets, num_rows, strict=True)
    ]
    for step, number in enumerate(sequence(steps_of, seed, key).tolist()):
        first = next(samplers[number]) * global_pairs
        mixed = generator(seed, key, "slots", step).permutation(global_pairs)
        yield PlannedBatch(np.full(global_pairs, number, dtype=np.int32), first + mixed)


def _batches(name: str, count: int, seed: int, key: str) -> Iterator[int]:
    """Yield batch numbers without end, in another seeded order in each epoch."""
    epoch = 0
    while True:
        yield from generator(seed, key, name, epoch).permutation(count).tolist()
        epoch += 1
