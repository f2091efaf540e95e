"""Split texts of all scripts into words, for everything that compares texts by words."""

import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from rayembed.data.hashes import text_hash

# Scripts that put no space between words: each letter or digit with its marks is taken for one.
# Signs of the same blocks, such as \u30fb, \u0e3f and \u104b, are left out.
_SPACELESS = (
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e50-\u0e59\u0e80-\u0eff"  # Thai, Lao
    "\u1000-\u1049\u1050-\u109d"  # Burmese
    "\u1780-\u17d3\u17d7\u17dc\u17dd\u17e0-\u17ff"  # Khmer
    "\u3040-\u309a\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)

# Vowel signs, points and accents belong to the letter before them, though `\w` has none of them.
# Unicode has marks in its first two planes, and variation selectors far behind.
_MARKS = (
    re.escape("".join(c for c in map(chr, range(0x20000)) if unicodedata.category(c)[0] == "M"))
    + "\U000e0100-\U000e01ef"
)
_JOINERS = "\u200c\u200d"

_WIDTHS = re.compile("[\u3000\uff01-\uffee]+")
"""Half- and full-width forms, and the full-width space."""

# ASCII is told apart first: the set of marks is slow to search.
_WORD = re.compile(
    rf"[^\W{_SPACELESS}]++(?:(?![\x00-\x7f])[{_MARKS}{_JOINERS}]+[^\W{_SPACELESS}]*+)*+"
    rf"|[{_SPACELESS}][{_MARKS}]*+"
)

_ASCII_WORD = re.compile(r"\w+", re.ASCII)

# Signs that stand in a row of such characters and repeat one (佐々木), zero (二〇二五), bopomofo.
_UNSPACED = f"{_SPACELESS}\u3005-\u3007\u3100-\u312f"

_BEYOND_PLAIN = re.compile(
    "[" + re.sub("[\U00010000-\U0010ffff]-?", "", f"{_UNSPACED}{_MARKS}") + "]"
)
"""What `_PLAIN_WORD` splits wrongly below U+10000, for which the search is ten times as fast:
characters without spaces, and marks."""

_FAR_BEYOND = re.compile("[\U00010000-\U0001efff\U00020000-\U000e01ef]")
"""Planes with the others, among letters that `_PLAIN_WORD` splits rightly; emoji stand between."""

_COMPATIBLE = re.compile(
    f"[\u2e80-\u2fdf\u3200-\u33ff\ufb1d-\ufdff\ufe30-\ufe4f\ufe70-\ufefc{_WIDTHS.pattern[1:-2]}]+"
)
"""Other forms of Han, kana, Hebrew and Arabic letters: radicals, squares, presentation forms."""

_PLAIN_WORD = re.compile(r"\b\w\w+\b")
"""Pattern of bm25s and scikit-learn."""

_SEARCH_WORD = re.compile(
    rf"[^\W{_UNSPACED}]++(?:[{_MARKS}]+[{_JOINERS}]*+[^\W{_UNSPACED}]*+)*+"
    rf"|(?P<run>[{_UNSPACED}][{_MARKS}{_UNSPACED}]*+)"
)

_CHARACTER = re.compile(rf"[{_UNSPACED}][{_MARKS}]*+")


def normalised(text: str) -> str:
    """Return the form of a text in which words are compared: case, width, ligatures, exponents and
    white space are folded.

    Use it for similarity; `same_text_form` decides whether two texts are one.
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def same_text_form(text: str) -> str:
    """Return a form of the text that is equal for equal texts: case, width, white space and
    composed letters are folded.

    An exponent, an index or a circled digit has a meaning of its own: x² is not x2.
    """
    narrow = _WIDTHS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    return " ".join(unicodedata.normalize("NFC", narrow).casefold().split())


def normalised_hash(text: str) -> int:
    """Hash of `same_text_form`: texts with equal hashes are never negatives of each other.

    A positive in another case or with other white space is still the answer, also to a tokenizer
    that reads it otherwise.
    """
    return text_hash(same_text_form(text))


def without_copies(texts: Sequence[str], of: Sequence[str]) -> list[str]:
    """Drop the texts that equal one of the texts in `of`, compared by `same_text_form`."""
    if not texts:
        return []
    others = set(map(same_text_form, of))
    return [text for text in texts if same_text_form(text) not in others]


def words(text: str) -> list[str]:
    """Split the normalised text into words without punctuation; a text of punctuation only is one
    word.
    """
    if text.isascii():  # as most texts are, and half the time
        return _ASCII_WORD.findall(text.casefold()) or [normalised(text)]
    whole = normalised(text)
    return _WORD.findall(whole) or [whole]


def search_words(text: str) -> list[str]:
    """Split a text into the words that a lexical search compares: lower-case words of at least two
    letters.

    Scripts without spaces between words (Chinese, Japanese, Thai, …) give each character, with its
    marks, and each pair of neighbouring characters. A word is split alike in every text: a joiner
    ends it, but within a cluster of Indic letters, after a mark, it is left out.
    """
    if text.isascii():
        return _PLAIN_WORD.findall(text.lower())
    low = _search_form(text)
    if not (_BEYOND_PLAIN.search(low) or _FAR_BEYOND.search(low)):
        return _PLAIN_WORD.findall(low)
    found = []
    for match in _SEARCH_WORD.finditer(low):
        if not match["run"]:
            word = match[0].replace("\u200c", "").replace("\u200d", "")
            found += [word] if len(word) > 1 else []
            continue
        characters = _CHARACTER.findall(match[0])
        found += characters
        found += map("".join, pairwise(characters))
    return found


def _search_form(text: str) -> str:
    """Fold case, composed letters and East Asian, Hebrew and Arabic forms of a letter.

    Exponents and ligatures stay, as in bm25s. Python gives İ a dot of its own and a final sigma
    another letter, by what follows.
    """
    folded = _COMPATIBLE.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    low = folded.lower().replace("i\u0307", "i").replace("ς", "σ")
    return unicodedata.normalize("NFC", low)


_NEVER_LAST = re.compile(
    r"st|dr|mrs?|ms|no|vs|op|ca|c|lit|fl|approx|gen|col|lt|sgt|gov|rev|prof|eds?|vol|pp?|fig|cf|"
    r"e\.g|i\.e|b|d|r|mt|ft",
    re.IGNORECASE,
)

_BREAK = re.compile(
    r"(?<=[.!?])(?:\[[^\]]*\])?[\"'”’)\]]*(?P<gap>\s+)(?=[\"'“‘(\[]*[^\W\d_a-z]|\d)"
)

_FULL_WIDTH = re.compile(r"[^。！？]*[。！？]+[」』”’）]*|[^。！？]+")
"""Pattern of sentences that end with full-width punctuation (Chinese, Japanese), or of a line's
rest."""


def split_lines(text: str) -> list[str]:
    """Split a text into lines at line feeds, with or without a carriage return.

    Other signs that Python's `splitlines` takes for line ends, such as a form feed or U+2028, stand
    within sentences and headings.
    """
    return re.split(r"\r?\n", text)


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences, stripped and non-empty.

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
