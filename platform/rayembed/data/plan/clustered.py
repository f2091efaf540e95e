"""The `clustered` policy: batches as contextual clustering packed them (CDE, section 4.1)."""

from collections.abc import Iterator, Sequence

import numpy as np

from rayembed.data.plan.sampling import (
    DatasetRows,
    PlannedBatch,
    generator,
    sequence,
    shares,
    whole_numbers,
)


def clustered(
    datasets: Sequence[DatasetRows],
    global_pairs: int,
    num_steps: int,
    seed: int,
    key: str,
    temperature: float | None = None,
) -> Iterator[PlannedBatch]:
    """Batches of all steps, in order.

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
    """Infinite iterator of batch numbers, each epoch in another order."""
    epoch = 0
    while True:
        yield from generator(seed, key, name, epoch).permutation(count).tolist()
        epoch += 1
