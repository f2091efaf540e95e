"""Parse LLM answers into tasks or a pair; raise the reason if an answer cannot be used.

An answer may be anything that a model or a broken server sends: with explanations, fenced, cut off,
nested a thousand deep, with unencodable texts. Nothing here raises because of its content.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from rayembed.config.types import is_unicode
from rayembed.data.records import reject_reason
from rayembed_extras.synthesis.prompts import WORDINGS
from rayembed_extras.synthesis.requests import ChatAnswer
from rayembed_extras.synthesis.settings import PairKind

ValueT = TypeVar("ValueT")

MAX_TASK_WORDS = 60
MIN_TASK_WORDS = 3
"""Minimum number of words of a task; a single word is a heading."""

_STARTS_TRIED = 16
"""Maximum number of positions where JSON may begin; each costs up to one pass over the text."""

_DECODER = json.JSONDecoder(strict=False)  # models write line breaks within strings

_FENCE = re.compile(r"```[a-zA-Z]*\s*\n(.*?)(?:```|\Z)", re.DOTALL)
_THOUGHTS = re.compile(r"\A\s*<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
_ESCAPED_UNDERSCORE = re.compile(r"(?<!\\)((?:\\\\)*)\\_")  # Mixtral writes Markdown
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")


class RejectedAnswer(Exception):  # noqa: N818 - an answer, not a fault of the program
    """An unusable answer; the message is a short reason for counting."""


@dataclass(frozen=True)
class WrittenPair:
    """A usable training example from an answer."""

    query: str
    positive: str
    negatives: tuple[str, ...]


def read_tasks(answer: ChatAnswer) -> list[str]:
    """Parse an answer of the first step into tasks, in order; unusable ones are left out.

    Raises:
        Rejected: there is no list of tasks.
    """
    lists = [_usable_tasks(value) for value in _values(answer, list)]
    if not lists:
        raise RejectedAnswer(_no_json(answer))
    tasks = max(lists, key=len)  # explanations may hold lists too
    if not tasks:
        raise RejectedAnswer("the answer's list has no task")
    return tasks


def _usable_tasks(values: list[Any]) -> list[str]:
    tasks = [" ".join(v.split()) for v in values if isinstance(v, str) and is_unicode(v)]
    return [task for task in tasks if MIN_TASK_WORDS <= count_words(task) <= MAX_TASK_WORDS]


def read_pair(
    kind: PairKind, answer: ChatAnswer, *, language: str = "en", least_words: float = 0.0
) -> WrittenPair:
    """Parse an answer of the second step into a pair.

    Args:
        kind: of the pair.
        answer: to a request for an example.
        language: code of the language that was asked for.
        least_words: of the long texts: documents of `short-long`, the input of `long-short`.

    Raises:
        Rejected: it holds none that can be used.
    """
    query, positive, *negatives = texts = first_usable(answer, partial(_fields, kind))
    reason = reject_reason({"query": query, "positives": [positive]})
    if reason is not None:
        raise RejectedAnswer(reason)
    if normalised(positive) == normalised(query):
        raise RejectedAnswer("positive equals query")
    _check_negatives(query, positive, negatives)
    for text in (positive, *negatives) if kind == "short-long" else (query,):
        if count_words(text) < least_words:
            raise RejectedAnswer("a text has too few words")
    if not in_script_of(language, " ".join(texts)):
        raise RejectedAnswer("a text is not in the script of its language")
    return WrittenPair(query, positive, tuple(negatives))


def count_words(text: str) -> int:
    """Count words; for Chinese and Japanese, which have no spaces, count characters."""
    return sum(1 for _ in _WORD.finditer(text))


def normalised(text: str) -> str:
    """Normalise a text so that case, punctuation and spaces make no difference."""
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


def _check_negatives(query: str, positive: str, negatives: list[str]) -> None:
    for negative in negatives:
        if reject_reason({"query": query, "positives": [negative]}) is not None:
            raise RejectedAnswer("negative is empty or equals query")
        if normalised(negative) == normalised(positive):
            raise RejectedAnswer("negative equals positive")


def _fields(kind: PairKind, example: Mapping[str, Any]) -> list[str]:
    """Return the texts of an example's fields; raise if a field is missing or not a text."""
    fields = WORDINGS[kind].fields  # others are ignored
    for name in fields:
        if name not in example:
            raise RejectedAnswer(f"{name} is missing")
        if not isinstance(example[name], str):
            raise RejectedAnswer(f"{name} is not a text")
        if not is_unicode(example[name]):
            raise RejectedAnswer(f"{name} is not valid Unicode")
    return [example[name].strip() for name in fields]


