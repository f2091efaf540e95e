"""Scores of dev splits, as AIR-Bench's own evaluation computes them, and their table.

Only dev splits can be scored here. What a model reaches on test splits, and its rank, is known
only from the leaderboard, after a submission; a dev score is no estimate of it for the long
documents, which differ between the splits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rayembed.assets.storage import join, write_atomic
from rayembed.display.tables import Cell, Table, show
from rayembed.errors import DataError
from rayembed_extras.air_bench.catalogue import AirBenchDataset, Task, air_bench_datasets
from rayembed_extras.air_bench.hub_data import Labels
from rayembed_extras.air_bench.results import AirBenchResults, Found, made_by
from rayembed_extras.air_bench.task import MAIN_SCORES

CUTOFFS = (1, 3, 5, 10, 50, 100, 1000)

_DEV_FILE = "dev.csv"

_MEASURES: Mapping[str, str] = {
    # trec_eval's name: AIR-Bench's
    "ndcg_cut": "ndcg",
    "map_cut": "map",
    "recall": "recall",
    "P": "precision",
}


def retrieval_scores(labels: Labels, found: Found) -> dict[str, float]:
    """Means over the labelled queries: `ndcg_at_10`, `map_at_…`, `recall_at_…`, `precision_at_…`.

    trec_eval's measures, which break ties between documents by their ids. Not rounded; AIR-Bench
    rounds to five decimals.

    Raises:
        DataError: a labelled query has no result.
    """
    import pytrec_eval

    if lost := sorted(set(labels) - set(found)):
        raise DataError(f"{len(lost)} labelled queries have no results, such as {lost[:5]}")
    cutoffs = ",".join(str(k) for k in CUTOFFS)
    evaluator = pytrec_eval.RelevanceEvaluator(
        {query: dict(documents) for query, documents in labels.items()},
        {f"{measure}.{cutoffs}" for measure in _MEASURES},
    )
    by_query = evaluator.evaluate({query: dict(found[query]) for query in labels})
    return {
        f"{name}_at_{k}": sum(scores[f"{measure}_{k}"] for scores in by_query.values())
        / len(by_query)
        for measure, name in _MEASURES.items()
        for k in CUTOFFS
    }


@dataclass(frozen=True)
class DevScores:
    """Main scores of a model's dev splits, as fractions of one."""

    version: str
    retriever: str
    scores: Mapping[str, float | None]
    """Data set (`qa_arxiv_en_default`) → nDCG@10 for qa, Recall@10 for long-doc; None: not made."""

    def datasets(self, task: Task | None = None) -> tuple[AirBenchDataset, ...]:
        """Data sets with a dev split, of all tasks or of one."""
        tasks = () if task is None else (task,)
        return air_bench_datasets(self.version, tasks=tasks, splits=("dev",))

    def mean(self, task: Task) -> float | None:
        """Plain mean over the task's data sets, as the leaderboard's; None while one is missing."""
        found = [self.scores.get(dataset.label) for dataset in self.datasets(task)]
        known = [score for score in found if score is not None]
        return sum(known) / len(known) if len(known) == len(found) else None


def read_dev_scores(folder: str, version: str, retriever: str) -> DevScores:
    """The dev scores that were computed by now, from the records beside the results.

    Raises:
        ConfigError: no such version, or one without dev splits.
        ArtifactError: there are no results of the retriever.
    """
    datasets = air_bench_datasets(version, splits=("dev",))
    maker = made_by(folder, version, retriever)
    results = AirBenchResults(folder, version, retriever, str(maker.get("revision")))
    scores: dict[str, float | None] = {}
    for dataset in datasets:
        record = results.record(dataset, "dev")
        of_task = record.scores if record is not None else {}
        scores[dataset.label] = of_task.get(MAIN_SCORES[dataset.task])
    return DevScores(version, retriever, scores)


def dev_file(folder: str, version: str, retriever: str) -> str:
    """The table of a retriever's dev scores, beside its results."""
    return join(folder, version, retriever, _DEV_FILE)


def write_dev_scores(folder: str, version: str, retriever: str) -> None:
    """Write the dev scores that were computed by now into `dev_file`; raises as their reader."""
    table = dev_csv([read_dev_scores(folder, version, retriever)])
    write_atomic(dev_file(folder, version, retriever), table.encode())


def dev_markdown(rows: Sequence[DevScores]) -> str:
    """A table with a line for each data set and a column for each model of one version, in percent.

    Under the data sets of a task stands their mean.
    """
    lines: list[list[object]] = []
    for task, metric in MAIN_SCORES.items():
        for dataset in rows[0].datasets(task):
            about = [task, dataset.domain, dataset.language, dataset.name, metric]
            lines.append([*about, *(_percent(row.scores.get(dataset.label)) for row in rows)])
        means = [_percent(row.mean(task)) for row in rows]
        lines.append([f"**{task}**", "", "", "**mean**", metric, *means])
    heads = ["Task", "Domain", "Language", "Data set", "Score", *(row.retriever for row in rows)]
    return show(Table(heads, lines, align="lllllr"), "markdown")


def dev_csv(rows: Sequence[DevScores]) -> str:
    """The same in full precision as fractions, without means; missing scores are empty."""
    assert len({row.version for row in rows}) == 1, "rows of one version"
    lines = []
    for dataset in rows[0].datasets():
        about = [dataset.version, dataset.task, dataset.domain, dataset.language, dataset.name]
        scores = [Cell(row.scores.get(dataset.label)) for row in rows]
        lines.append([*about, MAIN_SCORES[dataset.task], *scores])
    about = ["version", "task", "domain", "language", "dataset", "metric"]
    return show(Table([*about, *(row.retriever for row in rows)], lines), "csv")


def _percent(score: float | None) -> Cell:
    return Cell(None if score is None else 100 * score, digits=2)
