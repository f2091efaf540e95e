"""Store the outcome of each item of a task beside mteb's scores, so that scores of some items can
be computed later; `results/items.py` reads them.

An item is a test text of a classification, a pair of texts, or a query of a search; the nDCG@10 of
queries is stored by `query_results`.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS

from rayembed.results.items import LABELS_OF_ITEMS, OF_ITEMS, as_text

_OF_TREC = {"ndcg": "ndcg_cut", "map": "map_cut", "recall": "recall", "precision": "P"}
"""mteb's name of a measure → that of trec_eval."""


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
        found = re.fullmatch(r"(\w+)_at_(\d+)", task.metadata.main_score)
        is_kept = task.metadata.main_score == "ndcg_at_10"
        if plain and found and found[1] in _OF_TREC and not is_kept:
            task.task_specific_scores = _of_queries(f"{_OF_TREC[found[1]]}_{found[2]}")


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
        return {**found, OF_ITEMS: as_text(np.mean(taken, axis=0))}

    task._calculate_scores, task._calculate_avg_scores = scored, averaged


def _with_cosines(compute: Any) -> Any:
    def computed(similarities: Mapping[str, Any], labels: Any) -> Any:
        found = compute(similarities, labels)
        values = np.asarray(similarities["cosine_scores"])
        return {**found, OF_ITEMS: as_text(values), LABELS_OF_ITEMS: as_text(labels)}

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
        best_values = sign * np.asarray(similarities[values])
        return {**found, OF_ITEMS: as_text(best_values), LABELS_OF_ITEMS: as_text(labels)}

    return computed


def _of_queries(measure: str) -> Any:
    def computed(
        scores: Mapping[str, Mapping[str, float]], *_: Any, **_more: Any
    ) -> dict[str, str]:
        if not all(measure in of_query for of_query in scores.values()):
            return {}
        return {OF_ITEMS: as_text([scores[query][measure] for query in sorted(scores)])}

    return computed
