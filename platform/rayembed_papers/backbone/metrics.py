"""Scores of predictions, by the definitions of GLUE and XTREME-R; all between -1 and 1."""

import string
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike

Metrics = dict[str, float]

Query = TypeVar("Query", bound=Hashable)
Document = TypeVar("Document", bound=Hashable)


def class_metrics(predicted: ArrayLike, true: ArrayLike, num_classes: int) -> Metrics:
    """Accuracy and, where there are two classes, F1 of the second and Matthews' correlation.

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
    """Pearson's and Spearman's correlation; 0 where all predictions are alike or one is NaN."""
    from scipy.stats import pearsonr, spearmanr

    guess, truth = np.asarray(predicted, dtype=np.float64), np.asarray(true, dtype=np.float64)
    if not np.isfinite(guess).all() or guess.min() == guess.max():
        return {"pearson": 0.0, "spearman": 0.0}
    return {
        "pearson": float(pearsonr(guess, truth).statistic),
        "spearman": float(spearmanr(guess, truth).statistic),
    }


def tag_metrics(predicted: Sequence[Sequence[str]], true: Sequence[Sequence[str]]) -> Metrics:
    """F1 of spans over all sentences together, and accuracy of tags.

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
    """Type, first and last place of each span of a sentence."""
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
    """SQuAD's F1 and exact match, each against the best of the true answers, mean over questions.

    As in the pipeline of the paper, words are what white space parts in every language, also where
    a language has none between words.
    """
    pairs = list(zip(predicted, true, strict=True))
    return {
        "f1": _mean([_best(_word_f1, guess, answers) for guess, answers in pairs]),
        "exact_match": _mean([_best(_same, guess, answers) for guess, answers in pairs]),
    }


def ranking_metrics(
    ranked: Mapping[Query, Sequence[Document]], right: Mapping[Query, Document], k: int = 20
) -> Metrics:
    """Accuracy of the first document and mean average precision at `k`, one right one a query.

    Args:
        ranked: query → its documents, the best first.
        right: query → the document that it asks for.
    """
    first, precisions = [], []
    for query, document in right.items():
        best = list(ranked[query][:k])
        first.append(float(best[:1] == [document]))
        precisions.append(1 / (best.index(document) + 1) if document in best else 0.0)
    return {"accuracy": _mean(first), f"map_at_{k}": _mean(precisions)}


def _best(
    score: Callable[[list[str], list[str]], float], guess: str, answers: Sequence[str]
) -> float:
    words = _words(guess)
    return max((score(words, _words(answer)) for answer in answers), default=0.0)


def _word_f1(guess: list[str], truth: list[str]) -> float:
    shared = sum((Counter(guess) & Counter(truth)).values())
    return _f1(shared, len(guess), len(truth))


def _same(guess: list[str], truth: list[str]) -> float:
    return float(guess == truth)


def _words(text: str) -> list[str]:
    """Lower case, without ASCII punctuation and English articles (SQuAD's normalisation)."""
    kept = "".join(sign for sign in text.lower() if sign not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _f1(right: int, guessed: int, there: int) -> float:
    return 2 * right / (guessed + there) if right else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
