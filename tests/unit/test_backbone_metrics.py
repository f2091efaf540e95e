"""Scores against values computed by hand."""

import math

import numpy as np
import pytest

from rayembed_papers.backbone.metrics import (
    answer_metrics,
    class_metrics,
    correlation_metrics,
    ranking_metrics,
    spans_of,
    tag_metrics,
)


def test_classes():
    # true positives 2, false positives 1, false negatives 1, true negatives 2
    found = class_metrics([1, 1, 1, 0, 0, 0], [1, 1, 0, 1, 0, 0], 2)
    matthews = (2 * 2 - 1 * 1) / math.sqrt(3 * 3 * 3 * 3)
    assert found == pytest.approx({"accuracy": 4 / 6, "f1": 2 / 3, "matthews": matthews})
    assert class_metrics([0, 1, 2, 2], [0, 1, 1, 2], 3) == {"accuracy": 0.75}
    assert class_metrics([0, 0], [0, 0], 3) == {"accuracy": 1.0}, "the task says how many there are"
    assert class_metrics([0, 0, 0], [0, 1, 0], 2)["matthews"] == 0.0


def test_correlations():
    found = correlation_metrics([1, 2, 3, 10], [1, 2, 4, 3])
    # deviations -3 -2 -1 6 and -1.5 -.5 1.5 .5: 4.5 + 1 - 1.5 + 3 = 7; squares 50 and 5
    assert found["pearson"] == pytest.approx(7 / math.sqrt(50 * 5))
    # ranks 1 2 3 4 and 1 2 4 3: 1 - 6 * 2 / (4 * 15)
    assert found["spearman"] == pytest.approx(1 - 12 / 60)
    nothing = {"pearson": 0.0, "spearman": 0.0}
    assert correlation_metrics([2, 2, 2], [1, 2, 3]) == nothing
    assert correlation_metrics([2, math.nan, 1], [1, 2, 3]) == nothing


def test_spans_of_tags():
    tags = ["B-PER", "I-PER", "B-PER", "O", "I-LOC", "I-ORG", "B-ORG"]
    assert spans_of(tags) == {
        ("PER", 0, 1),
        ("PER", 2, 2),
        ("LOC", 4, 4),
        ("ORG", 5, 5),
        ("ORG", 6, 6),
    }
    assert spans_of(["NOUN", "NOUN", "VERB", "NOUN"]) == {
        ("NOUN", 0, 1),
        ("VERB", 2, 2),
        ("NOUN", 3, 3),
    }
    assert spans_of([]) == spans_of(["O", "O"]) == set()


def test_tags():
    true = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    guess = [["B-PER", "O", "O", "B-LOC"], ["B-ORG", "B-ORG"]]
    # found 4, wanted 3, both 2
    assert tag_metrics(guess, true) == pytest.approx({"f1": 2 * 2 / (4 + 3), "accuracy": 4 / 6})
    assert tag_metrics([["O"]], [["O"]]) == {"f1": 0.0, "accuracy": 1.0}


def test_answers():
    predicted = ["The cat sat.", "dogs", "", "x"]
    true = [["a cat", "cat sat"], ["two dogs"], ["none"], ["y"]]
    # 1 exact; 2*1/(1+2); 0; 0
    assert answer_metrics(predicted, true) == pytest.approx(
        {"f1": (1 + 2 / 3) / 4, "exact_match": 1 / 4}
    )


def test_rankings():
    ranked = np.array([[3, 1, 0], [1, 2, 0], [5, 6, 7]])
    right = ranked == np.array([1, 1, 9])[:, None]
    assert ranking_metrics(right, 20) == pytest.approx(
        {"accuracy": 1 / 3, "map_at_20": (1 / 2 + 1 + 0) / 3}
    )
    assert ranking_metrics(right[:, :1], 1)["map_at_1"] == pytest.approx(1 / 3)
