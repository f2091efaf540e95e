"""What a column's name says about its cells, by the words that it is made of."""

import re
from collections.abc import Sequence

NEGATIVES, IDS, SCORES = "negatives", "ids of negatives", "scores"
LABELS, INSTRUCTIONS = "labels", "instructions"
PAIR_LABELS = "labels of pairs"
"""Whether a row's texts are a pair: not the class of a text, which `LABELS` are."""
TEXTS = "texts"

_TURNS = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
"""Beginnings of words in camelCase."""

_COUNTED = re.compile("count|false|has|is|max|min|no?|not|num|number|share|total")
"""Words of names of numbers, flags and opposites (`num_negatives`, `is_negative`,
`false_negatives`), whatever else they name."""

_NEGATIVE = re.compile(
    "(hard)?(neg|negative)s?|rejected|contradictions?|distractors?|irrelevant|nonrelevant"
)
_WRONG = re.compile("wrong|incorrect")
_TEXT = re.compile(
    "(abstract|answer|candidate|caption|chunk|code|completion|content|context|ctx|doc|document|"
    "example|hit|item|list|output|pair|paragraph|passage|question|response|sample|sentence|text|"
    "title)s?|query|queries"
)
_SCORE = re.compile("cosine|logits?|ratings?|relevance|scores?|similarity|similarities")
_LABEL = re.compile("category|categories|class|classes|(cluster|intent|label|topic)s?")
_OF_LABEL = re.compile("id|idx|index|name|text")
_YES_OR_NO = re.compile("duplicate|equivalent|match|paraphrase|relevant|similar")
_INSTRUCTION = re.compile(
    r"(query_)?(instructions?|prompts?|tasks?|task_(description|definition))(_\d+)?"
)


def look_of_name(name: str) -> str | None:
    """What a column looks like by its name; None: like nothing that training could read.

    As in English compounds the last word says what it is: `negative_passages` are texts and
    `passage_scores` are scores, but a `negative_sentiment` and a `score_date` are neither.
    """
    words = words_of(name)
    if _INSTRUCTION.fullmatch("_".join(words)):
        return INSTRUCTIONS
    words = [word for word in words if not word.isdigit()]
    if not words:
        return None
    if words[0] == "is" and _YES_OR_NO.fullmatch(words[-1]):
        return PAIR_LABELS
    if _any(_COUNTED, words):
        return None
    tests = {NEGATIVES: _are_negatives, SCORES: _are_scores, LABELS: _are_labels}
    return next((look for look, holds in tests.items() if holds(words)), None)


def words_of(name: str) -> list[str]:
    """Lower-case words and numbers of a name in snake_case, camelCase or plain words."""
    return [word.lower() for word in re.findall(r"[^\W\d_]+|\d+", _TURNS.sub("_", name))]


def _are_negatives(words: Sequence[str]) -> bool:
    if words[:-1] == ["non"]:
        words = ["non" + words[-1]]
    wrong = _any(_WRONG, words) and _any(_TEXT, words)
    return (wrong or _any(_NEGATIVE, words)) and (
        _any(_TEXT, words[-1:]) or _any(_NEGATIVE, words[-1:])
    )


def _are_scores(words: Sequence[str]) -> bool:
    return _any(_SCORE, words[-1:]) or words in (["sim"], ["cos", "sim"])


def _are_labels(words: Sequence[str]) -> bool:
    return _any(_LABEL, words[-1:]) or (_any(_OF_LABEL, words[-1:]) and _any(_LABEL, words[-2:-1]))


def _any(pattern: re.Pattern[str], words: Sequence[str]) -> bool:
    return any(map(pattern.fullmatch, words))
