"""Score dev splits as AIR-Bench's own evaluation does, and tabulate the scores.

Only dev splits can be scored here. What a model reaches on test splits, and its rank, is known
only from the leaderboard, after a submission; a dev score is no estimate of it for the long
documents, which differ between the splits.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rayembed.assets.storage import join, write_atomic
from rayembed.display.tables import Cell, Table, show
from rayembed.errors import DataError
from rayembed_extras.air_bench.catalogue import AirBenchDataset, Task, air_bench_datasets
from rayembed_extras.air_bench.hub_data import Labels
from rayembed_extras.air_bench.results import AirBenchResults, Found
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
    """Average `ndcg_at_10`, `map_at_…`, `recall_at_…` and `precision_at_…` over the labelled
    queries.

    trec_eval's measures, which break ties between documents by their ids. Not rounded; AIR-Bench
    rounds to five decimals.

    Raises:
        DataError: a labelled query has no result.
    """
    import pytrec_eval

    if lost := sorted(set(labels) - set(found)):
        raise DataError(f"{len(lost)} labelled queries have no search results, such as {lost[:5]}")
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
    """Data set (`qa_arxiv_en_default`) → nDCG@10 for qa, Recall@10 for long-doc; None: not computed
    yet."""

    def datasets(self, task: Task | None = None) -> tuple[AirBenchDataset, ...]:
        """List the data sets with a dev split, of all tasks or of one task."""
        tasks = () if task is None else (task,)
        return air_bench_datasets(self.version, tasks=tasks, splits=("dev",))

    def mean(self, task: Task) -> float | None:
        """Average a task's data sets as the leaderboard does; None while a score is missing."""
        found = [self.scores.get(dataset.label) for dataset in self.datasets(task)]
        known = [score for score in found if score is not None]
        return sum(known) / len(known) if len(known) == len(found) else None


def read_dev_scores(folder: str, version: str, retriever: str) -> DevScores:
    """Read the dev scores computed so far from the records of the result files.

    Raises:
        ConfigError: no such version, or one without dev splits.
        ArtifactError: there are no results of the retriever.
    """
    datasets = air_bench_datasets(version, splits=("dev",))
    results = AirBenchResults.of(folder, version, retriever)
    scores: dict[str, float | None] = {}
    for dataset in datasets:
        record = results.record(dataset, "dev")
        of_task = record.scores if record is not None else {}
        scores[dataset.label] = of_task.get(MAIN_SCORES[dataset.task])
    return DevScores(version, retriever, scores)


def dev_file(folder: str, version: str, retriever: str) -> str:
    """Path of the CSV file with a retriever's dev scores, in the folder of its results."""
    return join(folder, version, retriever, _DEV_FILE)


def write_dev_scores(folder: str, version: str, retriever: str) -> None:
    """Write the dev scores computed so far to the CSV file `dev_file`; raises the same errors as
    `read_dev_scores`.
    """
    table = dev_csv(read_dev_scores(folder, version, retriever))
    write_atomic(dev_file(folder, version, retriever), table.encode())


def dev_markdown(found: DevScores) -> str:
    """Format the dev scores as a Markdown table in percent: a row for each data set, and each
    task's mean.
    """
    lines: list[list[object]] = []
    for task, metric in MAIN_SCORES.items():
        for dataset in found.datasets(task):
            about = [task, dataset.domain, dataset.language, dataset.name, metric]
            lines.append([*about, _percent(found.scores.get(dataset.label))])
        lines.append([f"**{task}**", "", "", "**mean**", metric, _percent(found.mean(task))])
    heads = ["Task", "Domain", "Language", "Data set", "Score", found.retriever]
    return show(Table(heads, lines, align="lllllr"), "markdown")


def dev_csv(found: DevScores) -> str:
    """Format the dev scores as CSV: unrounded fractions, without means; missing scores are
    empty.
    """
    lines = [
        [
            *(one.version, one.task, one.domain, one.language, one.name, MAIN_SCORES[one.task]),
            Cell(found.scores.get(one.label)),
        ]
        for one in found.datasets()
    ]
    about = ["version", "task", "domain", "language", "dataset", "metric"]
    return show(Table([*about, found.retriever], lines), "csv")


def _percent(score: float | None) -> Cell:
    return Cell(None if score is None else 100 * score, digits=2)
