"""Read articles of the Wikipedia sample, hold out some, mask titles and split sentences.

Pure functions of texts and a seed. `rows` turns articles into rows for training, `tasks` into
rows for scores.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayembed.data.hashes import seeded_hash
from rayembed.data.words import split_sentences
from rayembed.errors import DataError

MASK = "it"
"""Replacement for a masked title. A pronoun keeps the grammar, is one token for every tokenizer
and, being in every text, gives retrieval nothing to match."""

NO_TOPIC = "Uncategorized"
"""The sample's label of articles without a topic; not a class."""

_FIELDS = ("title", "extract", "description", "topic")

_LINKING_WORDS = re.compile(
    r"the|and|for|from|with|into|les|los|las|der|die|das|von|van|den|dem|und", re.IGNORECASE
)


@dataclass(frozen=True)
class Article:
    """One article summary."""

    title: str
    extract: str
    """Introduction of the article."""
    description: str
    """One-line description; may be empty."""
    topic: str
    """One of eleven classes, or `NO_TOPIC`."""


def read_articles(path: Path) -> list[Article]:
    """Read all articles of a JSON file, in order.

    Args:
        path: an object of titles, or a list, of objects with title, extract, description, topic.

    Raises:
        DataError: not such a file; the message names the first entry that is wrong.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the Wikipedia summaries {str(path)!r}: {error}") from None
    entries = list(content.values()) if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{str(path)!r} holds no articles")
    articles = []
    for number, entry in enumerate(entries):
        found = [entry.get(name) if isinstance(entry, dict) else None for name in _FIELDS]
        values = [value for value in found if isinstance(value, str)]
        if len(values) < len(_FIELDS) or not values[0]:
            raise DataError(
                f"entry {number} of {str(path)!r} is not an article: {str(entry)[:200]}; an "
                f"article must have the texts {', '.join(_FIELDS)}"
            )
        articles.append(Article(*values))
    return articles


def held_out_titles(articles: Iterable[Article], num_titles: int, seed: int) -> frozenset[str]:
    """Choose the `num_titles` titles with the smallest hash of seed and title.

    Selection is independent of order, so adding articles changes few titles.
    """
    return frozenset(held_out_in_order(articles, num_titles, seed))


def held_out_in_order(articles: Iterable[Article], num_titles: int, seed: int) -> list[str]:
    """Choose the titles of `held_out_titles`, in the order of their hashes."""
    titles = {article.title for article in articles}
    ordered = sorted(titles, key=lambda title: (seeded_hash(seed, "held-out", title), title))
    return ordered[:num_titles]


@dataclass(frozen=True)
class HeldOutTitles:
    """Titles and texts that training rows must not contain."""

    titles: frozenset[str]
    texts: frozenset[str]


def hold_out(samples: Iterable[Sequence[Article]], num_titles: int, seed: int) -> HeldOutTitles:
    """Collect held-out titles and texts of samples in several languages, `num_titles` in
    each.

    A title that one of them holds out is held out of all.
    """
    samples = list(samples)
    titles = frozenset[str]().union(*(held_out_titles(s, num_titles, seed) for s in samples))
    return HeldOutTitles(
        titles, frozenset[str]().union(*(held_out_texts(s, titles) for s in samples))
    )


def held_out_texts(articles: Iterable[Article], titles: frozenset[str]) -> frozenset[str]:
    """Collect all texts in which an evaluation may show the held-out articles, plain and with
    masked titles.

    For each held-out article: title, text, description, every sentence, the text's other sentences,
    and its two halves. A title that also names a topic ("History") is excluded, as the class name
    occurs in training rows of its articles. Texts are compared whole, so parts of them or texts
    truncated by an evaluation are not recognised.

    A training row of any source that contains one of them is rejected, including a description such
    as "Family of birds" that a training article shares with a held-out one.
    """
    articles = list(articles)
    topics = {article.topic for article in articles}
    texts = {article.title for article in articles} & titles - topics
    for article in articles:
        if article.title not in titles:
            continue
        sentences = split_sentences(article.extract)
        masked = [mask_title(text, article.title) for text in sentences]
        whole = [article.extract, article.description, *_rests(sentences), *_halves(sentences)]
        texts.update(whole, sentences, masked, _rests(masked), _halves(masked))
        texts.update(mask_title(text, article.title) for text in whole)
    return frozenset(text for text in (t.strip() for t in texts) if text)


def _rests(sentences: list[str]) -> list[str]:
    """For each sentence, join all other sentences: once without this position, once without equal
    sentences.
    """
    by_place = (sentences[:i] + sentences[i + 1 :] for i in range(len(sentences)))
    by_text = ([other for other in sentences if other != text] for text in sentences)
    return [" ".join(rest) for rest in (*by_place, *by_text)]


def _halves(sentences: Sequence[str]) -> list[str]:
    middle = (len(sentences) + 1) // 2
    return [" ".join(sentences[:middle]), " ".join(sentences[middle:])]


def mask_title(text: str, title: str) -> str:
    """Replace an article's title in a text by `MASK`, so that no string match finds the
    article.

    Masked are, whatever their accents: the title, and the title without what stands in
    parentheses or after a comma, in any case and with a plural s; then every single word that the
    title writes with a capital or a digit ("Nietzsche" of "Friedrich Nietzsche"), as written.
    """
    base = re.sub(r"\s*\([^)]*\)", "", title).strip() or title
    whole = sorted({title, base, base.split(",")[0].strip()}, key=len, reverse=True)
    words = {
        word
        for word in re.findall(r"[^\W_]+(?:['’-][^\W_]+)*", base)
        if len(word) > 2
        and not _LINKING_WORDS.fullmatch(word)
        and (word[0].isupper() or word[0].isdigit())
    }
    names = [_pattern(name) for name in whole if name]
    parts = [_pattern(word) for word in sorted(words, key=lambda word: (-len(word), word))]
    spans = _spans(text, names, re.IGNORECASE) + _spans(text, parts, 0)
    return _replace(text, spans)


def _pattern(name: str) -> str:
    return r"(?<!\w)" + re.escape(_fold(name)).replace(r"\ ", r"\s+") + r"(?:s|es)?(?!\w)"


def _fold(text: str) -> str:
    """Remove accents from a text without changing character positions."""
    return "".join(unicodedata.normalize("NFD", character)[0] for character in text)


def _spans(text: str, patterns: Sequence[str], flags: int) -> list[tuple[int, int]]:
    if not patterns:
        return []
    found = re.finditer("|".join(patterns), _fold(text), flags)
    return [match.span() for match in found]


def _replace(text: str, spans: list[tuple[int, int]]) -> str:
    """Replace spans of a text by `MASK`; spans separated only by space or hyphens get one
    `MASK`.
    """
    runs: list[list[int]] = []
    for start, end in sorted(spans):
        if runs and re.fullmatch(r"[\s-]*", text[runs[-1][1] : start]):
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end])
    pieces, place = [], 0
    for start, end in runs:
        pieces += [text[place:start], MASK]
        place = end
    return "".join([*pieces, text[place:]])
