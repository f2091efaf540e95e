"""What a trial tells while it runs, and how it is started. Knows no Ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayembed.assets.storage import join
from rayembed.config.document import fingerprint
from rayembed.config.run import Run
from rayembed.config.sweep import Sweep
from rayembed.tuning.trials import Trial, make_trial

KEEP_ALL_CHECKPOINTS = 1_000_000
"""Of a population's runs: another member may go on from any of them."""


@dataclass(frozen=True)
class Event:
    """Something that a trial tells."""

    kind: Literal["score", "final", "problem", "known"]
    """`score`: of one step. `final`: of the weights that it hands on. `problem`: it has ended by an
    error that the same input would raise again. `known`: it had ended before, with this score."""
    global_step: int
    score: float
    """NaN with a problem."""
    scores: dict[str, float] = field(default_factory=dict)
    """By task."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Of the tasks after training."""
    problem: str = ""


@dataclass(frozen=True)
class Pointer:
    """Where a member of a population stands: small enough for Ray Tune to copy about."""

    member: str
    """Its key: a member that takes over another's weights gets the other's pointer."""
    run: str
    step: int
    values: dict[str, str]
    origin: dict[str, Any] = field(default_factory=dict)
    """Run and step that this run itself went on from; empty: it began."""


@dataclass(frozen=True)
class Start:
    """A run, and where it goes on from."""

    run: Run
    after: int
    """Scores up to this step of the run are known."""
    origin: dict[str, Any]
    """Run and step whose checkpoint it begins with; empty: none."""

    @property
    def checkpoint(self) -> str | None:
        """Folder in storage of that checkpoint."""
        if not self.origin:
            return None
        stage = self.run.stages[0].name
        folder = join(self.run.placement.storage_path, "runs", str(self.origin["run"]), stage)
        return join(folder, "train", f"step-{int(self.origin['step']):07d}")


Execute = Callable[[Sweep, Start, Mapping[str, str], Callable[[Event], None]], None]
"""Runs a trial of (the sweep, its start, tags of its MLflow run), and tells its events; handed in
by whoever knows training."""


def start_of(
    sweep: Sweep, key: str, label: str, values: Mapping[str, str], at: Pointer | None
) -> Start:
    """The run that a trial goes on with.

    Args:
        key: the trial's; of a population's member that of the values that it began with.
        at: where it stands, its own place or that of the member whose weights it takes over; None:
            at the beginning.
    """
    trial: Trial = make_trial(sweep, label, values)
    run = trial.run
    if sweep.scheduler.kind == "pbt":
        kept = {"keep_checkpoints": KEEP_ALL_CHECKPOINTS}
        run = run.model_copy(update={"placement": run.placement.model_copy(update=kept)})
    if at is None:
        return Start(run, 0, {})
    # A member with another's pointer begins a run of its own, also with just the other's values.
    if at.member == key and dict(at.values) == dict(values):
        return Start(run.model_copy(update={"name": at.run}), at.step, dict(at.origin))
    name = f"{sweep.name}-{fingerprint([key, trial.key, at.run, at.step])[:8]}"
    return Start(run.model_copy(update={"name": name}), at.step, {"run": at.run, "step": at.step})
