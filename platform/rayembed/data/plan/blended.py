"""The `blended` policy: every batch draws from all data sets by share (NV-Embed)."""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rayembed.data.plan.sampling import (
    DatasetRows,
    EpochSampler,
    PlannedBatch,
    generator,
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
    """Batches of all steps, in order.

    Each batch holds each data set's share of rows; rounding remainders are carried to the next
    step, so that shares are exact to one row over any number of steps. Data sets are sampled by
    epoch in seeded permutations, without replacement. A row whose query text is already in the
    batch waits for the next one, unless its epoch has no other row left. A larger number of steps
    only extends the order.

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
                "batch.global_pairs or its weight, or add rows"
            )
    samplers = [EpochSampler(rows.name, rows.query_hash, seed, key) for rows in datasets]
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
