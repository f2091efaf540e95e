"""Store one JSON file for each trial, from which a resubmitted sweep resumes.

    storage/sweeps/<sweep>/trials/<trial>.json

Written by the driver alone. Ray Tune's own state is not read back: it is pickled, and it is
written every few seconds, so that a killed driver could lose a trial that has ended.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from pydantic import TypeAdapter

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import exists, join, list_files

SEED = "seed"
"""Setting whose values are repetitions of one configuration."""

State = Literal["begun", "finished", "stopped", "failed"]


@dataclass(frozen=True)
class Report:
    """Scores of a trial after a training step."""

    global_step: int
    """Step counted over all stages."""
    score: float
    """Score that trials are compared by."""
    scores: dict[str, float]
    """Scores by task."""
    time: float
    """Time in seconds since 1970."""


@dataclass(frozen=True)
class Event:
    """Event reported by a running trial."""

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
class TrialRecord:
    """Record of one trial."""

    key: str
    """Name of its run."""
    label: str
    values: dict[str, str]
    state: State = "begun"
    """State of the trial; `begun`: it runs, or resumes when the sweep is submitted again.
    `stopped`: ended by the scheduler. `failed`: ended by an error."""
    reports: list[Report] = field(default_factory=list)
    final: Report | None = None
    """Scores of the final weights; only for a finished trial."""
    evaluation: dict[str, float] = field(default_factory=dict)
    """Scores of the tasks evaluated after training, for a finished trial that has them."""
    problem: str = ""

    @property
    def score(self) -> float | None:
        """The final score, or the last one before the end; None if there is no score."""
        if self.final is not None:
            return self.final.score
        return self.reports[-1].score if self.reports else None

    @property
    def has_score(self) -> bool:
        """Whether the trial's score is a finite number."""
        return self.score is not None and math.isfinite(self.score)

    @property
    def last_step(self) -> int:
        """Training step of the last score; 0 without a score."""
        last = self.final or next(reversed(self.reports), None)
        return 0 if last is None else last.global_step

    @property
    def is_done(self) -> bool:
        """Whether the trial has ended and need not run again."""
        return self.state in ("finished", "stopped")

    def reported(self, report: Report) -> "TrialRecord":
        """Copy the record with a new score, which replaces scores of the same and later steps."""
        kept = [r for r in self.reports if r.global_step < report.global_step]
        return replace(self, state="begun", problem="", reports=[*kept, report])


_RECORDS = TypeAdapter(TrialRecord)


class TrialStore:
    """Reads and writes the trial records of one sweep.

    Args:
        folder: the sweep's, in storage.
    """

    def __init__(self, folder: str) -> None:
        self._folder = join(folder, "trials")

    def read(self) -> dict[str, TrialRecord]:
        """Read all records by key, sorted by trial name.

        Raises:
            ArtifactError: a file is not what was written.
        """
        names = sorted(list_files(self._folder, recursive=False))
        found = [self._read(name) for name in names if name.endswith(".json")]
        return {record.key: record for record in found}

    def find(self, key: str) -> TrialRecord | None:
        """Read the record of one trial; None if it has no record.

        Raises:
            ArtifactError: the file is not what was written.
        """
        name = f"{key}.json"
        return self._read(name) if exists(join(self._folder, name)) else None

    def write(self, record: TrialRecord) -> None:
        """Write or replace a record.

        Raises:
            StorageError: the storage refuses it.
        """
        write_json(join(self._folder, f"{record.key}.json"), asdict(record), indent=1)

    def _read(self, name: str) -> TrialRecord:
        remedy = "Remove it to have the trial run again"
        return _RECORDS.validate_python(read_json(join(self._folder, name), remedy))


def best(records: Mapping[str, TrialRecord]) -> TrialRecord | None:
    """Return the finished trial with the best score; None if no trial has finished.

    Where the seed is searched, trials that differ in nothing else are repetitions, scored on the
    same held-out texts: of settings with as many finished repetitions as any those with the highest
    mean win, and of their trials the one with the highest final score. Of equal ones it is the
    first.
    """
    rows: dict[tuple[Any, ...], list[TrialRecord]] = {}
    for record in records.values():
        if record.state == "finished" and math.isfinite(_final(record)):
            values = sorted((path, v) for path, v in record.values.items() if path != SEED)
            repeated = (record.label, *values) if SEED in record.values else (record.key,)
            rows.setdefault(repeated, []).append(record)
    most = max(map(len, rows.values()), default=0)
    whole = [row for row in rows.values() if len(row) == most]
    found = max(whole, key=lambda row: statistics.fmean(map(_final, row)), default=[])
    return max(found, key=_final, default=None)


def _final(record: TrialRecord) -> float:
    return math.nan if record.final is None else record.final.score
