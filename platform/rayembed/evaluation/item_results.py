"""Store the outcome of each item of a task beside mteb's scores, so that scores of some items can
be computed later.

An item is a test text of a classification, a pair of texts, or a query of a reranking; the scores
of a retrieval's queries are `query_results`. All outcomes are one text, since mteb writes a list
with one number a line.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS

OF_ITEMS = "outcomes_of_items"
"""Outcomes in the order of the rows, of a reranking in the order of the queries' ids: of a text the
share of experiments that classified it right, of a pair its similarity, the one that mteb's main
score is of, of a query its average precision."""

_RERANKING = "map_at_1000"


def keep_items(task: Any) -> None:
    """Make a task store its items' outcomes in its results, unless it computes its scores in its
    own way.
    """
    kind = type(task)
    if isinstance(task, AbsTaskClassification):
        if kind._calculate_scores is AbsTaskClassification._calculate_scores:
            _keep_texts(task)
    elif isinstance(task, AbsTaskSTS):
        if kind._calculate_scores is AbsTaskSTS._calculate_scores:
            task._calculate_scores = _with_cosines(task._calculate_scores)
    elif isinstance(task, AbsTaskPairClassification):
        if kind._compute_metrics is AbsTaskPairClassification._compute_metrics:
            task._compute_metrics = _with_best(task._compute_metrics)
    elif isinstance(task, AbsTaskRetrieval):
        plain = kind.task_specific_scores is AbsTaskRetrieval.task_specific_scores
        if plain and task.metadata.main_score == _RERANKING:
            task.task_specific_scores = _of_queries


def item_outcomes(entry: Mapping[str, Any]) -> np.ndarray | None:
    """Read the (items,) float64 outcomes of one split and subset; None if none are stored."""
    return np.array(entry[OF_ITEMS].split(), dtype=np.float64) if OF_ITEMS in entry else None


def _keep_texts(task: Any) -> None:
    """Make a classification task store each text's share of correct experiments; not in
    cross-validation, whose experiments differ in their texts.
    """
    score, average, right = task._calculate_scores, task._calculate_avg_scores, []

    def scored(y_test: Any, y_pred: Any) -> Any:
        right.append(np.asarray(y_test) == np.asarray(y_pred))
        return score(y_test, y_pred)

    def averaged(scores: Any) -> Any:
        taken, right[:] = right[:], []
        found = average(scores)
        if task.is_cross_validation:
            return found
        return {**found, OF_ITEMS: _text(np.mean(taken, axis=0))}

    task._calculate_scores, task._calculate_avg_scores = scored, averaged


def _with_cosines(compute: Any) -> Any:
    def computed(similarities: Mapping[str, Any], labels: Any) -> Any:
        found = compute(similarities, labels)
        return {**found, OF_ITEMS: _text(np.asarray(similarities["cosine_scores"]))}

    return computed


_MEASURES = {
    "cosine": ("cosine_scores", 1),
    "dot": ("dot_scores", 1),
    "euclidean": ("euclidean_distances", -1),
    "manhattan": ("manhattan_distances", -1),
}
"""mteb's name of a measure of pairs → its values, and their sign as similarities."""


def _with_best(compute: Any) -> Any:
    """Store each pair's similarity by the measure with the highest average precision, which gives
    the main score `max_ap`. For vectors of length 1, all measures but the Manhattan distance rank
    alike.
    """

    def computed(similarities: Mapping[str, Any], labels: Any) -> Any:
        found = compute(similarities, labels)
        best = max(_MEASURES, key=lambda name: found[f"{name}_ap"])
        values, sign = _MEASURES[best]
        return {**found, OF_ITEMS: _text(sign * np.asarray(similarities[values]))}

    return computed


def _of_queries(scores: Mapping[str, Mapping[str, float]], *_: Any, **_more: Any) -> dict[str, str]:
    return {OF_ITEMS: _text([scores[query]["map_cut_1000"] for query in sorted(scores)])}


def _text(values: np.ndarray | Sequence[float]) -> str:
    return " ".join(f"{float(value):.7g}" for value in values)
