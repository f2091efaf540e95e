"""Measure the runs of the claims, each once for a seed, and keep their scores in files."""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.document import fingerprint
from rayembed.config.override import override
from rayembed.config.placement import AUTO_THREADS
from rayembed.config.run import Run
from rayembed.errors import ArtifactError
from rayembed.machine.device import placed_here
from rayembed.machine.hardware import settled
from rayembed.pipeline.run.train import train
from rayembed.registry.metrics_log import METRICS_FILE
from rayembed.registry.provenance import collect_provenance, cpu_summary, gpus, node_hardware
from rayembed_extras.estimates.time import estimate, on_gpu_seconds
from rayembed_papers.directions.catalogue import Direction, Preparation

logger = logging.getLogger(__name__)

FOLDER = "papers/directions"
"""Folder in storage of the results."""

_UNKNOWN_SECONDS = 600.0
"""Assumed seconds of runs without an estimate."""


@dataclass(frozen=True)
class ClaimTask:
    """A run with one seed that must be measured for a claim."""

    claim: str
    """Key of the claim, without what a follow-up changes."""
    run: Run
    seeds: int
    """Number of requested seeds."""
    seconds: float
    """Expected seconds, without the preparation."""
    preparation: Preparation | None = None
    """Preparation before the run; None: nothing to prepare."""

    @property
    def command(self) -> str:
        """Shell command that measures the run in an empty storage, with all others of its claim."""
        asked = f"--only {self.claim} --seeds {self.seeds}"
        asked += " --on-a-gpu" if self.run.placement.use_gpu is True else ""
        return f"rayembed papers-directions {asked}"

    def seconds_in(self, storage: str) -> float:
        """Expected seconds, including the preparation if the given storage lacks it."""
        made = self.preparation
        return self.seconds + (0.0 if made is None else made.seconds_left(storage))


@dataclass(frozen=True)
class MeasuredRun:
    """Scores of a run, and the kind of machine on which they were measured."""

    scores: Mapping[str, float]
    """Main score by task."""
    machine: str
    """Name of the GPU, or the CPU with its number of cores."""
    bfloat16: bool
    """Whether teachers ran in bfloat16."""
    torch: str
    """Version of torch."""

    @classmethod
    def parse(cls, kept: Mapping[str, Any]) -> "MeasuredRun":
        """Create a result from the content of its file."""
        scores = {name: float(score) for name, score in kept["scores"].items()}
        torch_version = str(kept["provenance"]["packages"]["torch"])
        return cls(scores, str(kept["machine"]), bool(kept["bfloat16"]), torch_version)

    def like(self, other: "MeasuredRun") -> bool:
        """Whether both results come from the same kind of machine and torch version, as rounding
        alone can change a score as much as a seed does. Threads are those of the run's settings,
        and the machine's cores.
        """
        return replace(self, scores={}) == replace(other, scores={})


