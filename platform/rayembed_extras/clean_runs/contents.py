"""Describe what a storage contains, as read from its file listing, and the request to free some of
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rayembed.errors import ConfigError

# Written by rooms that import torch, which a list of files does not need.
MANIFEST, RUN_FILE, SWEEP_FILE, MADE_OF = "manifest.json", "run.yaml", "sweep.yaml", "made-of.json"
STATE_FOLDER = "train"
"""Folder of a stage's checkpoints, within the stage's folder."""

CHECKPOINTS, MODELS, MIXTURES = "checkpoints", "models", "mixtures"
WEIGHTS, SCORES, REST = "weights", "scores", "rest"
PARTS = (CHECKPOINTS, MODELS, MIXTURES, WEIGHTS, SCORES, REST)
"""Parts of a run, in the order in which they are shown."""

State = Literal["running", "done", "stopped", "failed", "interrupted"]
"""State of a run; `stopped`: a trial that its sweep's scheduler ended and that never resumes."""


@dataclass(frozen=True)
class TrackedRun:
    """Ids of the MLflow run that belongs to a training run, as recorded in its folder."""

    tracking_uri: str
    experiment_id: str
    run_id: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TrackedRun | None":
        """Read the ids of the MLflow run from a file's content; None if an id is missing."""
        names = ("tracking_uri", "experiment_id", "run_id")
        return cls(*(str(values[name]) for name in names)) if values.keys() >= {*names} else None


@dataclass(frozen=True)
class StoredRun:
    """A run or a sweep in storage."""

    kind: str
    """`RUNS` or `SWEEPS`: the storage folder that contains it."""
    name: str
    state: State
    written: float
    """Time of its end, or of the last write to its files, in seconds since 1970."""
    parts: Mapping[str, int]
    """Part → bytes."""
    text: str
    """Content of the files that name the data and models the run uses."""
    names_data: bool
    """Whether these files name the prepared data that the run uses."""
    keeps_states: bool
    """Whether `placement.keep_states` keeps its checkpoints."""
    tracked: TrackedRun | None
    is_sent: bool
    """Whether MLflow received everything of the run."""
    sweep: str | None = None
    """The sweep of which this run is a trial."""

    @property
    def num_bytes(self) -> int:
        """Total bytes of all parts of the run."""
        return sum(self.parts.values())

    @property
    def is_over(self) -> bool:
        """Whether the run has finished or was stopped for good, so that its checkpoints are not
        needed.
        """
        return self.state in ("done", "stopped")


@dataclass(frozen=True)
class PreparedFolder:
    """A folder of prepared data, or of a batch plan."""

    place: str
    """Path below the storage."""
    num_bytes: int
    state: Literal["finished", "unfinished", "removed"]
    """`removed`: a removal was cut off."""
    names: frozenset[str]
    """Fingerprints in its manifest, including the fingerprints of its source folders."""
    digests: frozenset[str] = frozenset()
    """Digests of its parts."""
    files: frozenset[str] = frozenset()
    """Files of vectors below `data` that it refers to."""

    @property
    def identity(self) -> str:
        """Fingerprint at the end of the folder's name."""
        return self.place.rpartition("-")[2]


def part_of(path: str) -> str:
    """Classify a file in a run's folder: model, scores, checkpoint, weights or other."""
    top, _, rest = path.partition("/")
    below = rest.partition("/")[0]
    if top == "models" and rest:
        return MIXTURES if "-merged-" in below else MODELS
    if top in ("evaluation", "embeddings"):
        return SCORES
    if below == STATE_FOLDER and "/" in rest:
        return CHECKPOINTS
    if below in ("validation", "weights.safetensors"):
        return WEIGHTS
    return REST


STATES, FOLDER, RUN, DATA, TEMPORARY = "states", "folder", "run", "data", "temporary"
FREED = {
    STATES: "checkpoints of runs that are done; without --run of all that do not keep them",
    FOLDER: "the folder of each --run; MLflow keeps its run, artifacts and versions",
    RUN: "the folder of each --run and MLflow's run of it with artifacts and logged models",
    DATA: "plans, data folders and teachers' vectors that no run in the storage uses; those of the "
    "last day stay, unless a --run that goes too used them",
    TEMPORARY: "half-written files of writers that were killed, older than an hour",
}
"""Kinds of content that can be freed, with a description of each."""


@dataclass(frozen=True)
class CleanRequest:
    """Request to list a storage or to remove parts of it."""

    storage: str
    runs: tuple[str, ...] = ()
    """Names of runs and sweeps; empty: all."""
    free: tuple[str, ...] = ()
    """Kinds from `FREED`; empty: list everything and remove nothing."""
    delete_versions: bool = False
    """Whether registered versions of a removed run are deleted too."""
    tracking_uri: str | None = None


def check_request(asked: CleanRequest) -> None:
    """Check that the command-line options can be combined.

    Raises:
        ConfigError: they do not.
    """
    whole = [part for part in (FOLDER, RUN) if part in asked.free]
    if len(whole) == 2:
        raise ConfigError(
            "--free folder keeps MLflow's entries, but --free run removes them; give only one of "
            "the two"
        )
    if whole and not asked.runs:
        raise ConfigError(f"--free {whole[0]} needs the names of runs: --run NAME")
    if asked.runs and asked.free and not {STATES, *whole} & set(asked.free):
        raise ConfigError(
            f"--run has no effect with --free {' and '.join(asked.free)}, which applies to all "
            "runs of the storage; leave --run out, or add --free states, folder or run"
        )
    if asked.delete_versions and RUN not in asked.free:
        raise ConfigError("--delete-versions needs --free run")
