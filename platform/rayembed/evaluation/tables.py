"""Tables of scores, with models in rows and tasks in columns."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from rayembed.config.types import Precision
from rayembed.display.tables import NOISE_CAPTION, Cell, Table, best_of, show
from rayembed.results.scores import MEAN, OF_GENERAL, OF_OWN, means

_HEADINGS: Mapping[str, tuple[str, str, str]] = {
    "WikiSentenceRetrieval": ("Sentence retrieval", "Sentence\nretrieval", "nDCG@10"),
    "WikiDescriptionRetrieval": ("Description retrieval", "Descript.\nretrieval", "nDCG@10"),
    "WikiTopicClassification": ("Topic classification", "Topic\nclassif.", "accuracy"),
    "WikiTopicClustering": ("Topic clustering", "Topic\nclusters", "V-measure"),
    "WikiTitleDescriptionPairClassification": ("Title–description pairs", "Title\npairs", "AP"),
    "WikiRelatednessSTS": ("Relatedness", "Related-\nness", "Spearman"),
    "WikiCrossLingualRetrieval": ("Cross-lingual retrieval", "Cross-\nlingual", "nDCG@10"),
}
"""Task → its name, its name for the terminal, where six of them share a line, its main score."""


_MEANS = {MEAN: "Mean", OF_OWN: "Own", OF_GENERAL: "General"}
"""Headings of the means over tasks."""


_BESIDE = {
    "hybrid": "hybrid: BM25 and {}",
    "reranked": "reranked: {}",
    "hybrid-reranked": "reranked hybrid: BM25 and {}",
}
"""Label of a row that is made of a model's search."""

MERGED = "-merged-"
"""Stands between a stage and a share in the name of a mixture."""

AVERAGED = 1.0
"""Share that stands for the mean of a stage's last checkpoints."""


@dataclass(frozen=True)
class ScoreKey:
    """Key of a scored model of a run: a stage's model, a mixture, a variant of it, or a
    baseline.
    """

    stage: str | None = None
    """Name of the stage whose model it is; None: the untrained model, or a baseline."""
    baseline: str | None = None
    """Reference of another model."""
    dimension: int | None = None
    """Number of first values of each vector (Matryoshka); None: all."""
    precision: Precision = "float32"
    """Number type of the vectors."""
    without_context: bool = False
    """Whether a contextual model embeds behind its null token."""
    share: float | None = None
    """Share of the stage's model in a mixture with the untrained one; 1: the mean of the stage's
    last checkpoints; None: it is no mixture."""
    beside: str = ""
    """Name of a row that is made of the model's search: `hybrid`, with BM25, or reranked."""

    @property
    def model(self) -> str:
        """Name of the model in storage and results; for a baseline, the last part of its reference
        that identifies it.
        """
        if self.baseline == "bm25":
            return "BM25"
        if self.baseline is not None:
            path = self.baseline.partition("?")[0]
            parts = [part for part in path.split("/") if part not in ("", "model", "pypi:", "hf:")]
            short = parts[-1].partition("==")[0].partition("@")[0]
            return short.replace("gt_", "").replace("_", "-")
        name = "untrained" if self.stage is None else self.stage
        return name if self.share is None else f"{name}{MERGED}{self.share:g}"

    def label(self, stages: Sequence[str]) -> str:
        """Name of the model as tables show it.

        Args:
            stages: names of all stages of the run, in their order.
        """
        if self.beside:
            return _BESIDE[self.beside].format(replace(self, beside="").label(stages))
        if self.dimension is not None or self.precision != "float32":
            width = [] if self.dimension is None else [f"{self.dimension} dimensions"]
            small = [] if self.precision == "float32" else [self.precision]
            return ", ".join(["the same", *width, *small])
        if self.without_context:
            return "the same, without context"
        if self.stage is None:
            return self.model
        if self.share is not None:
            mixed = f"merged, {self.share:.0%} trained"
            return "mean of the last checkpoints" if self.share == AVERAGED else mixed
        return f"stage {stages.index(self.stage) + 1}: {self.stage}"


UNTRAINED = ScoreKey()

RunScores = Mapping[ScoreKey, Mapping[str, float]]
"""Model → task name → main score, of one run."""


