"""From the text of an LLM's answer to tasks or to a pair, or to the reason why it is neither.

An answer is anything that a model or a broken server may send: explained, fenced, cut off, nested a
thousand deep, with texts that no file can hold. Nothing here raises for what it reads.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from rayembed.config.synthesis import PairKind
from rayembed.data.records import reject_reason
from rayembed.data.synthesis.languages import in_script_of
from rayembed.data.synthesis.requests import Answer

MAX_TASK_WORDS = 60
MIN_TASK_WORDS = 3
"""One word is a heading, not a task."""

_STARTS_TRIED = 16
"""Places in an answer where JSON may begin; each costs a pass over the text at worst."""

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks within strings

_FENCE = re.compile(r"```[a-zA-Z]*\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
_ESCAPED_UNDERSCORE = re.compile(r"(?<!\\)((?:\\\\)*)\\_")  # Mixtral writes Markdown
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


class Rejected(Exception):  # noqa: N818 - an answer, not a fault of the program
    """Why an answer is unusable, in a few words by which such answers are counted."""


@dataclass(frozen=True)
class Pair:
    """A usable example."""

    query: str
    positive: str
    negatives: tuple[str, ...]


class _Example(BaseModel):
    """Fields of an example; further ones that a model adds do no harm."""

    model_config = ConfigDict(strict=True, extra="ignore", str_strip_whitespace=True)


class _ShortLong(_Example):
    user_query: str
    positive_document: str
    hard_negative_document1: str
    hard_negative_document2: str


class _LongShort(_Example):
    input_text: str
    label: str
    misleading_label: str


class _ShortShort(_Example):
    input: str
    positive: str
    hard_negative: str


_FIELDS: Mapping[PairKind, type[_Example]] = {
    "short-long": _ShortLong,
    "long-short": _LongShort,
    "short-short": _ShortShort,
}


_FAULTS = {"missing": "missing", "string_unicode": "not valid Unicode"}
"""Pydantic's names of what is wrong with a field."""


def read_tasks(answer: Answer) -> list[str]:
    """The tasks that an answer of the first step lists, in its order; unusable ones are left out.

    Raises:
        Rejected: there is no list of tasks.
    """
    lists = [_usable_tasks(value) for value in _values(answer, list)]
    if not lists:
        raise Rejected(_no_json(answer))
    tasks = max(lists, key=len)  # explanations may hold lists too
    if not tasks:
        raise Rejected("no task in the list")
    return tasks


def _usable_tasks(values: list[Any]) -> list[str]:
    tasks = [" ".join(v.split()) for v in values if isinstance(v, str) and _storable(v)]
    return [task for task in tasks if MIN_TASK_WORDS <= count_words(task) <= MAX_TASK_WORDS]


def read_pair(
    kind: PairKind, answer: Answer, *, language: str = "en", least_words: float = 0.0
) -> Pair:
    """The pair that an answer of the second step holds.

    Args:
        kind: of the pair.
        answer: to a request for an example.
        language: code of the language that was asked for.
        least_words: of the long texts: documents of `short-long`, the input of `long-short`.

    Raises:
        Rejected: it holds none that can be used.
    """
    texts = _fields(kind, answer)
    query, positive, *negatives = texts.values()
    reason = reject_reason({"query": query, "positives": [positive]})
    if reason is not None:
        raise Rejected(reason)
    if normalised(positive) == normalised(query):
        raise Rejected("positive equals query")
    _check_negatives(query, positive, negatives)
    for text in (positive, *negatives) if kind == "short-long" else (query,):
        if count_words(text) < least_words:
            raise Rejected("too short")
    if not in_script_of(language, " ".join(texts.values())):
        raise Rejected("not in the script of its language")
    return Pair(query, positive, tuple(negatives))


def count_words(text: str) -> int:
    """Words; of Chinese and Japanese, which put no spaces, characters."""
    return sum(1 for _ in _WORD.finditer(text))


def normalised(text: str) -> str:
    """The words of a text in one form: texts that differ in case, marks or spaces have the same."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _check_negatives(query: str, positive: str, negatives: list[str]) -> None:
    for negative in negatives:
        if reject_reason({"query": query, "positives": [negative]}) is not None:
            raise Rejected("negative is empty or equals query")
        if normalised(negative) == normalised(positive):
            raise Rejected("negative equals positive")


def _fields(kind: PairKind, answer: Answer) -> dict[str, str]:
    """The texts of the first object in the answer that has all fields."""
    reason = None
    for value in _values(answer, dict):
        try:
            example = _FIELDS[kind].model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            what = _FAULTS.get(first["type"], "not a text")
            reason = reason or f"{first['loc'][0]} is {what}"
            continue
        texts: dict[str, str] = example.model_dump()
        return texts
    raise Rejected(reason or _no_json(answer))


def _values(answer: Answer, wanted: type) -> Iterator[Any]:
    """The JSON values of this type that the answer holds, the likeliest first."""
    text = _THOUGHTS.sub("", answer.text)
    for candidate in _candidates(text, "{" if wanted is dict else "["):
        for form in (candidate, _ESCAPED_UNDERSCORE.sub(r"\1_", candidate)):
            try:
                value, _ = _DECODER.raw_decode(form)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, wanted):
                yield value
            break


def _candidates(text: str, opening: str) -> Iterator[str]:
    """Where the value may begin: the text, its fenced blocks, each place with the bracket."""
    yield text.strip()
    for block in _FENCE.findall(text)[:_STARTS_TRIED]:
        yield block.strip()
    start = -1
    for _ in range(_STARTS_TRIED):
        start = text.find(opening, start + 1)
        if start < 0:
            return
        yield text[start:]


def _no_json(answer: Answer) -> str:
    return "cut off at max_tokens" if answer.cut_off else "not JSON of the form asked for"


def _storable(text: str) -> bool:
    """Whether the text is Unicode: JSON can escape halves of characters, which no file takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
