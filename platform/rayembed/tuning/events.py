"""Events of a running trial, and its start. Independent of Ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rayembed.assets.storage import join
from rayembed.config.document import fingerprint
from rayembed.config.run import Run
from rayembed.config.sweep import Sweep
from rayembed.tuning.trials import Trial, make_trial

KEEP_ALL_CHECKPOINTS = 1_000_000
"""Limit that keeps all checkpoints of a population's runs, as any of them may be continued."""


@dataclass(frozen=True)
class Event:
    """Event reported by a trial."""

    kind: Literal["score", "final", "problem", "known"]
    """Kind of the event. `score`: of one step. `final`: of the weights that the trial returns.
    `problem`: an error that the same input would raise again ended it. `known`: it had ended
    before, with this score."""
    global_step: int
    score: float
    """Score; NaN for a problem."""
    scores: dict[str, float] = field(default_factory=dict)
    """Scores by task."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Scores of the tasks evaluated after training."""
    problem: str = ""


@dataclass(frozen=True)
class Pointer:
    """Position of a population member, small enough for Ray Tune to copy."""

    member: str
    """Key of the member; a member that copies another's weights gets the other's pointer."""
    run: str
    step: int
    values: dict[str, str]
    origin: dict[str, Any] = field(default_factory=dict)
    """Run and step that this run continued from; empty for a fresh start."""


@dataclass(frozen=True)
class Start:
    """A run and its starting point."""

    run: Run
    after: int
    """Last step of the run whose score is known."""
    origin: dict[str, Any]
    """Run and step of the initial checkpoint; empty without one."""

    @property
    def checkpoint(self) -> str | None:
        """Storage folder of the initial checkpoint."""
        if not self.origin:
            return None
        stage = self.run.stages[0].name
        folder = join(self.run.placement.storage_path, "runs", str(self.origin["run"]), stage)
        return join(folder, "train", f"step-{int(self.origin['step']):07d}")


Execute = Callable[[Sweep, Start, Mapping[str, str], Callable[[Event], None]], None]
"""Runs a trial, given the sweep, its start and the tags of its MLflow run, and reports events;
injected by the caller that knows training."""


def start_of(
    sweep: Sweep, key: str, label: str, values: Mapping[str, str], at: Pointer | None
) -> Start:
    """Run with which a trial continues.

    Args:
        key: the trial's; of a population's member that of the values that it began with.
        at: where it stands, its own place or that of the member whose weights it takes over; None:
            at the beginning.
    """
    trial: Trial = make_trial(sweep, label, values)
    run = trial.run
    if sweep.scheduler.kind == "pbt":
        kept = {"keep_checkpoints": KEEP_ALL_CHECKPOINTS, "checkpoint_minutes": None}
        run = run.model_copy(update={"placement": run.placement.model_copy(update=kept)})
    if at is None:
        return Start(run, 0, {})
    # A member with another's pointer begins a run of its own, also with just the other's values.
    if at.member == key and dict(at.values) == dict(values):
        return Start(run.model_copy(update={"name": at.run}), at.step, dict(at.origin))
    name = f"{sweep.name}-{fingerprint([key, trial.key, at.run, at.step])[:8]}"
    return Start(run.model_copy(update={"name": name}), at.step, {"run": at.run, "step": at.step})
