"""Source that makes pairs from the structure of documents, such as headings and sections, where
there are no queries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rayembed.config.sources import Column, PairRule
from rayembed.config.types import Seed, SortedDict, has_content
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.file_rows import NamedRows, record_of
from rayembed.data.words import split_lines, split_sentences, words

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig
    from rayembed.data.records import Record
    from rayembed.data.sources.rows import Row


NO_RULE = "no rule gives a pair"


class StructureSource(NamedRows):
    """Documents, one in each row or text file; each gives one pair: title and body, heading and
    section, or sentence and rest.

    Only one, so that no other row has the text of a held-out document.
    """

    columns_read: ClassVar = ("title", "text", "id")
    takes_texts: ClassVar = True
    can_hold_out: ClassVar = True
    tolerated: ClassVar = frozenset({NO_RULE})

    kind: Literal["structure"] = "structure"
    text: Column = "text"
    """Column of the document, or several: `lead+body`."""
    title: Column | None = "title"
    """Column of its title; None, and of text files: the first line of a text that has more."""
    rules: SortedDict[PairRule, PositiveFloat] = Field(
        default={"title": 1.0, "heading": 1.0, "sentence": 1.0}, min_length=1
    )
    """Rule → weight; one rule is drawn among those that apply to the document. `title`: title →
    body. `heading`: title and heading (Markdown, wiki) → section. `sentence`: sentence → rest."""
    min_words: PositiveInt = 5
    """Minimum number of words of a sentence used as query, and of every document."""
    seed: Seed = 0
    """Seed of the draws, which otherwise depend on a document's text alone."""

    def records(self, dataset: DatasetConfig, row: Row) -> list[Record]:
        """Make the record of a document.

        Raises:
            RowError: `NO_RULE`, or a cell that is empty or of another type.
        """
        values = row.values
        text = text_in(values, self.text)
        if text is None or not has_content(text):
            raise RowError("the text is missing or empty")
        title = (text_in(values, self.title) if self.title else None) or ""
        drawn = draw_pair(title, text, self.rules, self.seed, self.min_words)
        if drawn is None:
            raise RowError(NO_RULE)
        rule, (query, positive) = drawn
        made = record_of(
            dataset,
            query,
            [positive],
            origin=[row.origin],
            language=text_in(values, self.language) if self.language else None,
            name=name_in(values, self.id) if self.id else None,
        )
        return [replace(made, pair_rule=rule)]


Pair = tuple[str, str]
"""A query and its answer."""

_HEADING = re.compile(
    r"(?:#{1,6}[ \t]+(?P<hashes>.*?)[ \t]*#*|(?P<signs>={2,6})(?P<wiki>.+)(?P=signs))"
)
_FENCE = re.compile(r"(?:```|~~~)")
_WRAP = re.compile(r"(?<=[^\s.!?:。！？])[ \t]*\n(?=[^\W\d_])")


_Rule = Callable[[str, str, int, int], Pair | None]
"""Function that makes a document's pair from title, text, seed and minimum words; None: it has none
of the kind."""


def title_pair(title: str, text: str, seed: int, min_words: int) -> Pair | None:
    """Pair the title with the body; without a title, the first line with the lines after it."""
    first, _, others = text.strip().partition("\n")
    headline = _heading(first) or first.strip()
    if not title:
        title, text = headline, others
    elif headline == title.strip():
        text = others
    body = text.strip()
    if not has_content(title) or len(words(body)) < min_words or len(title) > len(body):
        return None
    return title.strip(), body


def heading_pair(title: str, text: str, seed: int, min_words: int) -> Pair | None:
    """Pair a random heading, preceded by the document's title if any, with the section
    below it.

    Headings are those of Markdown, `## History`, and of wikis, `== History ==`.
    """
    found = [
        (heading, body)
        for heading, body in sections(text)
        if has_content(heading) and len(words(body)) >= min_words
    ]
    if not found:
        return None
    heading, body = found[_seeded(seed, "heading", text) % len(found)]
    named = heading if title.strip() in ("", heading) else f"{title.strip()}: {heading}"
    return named, body


def sentence_pair(title: str, text: str, seed: int, min_words: int) -> Pair | None:
    """Pair a random sentence with the rest of the text, from which all its repetitions are
    removed.
    """
    whole = _unwrapped(text)
    total = len(words(whole))
    sentences = dict.fromkeys(split_sentences(whole))
    fitting = [one for one in sentences if _leaves_a_rest(one, whole, total, min_words)]
    if not fitting:
        return None
    drawn = fitting[_seeded(seed, "sentence", text) % len(fitting)]
    return drawn, _without(whole, drawn)


RULES: Mapping[PairRule, _Rule] = {
    "title": title_pair,
    "heading": heading_pair,
    "sentence": sentence_pair,
}


def draw_pair(
    title: str, text: str, weights: Mapping[PairRule, float], seed: int, min_words: int
) -> tuple[PairRule, Pair] | None:
    """Draw a rule by weight among those that fit the document, and return the rule and its pair;
    None if no rule fits.

    Args:
        title: empty for none.
        text: of the document.
        weights: of the rules.
        seed: of the draws; the text decides the rest.
        min_words: fewest words of a sentence that asks, and of what answers.
    """
    found = ((rule, RULES[rule](title, text, seed, min_words)) for rule in weights)
    pairs = [(rule, pair) for rule, pair in found if pair is not None]
    drawn = _seeded(seed, "rule", text) / 2**64 * sum(weights[rule] for rule, _ in pairs)
    for rule, pair in pairs:
        drawn -= weights[rule]
        if drawn < 0:
            return rule, pair
    return pairs[-1] if pairs else None  # what rounding leaves


def sections(text: str) -> list[Pair]:
    """Split a text into headings and the text below each; lines within code fences are no
    headings.
    """
    found: list[tuple[str, list[str]]] = []
    fenced = False
    for line in split_lines(text):
        fenced ^= _FENCE.match(line.strip()) is not None
        heading = None if fenced else _heading(line)
        if heading is not None:
            found.append((heading, []))
        elif found:
            found[-1][1].append(line)
    return [(heading, "\n".join(lines).strip()) for heading, lines in found]


def _heading(line: str) -> str | None:
    match = _HEADING.fullmatch(line.strip())
    if match is None:
        return None
    return (match["hashes"] or match["wiki"] or "").strip()


def _unwrapped(text: str) -> str:
    """Join lines that were only wrapped, recognised by a small letter at the start of the next
    line.
    """

    def joined(match: re.Match[str]) -> str:
        return " " if text[match.end()].islower() else match.group()

    return _WRAP.sub(joined, text)


def _leaves_a_rest(sentence: str, whole: str, total: int, min_words: int) -> bool:
    """Whether a text of `total` words still has `min_words` words after one of its sentences is
    removed.
    """
    length = len(words(sentence))
    if _heading(sentence) is not None or length < min_words:
        return False
    # Each repetition takes its words along, and what it parted may become one word. Where this
    # leaves enough the rest need not be made, which takes longer the longer the text is.
    if total - whole.count(sentence) * (length + 3) >= min_words:
        return True
    rest = _without(whole, sentence)
    return has_content(rest) and len(words(rest)) >= min_words


def _without(text: str, sentence: str) -> str:
    rest = text.replace(sentence, "")
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]{2,}", " ", rest)).strip()


def _seeded(seed: int, purpose: str, text: str) -> int:
    from rayembed.data.hashes import seeded_hash  # numpy, which settings do without

    return seeded_hash(seed, purpose, text)
