"""Events of a running trial. Independent of Ray."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.trials import Trial


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


Execute = Callable[[Sweep, Trial, Mapping[str, str], Callable[[Event], None]], None]
"""Runs a trial, given the sweep, the trial and the tags of its MLflow run, and reports events;
injected by the caller that knows training."""
