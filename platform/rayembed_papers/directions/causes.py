"""List likely causes why a paper's claim is reversed at a small size."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rayembed.config.override import override
from rayembed.config.run import Run


@dataclass(frozen=True)
class Cause:
    """A likely cause of a claim's reversal at a small size, and the change of settings that would
    show it.
    """

    name: str
    change: Callable[[Run], Run]
    """Change applied to both runs."""


def with_steps(factor: int, run: Run) -> Run:
    """Copy a run with a multiple of its training steps and of its learning-rate decay steps."""
    changes = [f"stages.{s.name}.steps={factor * s.steps}" for s in run.stages]
    for stage in run.stages:
        decay_steps = getattr(stage.optimizer, "decay_steps", None)
        if decay_steps is not None:  # first, as it must be no fewer than the steps
            path = f"stages.{stage.name}.optimizer.decay_steps"
            changes.insert(0, f"{path}={factor * decay_steps}")
    return override(run, changes)


def _temperature(value: float, run: Run) -> Run:
    return override(run, [f"stages.{s.name}.loss.temperature={value}" for s in run.stages])


def _batches(factor: int, run: Run) -> Run:
    changes = [
        f"stages.{s.name}.batch.global_pairs={factor * s.batch.global_pairs}" for s in run.stages
    ]
    for dataset in run.data.datasets:
        if dataset.clusters is not None:
            path = f"data.datasets.{dataset.name}.clusters.batch_pairs"
            changes.append(f"{path}={factor * dataset.clusters.batch_pairs}")
    return override(run, changes)


def _layers(number: int, run: Run) -> Run:
    return override(run, [f"model.backbone.num_layers={number}"])


LONGER = Cause("three times the steps", partial(with_steps, 3))
DEEPER = Cause("six layers", partial(_layers, 6))
LARGER = Cause("four times the pairs a step", partial(_batches, 4))
COLDER = Cause("temperature 0.02", partial(_temperature, 0.02))