@dataclass
class Results:
    """Measured runs in storage, by name."""

    storage: str
    kept: dict[str, "MeasuredRun"] = field(default_factory=dict)

    def of(self, run: Run) -> "MeasuredRun | None":
        """Return the result of a run; None if it is not measured yet.

        Raises:
            ArtifactError: its file is damaged.
        """
        if run.name not in self.kept:
            path = self.path(run)
            if not exists(path):
                return None
            try:
                self.kept[run.name] = MeasuredRun.parse(json.loads(read_bytes(path)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ArtifactError(
                    f"the result {path!r} is damaged ({error}); remove it and run the same "
                    "command to measure it again"
                ) from None
        return self.kept[run.name]

    def path(self, run: Run) -> str:
        """Path of a run's result file."""
        return join(self.storage, *FOLDER.split("/"), f"{run.name}.json")

    def measure(self, task: ClaimTask) -> None:
        """Train and score a run, and store the scores.

        Raises:
            RayembedError: as `train` and the task's preparation; the same call goes on there.
        """
        if task.preparation is not None:
            task.preparation.make(self.storage)
        # Both sides of a difference take the same number of threads, whatever else runs.
        placement = task.run.placement.model_copy(update={"threads_per_worker": AUTO_THREADS})
        run = task.run.model_copy(update={"placement": placement})
        began = time.monotonic()
        was_there = exists(join(run.placement.storage_path, "runs", run.name, METRICS_FILE))
        outcome = train(run)
        assert outcome.trained is not None
        assert outcome.table is not None
        made = task.preparation and read_bytes(join(self.storage, task.preparation.file))
        content = {
            "run": run.name,
            "seed": run.seed,
            "fingerprint": run.fingerprint,
            "command": task.command,
            # Whether an earlier call, of another commit perhaps, has trained some of its steps.
            "was_there": was_there,
            "machine": _machine(run),
            "threads": run.placement.threads,
            "bfloat16": settled("auto") == "bfloat16",
            "provenance": collect_provenance(node_hardware()),
            "prepared_sha256": made and hashlib.sha256(made).hexdigest(),
            "seconds": round(time.monotonic() - began),
            "expected_seconds": round(task.seconds),
            "scores": outcome.trained.scores,
            "rows": {label: dict(row) for label, row in outcome.table.rows.items()},
        }
        write_atomic(self.path(run), json.dumps(content, indent=1, sort_keys=True).encode())
        self.kept[run.name] = MeasuredRun.parse(content)


def _machine(run: Run) -> str:
    return ", ".join(gpus()) if placed_here(run.placement).on_gpu else cpu_summary()


def _here(run: Run) -> MeasuredRun:
    """Machine, number type and torch version that results of this process record."""
    return MeasuredRun({}, _machine(run), settled("auto") == "bfloat16", version("torch"))


def short_name(run: Run) -> str:
    """Name of a run without its seed, derived from all other settings."""
    values = run.model_copy(update={"name": "", "seed": 0})
    return fingerprint(values.model_dump(mode="json", exclude={"placement"}))[:10]


def seeded(run: Run, seed: int, storage: str) -> Run:
    """Copy a run with a seed, under a name derived from all other settings.

    Relative paths of its data lie below the storage, which decides nothing of the name.
    """
    settings = [
        f"name=papers-{short_name(run)}-{seed}",
        f"seed={seed}",
        f"placement.storage_path={storage}",
        f"data.root={storage}",
        "placement.registered_model=papers-directions",
    ]
    return override(run, settings)


def pairs_of(direction: Direction, seeds: Iterable[int], storage: str) -> list[tuple[Run, Run]]:
    """Return, for each seed, the two measured runs that a claim compares."""
    better, worse = direction.better(), direction.worse()
    return [(seeded(better, s, storage), seeded(worse, s, storage)) for s in seeds]


def tasks_left(
    directions: Sequence[Direction], seeds: Sequence[int], results: Results
) -> list[ClaimTask]:
    """List the runs to measure; claims that need the least time come first.

    Each run is listed once. Seeds of a claim stay together because one seed decides nothing. If one
    of two runs is missing, or they come from different machines, runs measured on another machine
    are measured here as well.
    """
    expected: dict[str, float] = {}

    def seconds(run: Run) -> float:
        key = run.name.rpartition("-")[0]
        if key not in expected:
            found = estimate(run)
            expected[key] = found.seconds if found else on_gpu_seconds(run) or _UNKNOWN_SECONDS
        return expected[key]

    wanted: list[dict[str, ClaimTask]] = []
    for direction in directions:
        tasks: dict[str, ClaimTask] = {}
        claim = direction.key.partition(",")[0]
        for pair in pairs_of(direction, seeds, results.storage):
            found = [results.of(run) for run in pair]
            if are_alike(*found):
                continue
            here = _here(pair[0])
            preparations = (direction.preparation, None)
            for run, known, preparation in zip(pair, found, preparations, strict=True):
                if known is None or not known.like(here):
                    tasks[run.name] = ClaimTask(claim, run, len(seeds), seconds(run), preparation)
        wanted.append(tasks)
    ordered: dict[str, ClaimTask] = {}
    while any(wanted):
        # What is chosen already costs the others nothing more.
        wanted = [{name: task for name, task in of.items() if name not in ordered} for of in wanted]
        left = [of for of in wanted if of]
        if left:
            cheapest = min(left, key=lambda of: expected_seconds(of.values(), results.storage))
            ordered.update(cheapest)
    return list(ordered.values())


def expected_seconds(tasks: Iterable[ClaimTask], storage: str) -> float:
    """Sum the expected seconds of all tasks, including preparations that the storage lacks."""
    some = list(tasks)
    made = {task.preparation.file: task.preparation for task in some if task.preparation}
    first = sum(preparation.seconds_left(storage) for preparation in made.values())
    return first + sum(task.seconds for task in some)


def are_alike(one: MeasuredRun | None, other: MeasuredRun | None) -> bool:
    """Whether both results exist and were measured on the same kind of machine."""
    return one is not None and other is not None and one.like(other)


def differences(
    direction: Direction, seeds: Iterable[int], results: Results
) -> dict[int, tuple[float, float]]:
    """Return both runs' mean scores by seed, where both were measured on the same kind of
    machine.
    """
    found = {}
    for pair in pairs_of(direction, seeds, results.storage):
        one, other = (results.of(run) for run in pair)
        if one is None or other is None:
            continue
        if not one.like(other):
            logger.warning(
                "%s and %s are not compared because they were measured on different machines; "
                "run the same command to measure both on this machine",
                *(pair[0].name, pair[1].name),
            )
            continue
        tasks = direction.tasks
        found[pair[0].seed] = (_mean(one.scores, tasks), _mean(other.scores, tasks))
    return found


def _mean(scores: Mapping[str, float], tasks: Sequence[str]) -> float:
    return statistics.mean(scores[name] for name in tasks)
