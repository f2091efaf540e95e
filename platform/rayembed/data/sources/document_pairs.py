"""Pairs that the structure of a document gives: its title, a heading, a sentence.

Pure functions of a text and a seed, so that a document's pair does not depend on the others.
"""

import re
from collections.abc import Mapping
from typing import Protocol

from rayembed.config.sources import PairRule
from rayembed.config.types import has_content
from rayembed.data.hashes import seeded_hash
from rayembed.data.sentences import split_lines, split_sentences
from rayembed.data.words import words

Pair = tuple[str, str]
"""A query and the text that answers it."""

_HEADING = re.compile(
    r"(?:#{1,6}[ \t]+(?P<hashes>.*?)[ \t]*#*|(?P<signs>={2,6})(?P<wiki>.+)(?P=signs))"
)
_FENCE = re.compile(r"(?:```|~~~)")
_WRAP = re.compile(r"(?<=[^\s.!?:。！？])[ \t]*\n(?=[^\W\d_])")


class _Rule(Protocol):
    def __call__(self, title: str, text: str, seed: int, min_words: int) -> Pair | None:
        """The pair of a document; None: it has none of this kind."""


def title_pair(title: str, text: str, seed: int, min_words: int) -> Pair | None:
    """Title and body; without a title a first line that others follow. No draw is needed."""
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
    """A drawn heading, after the title if there is one, and the section below it.

    Headings are those of Markdown, `## History`, and of wikis, `== History ==`.
    """
    found = [
        (heading, body)
        for heading, body in sections(text)
        if has_content(heading) and len(words(body)) >= min_words
    ]
    if not found:
        return None
    heading, body = found[seeded_hash(seed, "heading", text) % len(found)]
    named = heading if title.strip() in ("", heading) else f"{title.strip()}: {heading}"
    return named, body


def sentence_pair(title: str, text: str, seed: int, min_words: int) -> Pair | None:
    """A drawn sentence and the rest of the text, from which all its repetitions are taken."""
    whole = _unwrapped(text)
    total = len(words(whole))
    sentences = dict.fromkeys(split_sentences(whole))
    fitting = [one for one in sentences if _leaves_a_rest(one, whole, total, min_words)]
    if not fitting:
        return None
    drawn = fitting[seeded_hash(seed, "sentence", text) % len(fitting)]
    return drawn, _without(whole, drawn)


RULES: Mapping[PairRule, _Rule] = {
    "title": title_pair,
    "heading": heading_pair,
    "sentence": sentence_pair,
}


def draw_pair(
    title: str, text: str, weights: Mapping[PairRule, float], seed: int, min_words: int
) -> tuple[PairRule, Pair] | None:
    """A rule, drawn by weight among those that fit the document, and its pair; None: none fits.

    Args:
        title: empty for none.
        text: of the document.
        weights: of the rules.
        seed: of the draws; the text decides the rest.
        min_words: fewest words of a sentence that asks, and of what answers.
    """
    found = ((rule, RULES[rule](title, text, seed, min_words)) for rule in weights)
    pairs = [(rule, pair) for rule, pair in found if pair is not None]
    drawn = seeded_hash(seed, "rule", text) / 2**64 * sum(weights[rule] for rule, _ in pairs)
    for rule, pair in pairs:
        drawn -= weights[rule]
        if drawn < 0:
            return rule, pair
    return pairs[-1] if pairs else None  # what rounding leaves


def sections(text: str) -> list[Pair]:
    """Headings with the text up to the next one; lines within code fences are no headings."""
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
    """Text whose lines go on where a line was only wrapped: before a small letter."""

    def joined(match: re.Match[str]) -> str:
        return " " if text[match.end()].islower() else match.group()

    return _WRAP.sub(joined, text)


def _leaves_a_rest(sentence: str, whole: str, total: int, min_words: int) -> bool:
    """Whether a sentence of a text with `total` words may ask for what is left without it."""
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