@dataclass(frozen=True)
class ScoreTable:
    """Scores of several models on several tasks, with one model as the base of differences."""

    rows: Mapping[str, Mapping[str, float]]
    """Model label → task name → main score; a missing task has no score."""
    base: str | None = None
    """Label of the row that differences refer to; None: no differences are shown."""
    own: Collection[str] = ()
    """Names of the tasks on the user's own data, whose mean is separate."""
    noise: Collection[tuple[str, str]] = ()
    """Labels and tasks, or headings of means, of the differences that chance explains."""

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of all tasks, in the order in which the rows first contain them."""
        return tuple(dict.fromkeys(task for scores in self.rows.values() for task in scores))

    def score(self, label: str, task: str) -> float | None:
        """Score of a model on a task; None if it is missing or NaN (from a collapsed model)."""
        score = self.rows.get(label, {}).get(task)
        return None if score is None or math.isnan(score) else score

    def best(self, task: str) -> float | None:
        """Highest score of a task, rounded to three decimals as printed; None without scores."""
        return best_of((self.score(label, task) for label in self.rows), 3)

    def cell(self, label: str, task: str) -> Cell:
        """Make the table cell of a model's score on a task."""
        score = self.score(label, task)
        best = score is not None and round(score, 3) == self.best(task)
        noise = (label, task) in self.noise
        return Cell(score, self.difference(label, task), best, noise=noise)

    @property
    def kinds(self) -> dict[str, list[str]]:
        """Group the tasks under the headings of their means: `Own` and `General` if both exist,
        else `Mean`.
        """
        return {_MEANS[name]: tasks for name, tasks in means(self.tasks, self.own).items()}

    def mean(self, label: str, tasks: Sequence[str]) -> float | None:
        """Mean score of a row over the given tasks; None if a score is missing."""
        scores = [self.score(label, task) for task in tasks]
        known = [score for score in scores if score is not None]
        return sum(known) / len(known) if known and len(known) == len(scores) else None

    def with_means(self) -> "ScoreTable":
        """Replace the task columns by columns of means; a row with a missing score has no mean."""
        known = {
            label: {
                name: mean
                for name, tasks in self.kinds.items()
                if (mean := self.mean(label, tasks)) is not None
            }
            for label in self.rows
        }
        return ScoreTable(known, self.base, noise=self.noise)

    def difference(self, label: str, task: str) -> float | None:
        """Score minus the base's score; None for the base itself and if either score is missing."""
        if self.base is None or label == self.base:
            return None
        score, base = self.score(label, task), self.score(self.base, task)
        return None if score is None or base is None else score - base


def run_table(scores: RunScores, stages: Sequence[str], own: Collection[str] = ()) -> ScoreTable:
    """Make the table of a run's scores, with differences from the untrained model.

    Args:
        own: names of the tasks on own data.
    """
    rows = {key.label(stages): tasks for key, tasks in scores.items()}
    return ScoreTable(rows, UNTRAINED.label(stages) if UNTRAINED in scores else None, own)


def heading(task: str) -> tuple[str, str]:
    """Column head of a task: its readable name and the name of its main score."""
    name, _, measure = _HEADINGS.get(task, (task, task, ""))
    return name, measure


def _narrow(task: str) -> str:
    _, name, measure = _HEADINGS.get(task, (task, task, ""))
    return "\n".join(filter(None, (name, measure.replace("measure", "meas."))))


def score_table(table: ScoreTable, *, title: str = "", with_mean: bool = False) -> Table:
    """Format the scores as a table; the best score of each task is marked, gains over the base are
    shown.

    In the terminal five models on six tasks fit into 80 columns.

    Args:
        with_mean: whether the means over tasks are the last columns.
    """
    heads = [" ".join(filter(None, heading(task))) for task in table.tasks]
    averages, last = table.with_means(), list(table.kinds) if with_mean else []
    return Table(
        ["Model", *heads, *last],
        [
            [
                label,
                *(table.cell(label, task) for task in table.tasks),
                *(averages.cell(label, mean) for mean in last),
            ]
            for label in table.rows
        ],
        title=title,
        align="lr",
        narrow=["Model", *map(_narrow, table.tasks), *last],
        look="lined",
        folds=True,
        caption=NOISE_CAPTION if table.noise else "",
    )


def score_csv(table: ScoreTable) -> str:
    """Format the scores as CSV in full precision, with mteb's task names; missing scores
    are empty.
    """
    rows = [
        [label, *(scores.get(t, "") for t in table.tasks)] for label, scores in table.rows.items()
    ]
    return show(Table(["model", *table.tasks], rows), "csv")
