"""Runs of the claims: each once for a seed, its scores kept in a file of its own."""

import json
import logging
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.document import fingerprint
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.errors import ArtifactError
from rayembed.hardware import settled
from rayembed.pipeline.estimate import estimate
from rayembed.pipeline.train import train
from rayembed.registry.provenance import collect_provenance, cpu_told, node_hardware
from rayembed_papers.directions.catalogue import Direction, Preparation

logger = logging.getLogger(__name__)

FOLDER = "papers/directions"
"""Folder in storage of the results."""

_UNKNOWN_SECONDS = 600.0
"""Taken for runs whose time nothing tells, as on GPUs."""


@dataclass(frozen=True)
class Task:
    """A run that a claim needs, with a seed."""

    run: Run
    seconds: float
    """Expected, without those of the preparation."""
    preparation: Preparation | None = None
    """What is made first; None: nothing is."""

    def seconds_in(self, storage: str) -> float:
        """Expected seconds, with those of what is not yet made in the storage of this path."""
        made = self.preparation
        return self.seconds + (0.0 if made is None else made.seconds_left(storage))


@dataclass
class Results:
    """Scores of runs in storage, by the runs' names."""

    storage: str
    kept: dict[str, dict[str, float]] = field(default_factory=dict)

    def scores(self, run: Run) -> dict[str, float] | None:
        """Main score by task; None: the run is not measured.

        Raises:
            ArtifactError: its file is damaged.
        """
        if run.name not in self.kept:
            path = self.path(run)
            if not exists(path):
                return None
            try:
                scores = json.loads(read_bytes(path))["scores"]
                self.kept[run.name] = {name: float(score) for name, score in scores.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ArtifactError(
                    f"the result {path!r} is damaged ({error}); remove it, and the same command "
                    "measures it again"
                ) from None
        return self.kept[run.name]

    def path(self, run: Run) -> str:
        """File of a run's result."""
        return join(self.storage, *FOLDER.split("/"), f"{run.name}.json")

    def measure(self, task: Task) -> dict[str, float]:
        """Train and score a run, and keep the scores.

        Raises:
            RayembedError: as `train` and the task's preparation; the same call goes on there.
        """
        if task.preparation is not None:
            task.preparation.make(self.storage)
        run, began = task.run, time.monotonic()
        outcome = train(run)
        assert outcome.table is not None
        rows = outcome.table.rows
        # Behind the stages stand further rows of the last one, as of fewer dimensions.
        scores = rows[[label for label in rows if label.startswith("stage ")][-1]]
        told = {
            "run": run.name,
            "seed": run.seed,
            "fingerprint": run.fingerprint,
            "machine": cpu_told(),
            "bfloat16": settled("auto") == "bfloat16",
            "provenance": collect_provenance(node_hardware()),
            "seconds": round(time.monotonic() - began),
            "expected_seconds": round(task.seconds),
            "scores": dict(scores),
            "rows": {label: dict(row) for label, row in rows.items()},
        }
        write_atomic(self.path(run), json.dumps(told, indent=1, sort_keys=True).encode())
        self.kept[run.name] = dict(scores)
        return self.kept[run.name]


def seeded(run: Run, seed: int, storage: str) -> Run:
    """The run with a seed, under a name that all its other settings decide.

    Relative paths of its data lie below the storage, which decides nothing of the name.
    """
    values = run.model_copy(update={"name": "", "seed": 0})
    known = fingerprint(values.model_dump(mode="json", exclude={"placement"}))
    settings = [
        f"name=papers-{known[:10]}-{seed}",
        f"seed={seed}",
        f"placement.storage_path={storage}",
        f"data.root={storage}",
        "placement.registered_model=papers-directions",
    ]
    return override(run, settings)


def pairs_of(direction: Direction, seeds: Iterable[int], storage: str) -> list[tuple[Run, Run]]:
    """Both runs of a claim for each seed."""
    better, worse = direction.better(), direction.worse()
    return [(seeded(better, s, storage), seeded(worse, s, storage)) for s in seeds]


def tasks_left(
    directions: Sequence[Direction], seeds: Sequence[int], results: Results
) -> list[Task]:
    """Runs that are not measured, those of the claims that are decided soonest first.

    Each stands once. Seeds of a claim stay together, as one of them decides nothing.
    """
    expected: dict[str, float] = {}

    def seconds(run: Run) -> float:
        key = run.name.rpartition("-")[0]
        if key not in expected:
            found = estimate(run)
            expected[key] = _UNKNOWN_SECONDS if found is None else found.seconds
        return expected[key]

    wanted: list[dict[str, Task]] = []
    for direction in directions:
        tasks: dict[str, Task] = {}
        for pair in pairs_of(direction, seeds, results.storage):
            for run, preparation in zip(pair, (direction.preparation, None), strict=True):
                if results.scores(run) is None:
                    tasks[run.name] = Task(run, seconds(run), preparation)
        wanted.append(tasks)
    ordered: dict[str, Task] = {}
    while any(wanted):
        # What is chosen already costs the others nothing more.
        wanted = [{name: task for name, task in of.items() if name not in ordered} for of in wanted]
        left = [of for of in wanted if of]
        if left:
            cheapest = min(left, key=_cost)
            ordered.update(cheapest)
    return list(ordered.values())


def _cost(tasks: Mapping[str, Task]) -> float:
    return sum(task.seconds for task in tasks.values())


def differences(
    direction: Direction, seeds: Iterable[int], results: Results
) -> dict[int, tuple[float, float]]:
    """Mean scores of both runs by seed, of those seeds in which both are measured."""
    found = {}
    for pair in pairs_of(direction, seeds, results.storage):
        scores = [results.scores(run) for run in pair]
        one, other = (None if of is None else _mean(of, direction.tasks) for of in scores)
        if one is not None and other is not None:
            found[pair[0].seed] = (one, other)
    return found


def _mean(scores: Mapping[str, float], tasks: Sequence[str]) -> float:
    return statistics.mean(scores[name] for name in tasks)
