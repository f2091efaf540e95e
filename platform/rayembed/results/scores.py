"""Scores of a model by task, with keys of their test data, and means over tasks."""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from rayembed.errors import ArtifactError
from rayembed.results.costs import Cost

OTHER = "Other"
"""Category of tasks without a known category."""

MEAN, OF_OWN, OF_GENERAL = "mean", "mean/own", "mean/general"
"""Names of means over tasks: over all of one kind, over own ones and over general ones."""

BM25_ROW, HYBRID, RERANKED, HYBRID_RERANKED = "bm25", "hybrid", "reranked", "hybrid-reranked"
"""Names of rows beside a model: BM25, both fused, the best documents of either reranked. The name
of a row's model ends in the row's."""

OF_QUERIES = "ndcg_at_10_of_queries"
"""Entry beside mteb's scores of a retrieval that is judged by nDCG@10: that of each query, in the
order of their ids."""

Place = tuple[str, str]
"""A split and a subset of a task's data."""


@dataclass(frozen=True)
class TaskScore:
    """Main score of a model on a task, over all evaluated splits and subsets."""

    task: str
    category: str
    metric: str
    value: float
    """Score between 0 and 1 for nearly all metrics; NaN for a collapsed model."""
    dataset: str
    dataset_revision: str
    scores: Mapping[Place, float]
    """Split and subset → their main score; `value` is the mean."""
    model_revision: str
    """Revision under which the scores were stored: weights and everything else that decides
    vectors."""
    mteb_version: str = ""
    date: datetime | None = None
    """Time of scoring; None: not recorded."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All other metrics of the task, averaged over the parts."""

    measured_with: Mapping[str, str] = field(default_factory=dict)
    """Number type, lengths, width, context and prompts of the measurement, by name; empty: not
    recorded."""
    items: Mapping[Place, Any] = field(default_factory=dict)
    """Split and subset → outcomes of test items (`results.items.Items`), in an order that all
    models share, of tasks that have such; not written by `to_json`."""
    cost: Cost | None = None
    """Cost of the task's corpora; None: not measured. Not written by `to_json`."""

    @property
    def is_own(self) -> bool:
        """Whether the test data is the user's own."""
        return self.dataset.startswith("own/")

    @property
    def parts(self) -> tuple[str, ...]:
        """Names `split/subset` of all splits and subsets over which the score is averaged."""
        return tuple(sorted("/".join(place) for place in self.scores))

    @property
    def finite_scores(self) -> dict[Place, float]:
        """Map (split, subset) to the main score, where that is finite."""
        return {place: score for place, score in self.scores.items() if not math.isnan(score)}

    @property
    def measured_on(self) -> tuple[str, str, tuple[str, ...]]:
        """Key of the test data: task, data revision, splits and subsets; only scores with equal
        keys are comparable.
        """
        return self.task, self.dataset_revision, self.parts

    def differences(self, other: "TaskScore") -> dict[str, tuple[str, str]]:
        """Map evaluation settings that differ between two scores to both values.

        Prompts are one setting, `prompts`; where one score records nothing it is `conditions`.
        """
        here, there = self.measured_with, other.measured_with
        if not here or not there:
            told = ["recorded" if values else "not recorded" for values in (here, there)]
            return {} if told[0] == told[1] else {"conditions": (told[0], told[1])}
        found: dict[str, tuple[str, str]] = {}
        for name in sorted({*here, *there}):
            values = here.get(name, "none"), there.get(name, "none")
            if values[0] != values[1]:
                found.setdefault("prompts" if name.startswith("prompt") else name, values)
        return found


def is_beside(name: str) -> bool:
    """Whether `<org>/<model>` names a baseline that is scored beside models."""
    short = name.rpartition("/")[2].lower()
    return short == BM25_ROW or short.endswith((f"-{HYBRID}", f"-{RERANKED}"))


def by_category(scores: Iterable[TaskScore]) -> dict[str, list[TaskScore]]:
    """Group scores by task category, sorted by name."""
    groups: dict[str, list[TaskScore]] = {}
    for score in scores:
        groups.setdefault(score.category, []).append(score)
    return dict(sorted(groups.items()))


def means(tasks: Iterable[str], own: Collection[str]) -> dict[str, list[str]]:
    """Map names of means to their tasks: separate means for own and general tasks if there are
    both.

    Args:
        own: names of own tasks, others among them.
    """
    tasks = list(tasks)
    kinds = {
        OF_OWN: [task for task in tasks if task in own],
        OF_GENERAL: [task for task in tasks if task not in own],
    }
    return kinds if all(kinds.values()) else {MEAN: tasks} if tasks else {}


def by_kind(scores: Sequence[TaskScore]) -> dict[str, list[TaskScore]]:
    """Map names of means to their scores; see `means`."""
    by_task = {score.task: score for score in scores}
    found = means(by_task, {score.task for score in scores if score.is_own})
    return {name: [by_task[task] for task in tasks] for name, tasks in found.items()}


def mean(scores: Iterable[TaskScore]) -> float:
    """Mean of the main scores of all tasks; NaN without tasks."""
    values = [score.value for score in scores]
    return sum(values) / len(values) if values else math.nan


def to_json(scores: Iterable[TaskScore]) -> str:
    """Serialise scores as JSON text."""
    rows = [
        {
            **{name: v for name, v in asdict(score).items() if name not in ("items", "cost")},
            "scores": [[*place, value] for place, value in score.scores.items()],
            "date": score.date and score.date.isoformat(),
        }
        for score in sorted(scores, key=lambda score: score.task)
    ]
    return json.dumps(rows, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> tuple[TaskScore, ...]:
    """Read scores from JSON text written by `to_json`.

    Raises:
        ArtifactError: something else.
    """
    try:
        return tuple(_score(row) for row in json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(
            f"the stored scores are no JSON that rayembed wrote: {error}"
        ) from error


def _score(row: dict[str, Any]) -> TaskScore:
    scores = {(split, subset): value for split, subset, value in row["scores"]}
    date = row["date"] and datetime.fromisoformat(row["date"])
    return TaskScore(**{**row, "scores": scores, "date": date})
