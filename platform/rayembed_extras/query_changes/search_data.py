"""Read queries, documents and relevance judgements of scored retrieval tasks, and the results of
each query.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mteb.abstasks.retrieval import AbsTaskRetrieval

from rayembed.evaluation.jobs import TaskFactory, load_data
from rayembed.evaluation.plan import Scoring
from rayembed.evaluation.pooled.model import document_texts, query_texts
from rayembed.evaluation.query_results import (
    BEST_OF_QUERIES,
    QueryResult,
    query_results,
)
from rayembed.results.scores import OF_QUERIES

Place = tuple[str, str]
"""Split and subset of a task."""

Results = Mapping[str, QueryResult]
"""Results of a model by query."""


_ROWS_AT_ONCE = 65_536
"""Ids of a corpus that are in memory at once."""

_MOST_TEXTS = 2_000_000
"""Texts of a task up to which its data are read again for findings."""


@dataclass(frozen=True)
class SearchData:
    """Queries, documents and judgements of one split and subset of a retrieval task."""

    name: str
    """Name of the task, with its subset where it has several."""
    metadata: Any
    """mteb's metadata of the task."""
    place: Place
    corpus: Any
    """Data set of documents with `id`, `text` and perhaps `title`."""
    queries: Mapping[str, str]
    """Texts by id."""
    judged: Mapping[str, Mapping[str, int]]
    """Query → document → grade."""
    without_own_id: bool = False
    """Whether a document with the query's id is no result, as where queries are documents."""

    def relevant(self, query: str) -> tuple[str, ...]:
        """Return the ids of the documents that are relevant to a query."""
        return tuple(document for document, grade in self.judged[query].items() if grade > 0)

    def documents(self, ids: Iterable[str]) -> dict[str, str]:
        """Return the title and text of documents by id; ids missing from the corpus are
        left out.
        """
        wanted, names = set(ids), self.corpus.select_columns(["id"])
        rows = {
            name: first + place
            for first in range(0, len(names), _ROWS_AT_ONCE)
            for place, name in enumerate(names[first : first + _ROWS_AT_ONCE]["id"])
            if name in wanted
        }
        texts = document_texts(self.corpus, list(rows.values())) if rows else []
        return dict(zip(rows, texts, strict=True))


def search_data(factory: TaskFactory) -> Iterator[SearchData]:
    """Load a task and yield each split and subset; nothing for tasks other than retrieval or with
    over two million texts.

    Raises:
        RayembedError: the data cannot be had.
    """
    task = factory.load()
    if not isinstance(task, AbsTaskRetrieval) or factory.num_texts > _MOST_TEXTS:
        return
    load_data(task)
    places = [(split, subset) for subset in task.hf_subsets for split in task.eval_splits]
    for split, subset in places:
        data = task.dataset[subset][split]
        queries = data["queries"]
        texts = query_texts(queries, task.metadata)
        parts = [
            part
            for part, all_ in ((split, task.eval_splits), (subset, task.hf_subsets))
            if len(all_) > 1
        ]
        name = task.metadata.name
        yield SearchData(
            f"{name} ({', '.join(parts)})" if parts else name,
            task.metadata,
            (split, subset),
            data["corpus"],
            dict(zip(queries["id"], texts, strict=True)),
            data["relevant_docs"],
            bool(task.ignore_identical_ids),
        )
    task.unload_data()


def results_by_place(scores: Mapping[str, Sequence[Any]]) -> dict[Place, Results]:
    """Return the results of single queries by split and subset; those without stored rankings are
    left out.

    Args:
        scores: of a task by split, as mteb's result has them.
    """
    found: dict[Place, Results] = {
        (str(split), str(entry["hf_subset"])): query_results(entry)
        for split, rows in scores.items()
        for entry in rows
    }
    return {place: queries for place, queries in found.items() if queries}


def without_rankings(tasks: Sequence[Scoring]) -> list[str]:
    """Return the names of tasks whose results, from older versions, have scores of queries but no
    rankings.
    """
    return [
        scoring.name
        for scoring in tasks
        if any(
            OF_QUERIES in entry and BEST_OF_QUERIES not in entry
            for result in scoring.results.values()
            for rows in result.scores.values()
            for entry in rows
        )
    ]


def piece_results(
    tasks: Sequence[Scoring],
) -> dict[TaskFactory, dict[Place, Results]]:
    """Task factory → results of single queries by split and subset; tasks without such results are
    left out.
    """
    found = {
        piece: results_by_place(result.scores)
        for scoring in tasks
        for piece, result in scoring.results.items()
    }
    return {piece: places for piece, places in found.items() if places}
