"""Measure NV-Embed's Tables 6 to 8 for one seed, each step only once."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rayembed.config.run import Run
from rayembed.pipeline.run.train import train
from rayembed_extras.compression.compress import compress, ready
from rayembed_papers.compression.runs import base_run, compression_run, recovery_run

METHODS = ("magnitude", "wanda", "sparsegpt")
STRUCTURES = ("2:4", "4:8", "unstructured")


@dataclass(frozen=True)
class MeasuredCell:
    """Row and column of a measured score in the table: method, recovery training and structure of
    zeros.
    """

    method: str
    structure: str
    recovery: str = ""
    """`labels`, `distilled` or none; quantised models were pruned by SparseGPT and distilled
    before."""


BASE = MeasuredCell("none", "")


def measure(
    seed: int, *, layers: int, steps: int, storage: str
) -> Iterator[tuple[MeasuredCell, float, float]]:
    """Yield each table cell with its score and its seconds of computation; stored results are not
    measured again.

    Raises:
        RayembedError: a step cannot be done; the same call goes on there.
    """
    base = base_run(seed, layers=layers, steps=steps, storage=storage)
    began = time.monotonic()
    folder, score = _trained(base)
    yield BASE, score, time.monotonic() - began
    for method in METHODS:
        for structure in STRUCTURES:
            label = f"{method}-{structure.replace(':', 'of')}"
            began = time.monotonic()
            way = {"kind": method, "structure": structure}
            ((pruned, score),) = _compressed(base, folder, [way], label)
            yield MeasuredCell(method, structure), score, time.monotonic() - began
            for recovery, teacher in (("labels", None), ("distilled", folder)):
                began = time.monotonic()
                run = recovery_run(base, pruned, label, steps=steps, teacher=teacher)
                recovered, score = _trained(run)
                yield MeasuredCell(method, structure, recovery), score, time.monotonic() - began
            if method == "sparsegpt":
                began = time.monotonic()
                ways = [{"kind": "gptq"}, {"kind": "fp8"}]
                found = _compressed(base, recovered, ways, f"{label}-quantised")
                seconds = (time.monotonic() - began) / len(ways)
                for asked, (_, score) in zip(ways, found, strict=True):
                    yield MeasuredCell(asked["kind"], structure), score, seconds


def _trained(run: Run) -> tuple[str, float]:
    """Train a run; return the folder of its model and the mean score."""
    outcome = train(run)
    assert outcome.trained is not None
    return outcome.model_folder, statistics.mean(outcome.trained.scores.values())


def _compressed(
    base: Run, model: str, ways: list[dict[str, str]], label: str
) -> list[tuple[str, float]]:
    """Compress a model; return the reference and the mean score of each variant."""
    result = compress(ready(compression_run(base, model, ways, label)))
    found = ((variant.made.reference, variant.mean) for variant in result.variants[1:])
    return [(reference, mean) for reference, mean in found if mean is not None]
