"""Numbers that are not finite: one gradient, and a learning rate that leads to nothing else."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outcome import Trained, read_trained
from scene import FAULT_AT, STAGE, Scene, UnexpectedError, scene

BROKEN = Path(__file__).with_name("broken")
"""Folder of what breaks a gradient, on the PYTHONPATH of all processes."""

VARIABLE = "DRILL_NAN"


@contextmanager
def nan_on(worker: int) -> Iterator[None]:
    """In what is imported inside the block, the gradient of a worker's step is NaN."""
    path = Path(os.environ[VARIABLE])
    path.write_text(f"{worker} {FAULT_AT}")
    try:
        yield
    finally:
        path.unlink()


def nan_gradient(scene: Scene) -> tuple[str, str]:
    """On the second worker; the run goes to its end and counts one dropped step."""
    with nan_on(1):
        job = scene.submit()
        job.ends_with(0)
    job.line("1 step was without effect")
    return job.line(f"step {FAULT_AT} is dropped"), "nothing, or looks at the rows of the batch"


def without_that_step(place: Path, run_file: Path) -> Trained:
    """What the run leaves when the same gradient is NaN on the other worker: the step is left out
    on both, whichever of them broke it.
    """
    if not place.exists():
        with scene(place, run_file) as other, nan_on(0):
            job = other.submit()
            job.ends_with(0)
            job.line(f"step {FAULT_AT} is dropped")
    return read_trained(place / "outputs")


def diverging_rate(scene: Scene) -> tuple[str, str]:
    """A learning rate of 1e30: the run ends and leaves nothing, and one with the right rate ends
    well beside it.
    """
    job = scene.submit(f"stages.{STAGE}.optimizer.learning_rate=1e30", "name=hot")
    job.ends_with(1)
    folder = scene.storage / "runs" / "hot"
    left = [*folder.rglob("weights.safetensors"), *folder.rglob("model.safetensors")]
    if left or list(folder.rglob("step-*")):
        raise UnexpectedError(f"a run that diverged has left {left or 'a checkpoint'}")
    scene.submit().ends_with(0)
    return job.line("^error: .* were dropped"), "lowers the rate, submits under another name"
