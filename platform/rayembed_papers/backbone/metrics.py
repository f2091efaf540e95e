"""Compute scores of predictions as GLUE and XTREME-R define them, all between -1 and 1."""

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

Metrics = dict[str, float]

Query = TypeVar("Query", bound=Hashable)
Document = TypeVar("Document", bound=Hashable)


def class_metrics(predicted: ArrayLike, true: ArrayLike, num_classes: int) -> Metrics:
    """Compute accuracy and, with two classes, F1 of the second class and Matthews'
    correlation.

    Where all predictions are one class, Matthews' correlation is 0.
    """
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    guess, truth = np.asarray(predicted), np.asarray(true)
    found = {"accuracy": float(accuracy_score(truth, guess))}
    if num_classes == 2:
        found["f1"] = float(f1_score(truth, guess, zero_division=0.0))
        found["matthews"] = float(matthews_corrcoef(truth, guess))
    return found


def correlation_metrics(predicted: ArrayLike, true: ArrayLike) -> Metrics:
    """Compute Pearson's and Spearman's correlation; 0 if all predictions are equal or one
    is NaN.
    """
    from scipy.stats import pearsonr, spearmanr

    guess, truth = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    if not np.isfinite(guess).all() or guess.min() == guess.max():
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(pearsonr(guess, truth).statistic),
        "spearman": float(spearmanr(guess, truth).statistic),
    }


def tag_metrics(predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> Metrics:
    """Compute F1 of the spans of all sentences together, and accuracy of tags.

    Spans are found as conlleval and seqeval find them: tags with `B-` and `I-` by their prefixes, a
    type's `I-` after another type or after `O` beginning a span; tags without prefix (parts of
    speech) by runs of one tag.
    """
    right = guessed = there = 0
    same = total = 0
    for guess, truth in zip(predicted, true, strict=True):
        found, wanted = spans_of(guess), spans_of(truth)
        right += len(found & wanted)
        guessed += len(found)
        there += len(wanted)
        same += sum(a == b for a, b in zip(guess, truth, strict=True))
        total += len(truth)
    return {"f1": _f1(right, guessed, there), "accuracy": same / total if total else 0.0}


def spans_of(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Extract type, first and last position of each tagged span of a sentence."""
    found = set()
    begin, kind = 0, ""
    for place, tag in enumerate([*tags, "O"]):
        prefix, dash, name = tag.partition("-")
        here = name if dash else "" if tag == "O" else tag
        if kind and (here != kind or (dash and prefix == "B")):
            found.add((kind, begin, place - 1))
            kind = ""
        if here and not kind:
            begin, kind = place, here
    return found


def answer_metrics(predicted: Sequence[str], true: Sequence[Sequence[str]]) -> Metrics:
    """Compute SQuAD's F1 and exact match, each the maximum over the true answers, averaged over
    questions.

    As in the pipeline of the paper, words are what white space parts in every language, also where
    a language has none between words.
    """
    from transformers.data.metrics.squad_metrics import compute_exact, compute_f1

    scores = {"f1": compute_f1, "exact_match": compute_exact}
    pairs = list(zip(predicted, true, strict=True))
    return {
        name: float(
            np.mean([max(score(one, guess) for one in answers) for guess, answers in pairs])
        )
        for name, score in scores.items()
    }


def ranking_metrics(right: np.ndarray, k: int) -> Metrics:
    """Compute accuracy of the first document and mean average precision at `k`, with one relevant
    document for each query.

    Args:
        right: (queries, at most k) whether a document is the right one, the best ranked first.
    """
    precisions = right / np.arange(1, right.shape[1] + 1)
    return {
        "accuracy": float(right[:, 0].mean()),
        f"map_at_{k}": float(precisions.sum(axis=1).mean()),
    }


def _f1(right: int, guessed: int, there: int) -> float:
    return 2 * right / (guessed + there) if right else 0.0