def first_usable(answer: ChatAnswer, read: Callable[[dict[str, Any]], ValueT]) -> ValueT:
    """Apply `read` to the JSON objects in the answer, and return the first result that is
    usable.

    Args:
        read: raises `RejectedAnswer` of one that cannot.

    Raises:
        RejectedAnswer: there is none, with the reason of the first.
    """
    problem = None
    for value in _values(answer, dict):
        try:
            return read(value)
        except RejectedAnswer as error:
            problem = problem or error
    raise problem or RejectedAnswer(_no_json(answer))


def _values(answer: ChatAnswer, wanted: type) -> Iterator[Any]:
    """Yield the JSON values of a type in the answer, most likely ones first."""
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
    """Yield texts that may be the JSON value: the whole text, fenced blocks, and the rest from each
    opening bracket.
    """
    yield text.strip()
    for block in _FENCE.findall(text)[:_STARTS_TRIED]:
        yield block.strip()
    start = -1
    for _ in range(_STARTS_TRIED):
        start = text.find(opening, start + 1)
        if start < 0:
            return
        yield text[start:]


def _no_json(answer: ChatAnswer) -> str:
    """Say why an answer without a usable value is rejected."""
    return "cut off at max_tokens" if answer.cut_off else "not JSON of the form asked for"


_SCRIPTS = {
    "ar": {"ARABIC"},
    "be": {"CYRILLIC"},
    "bg": {"CYRILLIC"},
    "bn": {"BENGALI"},
    "el": {"GREEK"},
    "fa": {"ARABIC"},
    "gu": {"GUJARATI"},
    "he": {"HEBREW"},
    "hi": {"DEVANAGARI"},
    "hy": {"ARMENIAN"},
    "ja": {"HIRAGANA", "KATAKANA", "CJK", "KATAKANA-HIRAGANA"},
    "ka": {"GEORGIAN"},
    "km": {"KHMER"},
    "kn": {"KANNADA"},
    "ko": {"HANGUL", "CJK"},
    "mk": {"CYRILLIC"},
    "ml": {"MALAYALAM"},
    "mr": {"DEVANAGARI"},
    "my": {"MYANMAR"},
    "ne": {"DEVANAGARI"},
    "pa": {"GURMUKHI"},
    "ru": {"CYRILLIC"},
    "ta": {"TAMIL"},
    "te": {"TELUGU"},
    "th": {"THAI"},
    "uk": {"CYRILLIC"},
    "ur": {"ARABIC"},
    "zh": {"CJK"},
}
"""Non-Latin scripts by language, as prefixes of Unicode letter names."""

_LATIN = (
    "af ca cs cy da de en es et eu fi fr ga gl hr hu id is it lt lv ms nl no pl pt ro sk sl sq sv "
    "sw tl tr vi"
)
"""Codes of languages written in Latin letters."""

_LEAST_SHARE = 0.5
"""Minimum share of letters in the language's script; names, formulas and code keep their own."""

_LETTERS_READ = 2000


def in_script_of(language: str, text: str) -> bool:
    """Whether at least half of the letters are in a script of the language; unknown codes pass.

    Args:
        language: code; only the part before `-` or `_` counts: `zh-Hans`.
        text: of which the first 2,000 characters are read.
    """
    code = language.replace("_", "-").partition("-")[0].lower()
    allowed = {"LATIN"} if code in _LATIN.split() else _SCRIPTS.get(code)
    if allowed is None:
        return True
    scripts = Counter(
        unicodedata.name(character, "?").partition(" ")[0]
        for character in text[:_LETTERS_READ]
        if character.isalpha()
    )
    written = sum(scripts.values())
    return written == 0 or sum(scripts[name] for name in allowed) >= _LEAST_SHARE * written
