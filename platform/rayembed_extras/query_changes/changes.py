"""Find the queries of a task on which the scores of two models differ most, with likely causes."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from datasets import Dataset

from rayembed.evaluation.bm25 import Bm25
from rayembed.evaluation.query_results import DEPTH, QueryResult
from rayembed_extras.query_changes.causes import (
    REMEDIES,
    CutCounts,
    Evidence,
    LikelyCause,
    causes_of,
    language,
)
from rayembed_extras.query_changes.search_data import Results, SearchData

SHOWN = 50
"""Largest losses, and largest gains, of a task that are shown."""

MOST_DOCUMENTS = 100_000
"""Documents of a task up to which BM25 searches them: ten seconds and 0.8 GB."""

_LEAST = 1e-6
"""Difference from which a score counts as changed: stored scores have six decimals."""

_LANGUAGE_OF = 1000
"""Queries whose language stands for the task's."""

Cuts = Callable[[SearchData, Sequence[str], Mapping[str, str]], CutCounts | None]
"""Function from a task, some of its queries, and texts of documents by id to those of both that a
model cuts; None: not known."""

Negatives = Callable[[Mapping[str, str]], Mapping[str, Sequence[str]]]
"""Function from texts of documents by id to queries of the training rows that have them as hard
negatives."""


@dataclass(frozen=True)
class Sources:
    """Functions that look up cut texts and trained negatives of two models, which their results do
    not contain.
    """

    cuts: tuple[Cuts | None, Cuts | None]
    """Of the first and the second model."""
    negatives: Negatives | None = None
    """Of the second model's training; None: it was not trained, or its rows are not known."""


@dataclass(frozen=True)
class Change:
    """A query with the results of both models and the likely causes of the lower score."""

    query: str
    text: str
    before: QueryResult
    after: QueryResult
    relevant: tuple[str, ...]
    causes: tuple[LikelyCause, ...]

    @property
    def difference(self) -> float:
        """Score of the second model minus that of the first."""
        return self.after.score - self.before.score


@dataclass(frozen=True)
class TaskChanges:
    """Queries of one task whose scores differ between two models."""

    name: str
    own: bool
    """Whether the task is on the user's own data."""
    queries: int
    worse: int
    """Number of queries with a lower score by the second model."""
    better: int
    means: tuple[float, float]
    """Mean score over all queries, by the first and the second model."""
    losses: tuple[Change, ...]
    """Largest first, as the gains."""
    gains: tuple[Change, ...]
    texts: Mapping[str, str]
    """Texts of the shown documents."""
    notes: tuple[str, ...] = ()


def changes_in(
    data: SearchData,
    before: Results,
    after: Results,
    sources: Sources,
) -> TaskChanges | None:
    """Find the largest losses and gains of a task; None if no query's score changed.

    Queries that only one of both models has a result for are left out.
    """
    both = [q for q in before if q in after and q in data.queries]
    apart = {q: after[q].score - before[q].score for q in both}
    worse = sorted((q for q in both if apart[q] < -_LEAST), key=lambda q: (apart[q], q))
    better = sorted((q for q in both if apart[q] > _LEAST), key=lambda q: (-apart[q], q))
    if not worse and not better:
        return None
    shown = [*worse[:SHOWN], *better[:SHOWN]]
    relevant = {q: data.relevant(q) for q in shown}
    positives = {document for documents in relevant.values() for document in documents}
    ranked = {d for q in shown for result in (before[q], after[q]) for d in result.best}
    texts = data.documents(positives | ranked)
    of_positives = {document: texts[document] for document in positives if document in texts}
    cuts = [None if look is None else look(data, shown, of_positives) for look in sources.cuts]
    negatives = {} if sources.negatives is None else sources.negatives(of_positives)
    searched = len(data.corpus) <= MOST_DOCUMENTS
    lexical = bm25_results(data, shown) if searched else {}
    usual = language(*list(data.queries.values())[:_LANGUAGE_OF])

    def change(query: str) -> Change:
        is_loss = apart[query] < 0
        cut, other = cuts[is_loss], cuts[not is_loss]
        results = (before[query], after[query])
        evidence = Evidence(
            query=query,
            text=data.queries[query],
            judged=data.judged[query],
            worse=results[is_loss],
            better=results[not is_loss],
            texts=texts,
            cut=cut,
            cut_by_other=other,
            lexical=lexical.get(query),
            trained_negatives=negatives if is_loss else {},
            usual=usual,
        )
        causes = tuple(causes_of(evidence))
        return Change(query, data.queries[query], *results, relevant[query], causes)

    return TaskChanges(
        name=data.name,
        own=data.metadata.dataset["path"].startswith("own/"),
        queries=len(both),
        worse=len(worse),
        better=len(better),
        means=(fmean(before[q].score for q in both), fmean(after[q].score for q in both)),
        losses=tuple(map(change, worse[:SHOWN])),
        gains=tuple(map(change, better[:SHOWN])),
        texts=texts,
        notes=tuple(_notes(searched, cuts)),
    )


def _notes(searched: bool, cuts: Sequence[CutCounts | None]) -> Iterator[str]:
    """Write notes for the reader about possible causes that were not examined."""
    if not searched:
        yield f"BM25 does not search more than {MOST_DOCUMENTS:,} documents"
    unknown = [name for name, cut in zip(("first", "second"), cuts, strict=True) if cut is None]
    if unknown:
        yield f"Which texts the {' and the '.join(unknown)} model cuts is not known"


def bm25_results(data: SearchData, queries: Sequence[str]) -> dict[str, QueryResult]:
    """Search the best documents of some queries with BM25; the scores are BM25's."""
    bm25 = Bm25()
    bm25.index(data.corpus)
    asked = Dataset.from_dict({"id": queries, "text": [data.queries[query] for query in queries]})
    found = bm25.search(asked, task_metadata=data.metadata, top_k=DEPTH + 1)
    best = {
        query: [d for d in scores if not (data.without_own_id and d == query)][:DEPTH]
        for query, scores in found.items()
    }
    return {
        query: QueryResult(found[query][documents[0]] if documents else 0.0, tuple(documents))
        for query, documents in best.items()
    }


def causes_table(tasks: Iterable[TaskChanges]) -> list[tuple[str, int, int, str]]:
    """Return each likely cause with its number of shown losses and gains, and its remedy.

    A query with several causes counts for each.
    """
    losses, gains = Counter[str](), Counter[str]()
    for task in tasks:
        losses.update(kind for one in task.losses for kind in {c.kind for c in one.causes})
        gains.update(kind for one in task.gains for kind in {c.kind for c in one.causes})
    return [
        (kind, losses[kind], gains[kind], remedy)
        for kind, remedy in REMEDIES.items()
        if losses[kind] or gains[kind]
    ]
