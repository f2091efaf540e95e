"""Describe finetunings on public data sets: rows, kind of task, protocol, and the tasks on which
they are scored.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rayembed.config.document import fingerprint
from rayembed_papers.backbone.settings import FinetuneProtocol

PARQUET = "refs/convert/parquet"
"""The hub's branch with a Parquet copy of a data set: `<configuration>/<split>/*.parquet`."""

Kind = Literal["classes", "score", "choices", "tags", "spans", "retrieval"]
"""Kinds of tasks by what a model learns to tell, with the columns of rows in their order:

classes    one or two texts, number of the class
score      two texts, a number
choices    premise, question, texts to choose from, number of the right one
tags       words, number of the tag of each
spans      question, context, answers (`text` and `answer_start`, lists)
retrieval  query, document that answers it
"""

Row = tuple[Any, ...]
"""Cells in the order of the kind's columns."""


@dataclass(frozen=True)
class TaskRows:
    """Location of rows on the hub, and the columns to read."""

    repository: str
    """`org/name`."""
    path: str
    """Pattern of the files' paths."""
    columns: tuple[str, ...]
    """Columns in the order of the kind."""
    revision: str = PARQUET
    where: tuple[str, str] | None = None
    """A column and the prefix of its texts; other rows are left out."""

    @property
    def needed(self) -> tuple[str, ...]:
        """Names of all columns to read."""
        return (*self.columns, self.where[0]) if self.where else self.columns


@dataclass(frozen=True)
class ScoredRows:
    """Rows of one task and language on which a finetuned model is scored."""

    task: str
    subset: str
    """Language, or name of the split."""
    rows: TaskRows


@dataclass(frozen=True)
class Finetuning:
    """A finetuning of a backbone on training rows, and the tasks on which its model is scored."""

    name: str
    kind: Kind
    train: TaskRows
    protocol: FinetuneProtocol
    scored: tuple[ScoredRows, ...]
    """Scored tasks; the first one selects among trials of a model that others start from."""
    labels: tuple[str, ...] = ()
    """Names of classes or tags, in the order of their numbers."""
    first_label: int = 0
    """The number of the first class in the data."""
    start: str | None = None
    """The finetuning whose best model it starts from; None: it starts from the backbone."""
    template: str = "{premise} {question}"
    """Template of the first text of `choices`; the second is the choice."""

    @property
    def num_labels(self) -> int:
        """Number of outputs of the task head."""
        match self.kind:
            case "classes" | "tags":
                return len(self.labels)
            case "spans":
                return 2
            case _:
                return 1

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks on which the finetuned model is scored."""
        return tuple(dict.fromkeys(scored.task for scored in self.scored))

    @property
    def all_rows(self) -> tuple[TaskRows, ...]:
        """All rows that the finetuning reads, training rows first."""
        return (self.train, *(scored.rows for scored in self.scored))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of all settings that affect scores, apart from grid, backbone and data."""
        values: dict[str, Any] = asdict(replace(self, protocol=None))  # type: ignore[arg-type]
        grid = {"learning_rates", "batch_sizes", "seeds"}
        return fingerprint([values, self.protocol.model_dump(mode="json", exclude=grid)])

    def only(self, tasks: Iterable[str]) -> "Finetuning":
        """Copy the finetuning with only these tasks to score, or its first task if it has none of
        them.
        """
        wanted = set(tasks)
        kept = tuple(scored for scored in self.scored if scored.task in wanted)
        first = tuple(s for s in self.scored if s.task == self.scored[0].task)
        return replace(self, scored=kept or first)


@dataclass(frozen=True)
class Task:
    """A scored task, which is a column of the paper's Table 3 or 4."""

    name: str
    benchmark: str
    finetuning: str
    """Name of the finetuning that is scored on it."""
    metric: str
    """The metric in the table."""
    subsets: tuple[str, ...] = ()
    """Subsets that the table averages; empty for all."""
