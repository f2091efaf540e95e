"""Splitting of texts into sentences, by punctuation alone."""

import re

_NEVER_LAST = re.compile(
    r"st|dr|mrs?|ms|no|vs|op|ca|c|lit|fl|approx|gen|col|lt|sgt|gov|rev|prof|eds?|vol|pp?|fig|cf|"
    r"e\.g|i\.e|b|d|r|mt|ft",
    re.IGNORECASE,
)

_BREAK = re.compile(
    r"(?<=[.!?])(?:\[[^\]]*\])?[\"'”’)\]]*(?P<gap>\s+)(?=[\"'“‘(\[]*[^\W\d_a-z]|\d)"
)

_FULL_WIDTH = re.compile(r"[^。！？]*[。！？]+[」』”’）]*|[^。！？]+")
"""What ends with full-width punctuation, as of Chinese and Japanese, and the rest of a line."""


def split_lines(text: str) -> list[str]:
    """Lines of a text, which end with a line feed, after a carriage return or not.

    Other signs that Python's `splitlines` takes for line ends, such as a form feed or U+2028, stand
    within sentences and headings.
    """
    return re.split(r"\r?\n", text)


def split_sentences(text: str) -> list[str]:
    """Sentences of a text, stripped and non-empty.

    A sentence ends at a line's end, at `。`, `！` or `？`, or at `.`, `!` or `?` before space and a
    capital or a digit, unless the full stop belongs to an initial ("J. S. Bach"), to "U.S." or to a
    known abbreviation ("c. 300").
    """
    sentences = []
    for line in (part for whole in split_lines(text) for part in _FULL_WIDTH.findall(whole)):
        start = 0
        for match in _BREAK.finditer(line):
            if _abbreviated(line[start : match.start()]):
                continue
            sentences.append(line[start : match.start("gap")])
            start = match.end()
        sentences.append(line[start:])
    return [sentence.strip() for sentence in sentences if sentence.strip()]


def _abbreviated(before: str) -> bool:
    """Whether the full stop at the end of `before` is part of an abbreviation."""
    if not before.endswith("."):
        return False
    word = re.split(r"[\s(\[\"“]", before[:-1])[-1]
    if re.fullmatch(r"[^\W\d_](?:\.[^\W\d_])*", word):
        return word != "I"
    return _NEVER_LAST.fullmatch(word) is not None
