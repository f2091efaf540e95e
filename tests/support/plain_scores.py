"""Scores of mteb's tasks, and how far two sets of them are apart."""

import math

import mteb

from rayembed.evaluation.query_results import BEST_OF_QUERIES
from rayembed.results.items import LABELS_OF_ITEMS, OF_ITEMS
from rayembed.results.scores import OF_QUERIES


def scores(model, task):
    """Scores by split, of a fresh task of the same class."""
    return result_of(model, type(task)()).scores


def result_of(model, task):
    """What mteb finds for the task."""
    found = mteb.evaluate(
        model,
        task,
        cache=None,
        co2_tracker=False,
        encode_kwargs={"batch_size": 32, "show_progress_bar": False},
        show_progress_bar=False,
    )
    return found.task_results[0]


def largest_difference(one, other):
    """Over all numbers of two nested structures, which must be alike otherwise; scores of single
    queries, which mteb drops, aside.
    """
    if isinstance(one, dict):
        keys = one.keys() - {OF_QUERIES, BEST_OF_QUERIES, OF_ITEMS, LABELS_OF_ITEMS}
        assert keys == other.keys() - {OF_QUERIES, BEST_OF_QUERIES, OF_ITEMS, LABELS_OF_ITEMS}
        return max((largest_difference(one[key], other[key]) for key in keys), default=0.0)
    if isinstance(one, list):
        return max((largest_difference(a, b) for a, b in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float) and isinstance(other, float):
        return 0.0 if math.isnan(one) and math.isnan(other) else abs(one - other)
    assert one == other
    return 0.0
