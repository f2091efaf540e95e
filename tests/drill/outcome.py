"""What came of a run that a fault was thrown at, beside the run that nothing disturbed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
from scene import NAME, STAGE
from torch import Tensor, equal

from rayembed.assets.store import MANIFEST
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.errors import ArtifactError
from rayembed.registry.metrics_log import METRICS_FILE, MetricsLog
from rayembed.training.checkpoints.checkpoint import find_damage
from rayembed.training.checkpoints.checkpoint_list import listed_checkpoints
from rayembed.training.checkpoints.weights import read_header

PARTS = (".tmp", ".partial", ".part")
"""Ends of the names under which files are written before they are whole."""


@dataclass(frozen=True)
class Trained:
    """What a run has left."""

    weights: Mapping[str, Tensor]
    records: Sequence[tuple[int, float, float]]
    """Step, loss and tokens of each line of the metrics log."""
    rows: Mapping[int, Sequence[str]]
    """Ids of the rows that the plan has for each step."""


def read_trained(storage: Path) -> Trained:
    """What the run in the storage has left."""
    folder = storage / "runs" / NAME
    (manifest,) = (storage / "plans").glob(f"{STAGE}-*/{MANIFEST}")
    plan = BatchPlan.open(str(manifest.parent))
    lines = MetricsLog(folder / METRICS_FILE).records()
    return Trained(
        safetensors.torch.load_file(folder / STAGE / "weights.safetensors"),
        [(line["step"], line["loss"], line["tokens"]) for line in lines],
        {step + 1: [row.id for row in plan.read(step)] for step in range(plan.num_steps)},
    )


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    fault: str
    seen: str
    """The line that tells the user."""
    to_do: str
    """By the user."""
    steps_repeated: int
    rows_lost: int
    """Rows of the plan that were not trained, or not as in the undisturbed run."""
    rows_twice: int
    """Rows that the final metrics log counts beyond the plan."""
    difference: float | None
    """Largest of any weight from the undisturbed run's; None: all are equal bit for bit."""
    half_written: tuple[str, ...] = ()
    """Files in storage that are not whole."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is lost, nothing else came out and nothing half-done was left."""
        lost = self.rows_lost or self.rows_twice or self.half_written
        return not lost and self.difference is None


@dataclass(frozen=True)
class NotThrown:
    """A fault of which there is no outcome."""

    fault: str
    why: str
    failed: bool
    """Whether the platform is to blame, and not the machine."""


def compare(trained: Trained, whole: Trained) -> tuple[int, int, float | None]:
    """Rows lost, rows trained twice, and the largest difference of a weight (None: all are equal).

    A step counts for its rows if its loss and its tokens are those of the same step of the
    undisturbed run: other rows, or other weights before it, would have given others.
    """
    expected = {step: (loss, tokens) for step, loss, tokens in whole.records}
    planned = Counter(row for rows in whole.rows.values() for row in rows)
    done: Counter[str] = Counter()
    for step, loss, tokens in trained.records:
        if expected.get(step) == (loss, tokens):
            done.update(trained.rows[step])
    return (planned - done).total(), (done - planned).total(), _difference(trained, whole)


def _difference(trained: Trained, whole: Trained) -> float | None:
    if trained.weights.keys() != whole.weights.keys():
        return float("inf")
    pairs = [(trained.weights[name], weight) for name, weight in whole.weights.items()]
    unequal = [float((a - b).abs().max()) for a, b in pairs if not equal(a, b)]
    return max(unequal, default=None)


def half_written(storage: Path) -> tuple[str, ...]:
    """Files in storage that are not whole, and checkpoints that are not listed or not whole."""
    found = [path for path in storage.rglob("*") if path.is_file() and path.name.endswith(PARTS)]
    for path in storage.rglob("*.safetensors"):
        try:
            read_header(str(path))
        except ArtifactError:
            found.append(path)
    for train in storage.glob(f"runs/*/{STAGE}/train"):
        listed = listed_checkpoints(str(train))
        found += [
            folder
            for folder in train.glob("step-*")
            if folder.name not in listed or find_damage(str(folder)) is not None
        ]
    return tuple(sorted({str(path.relative_to(storage)) for path in found}))


def markdown_table(outcomes: Sequence[Outcome | NotThrown]) -> str:
    """The table, with a line of text below it for each fault that has no row of figures."""
    lines = [
        "| fault | what the user sees | what the user does | steps repeated | rows lost | "
        "weights equal |",
        "| --- | --- | --- | ---: | ---: | --- |",
    ]
    for one in outcomes:
        if isinstance(one, NotThrown):
            what = "FAILED" if one.failed else "not thrown"
            cells = [one.fault, f"{what}: {one.why}", "", "", "", ""]
        else:
            same = "yes" if one.difference is None else f"no, up to {one.difference:.1e}"
            rest = f"; HALF-WRITTEN: {', '.join(one.half_written)}" if one.half_written else ""
            twice = f", {one.rows_twice} twice" if one.rows_twice else ""
            cells = [one.fault, one.seen, one.to_do, str(one.steps_repeated)]
            cells += [f"{one.rows_lost}{twice}", same + rest]
        lines.append(f"| {' | '.join(_cell(text) for text in cells)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
