"""Placeholder values that vary over examples (NV-Embed, Tables 15 and 16)."""

from collections.abc import Mapping

from rayembed.config.synthesis import PairKind
from rayembed.data.hashes import text_hash

QUERY_TYPES = ("extremely long-tail", "long-tail", "common")
QUERY_LENGTHS = ("less than 5 words", "5 to 15 words", "at least 10 words")
DIFFICULTIES = ("high school", "college", "PhD")
CLARITIES = ("clear", "understandable with some effort", "ambiguous")
DOCUMENT_WORDS = ("50", "100", "200", "300", "400", "500")
"""Minimum words of each document in a short-long example."""
INPUT_WORDS = ("less than 10", "at least 10", "at least 50", "at least 100", "at least 200")
"""Length of the text in a long-short example."""

VALUES: Mapping[PairKind, Mapping[str, tuple[str, ...]]] = {
    "short-long": {
        "query_type": QUERY_TYPES,
        "query_length": QUERY_LENGTHS,
        "difficulty": DIFFICULTIES,
        "clarity": CLARITIES,
        "num_words": DOCUMENT_WORDS,
    },
    "long-short": {
        "num_words": INPUT_WORDS,
        "difficulty": DIFFICULTIES,
        "clarity": CLARITIES,
    },
    # The paper prints no table of this kind: the sets that both of its tables have.
    "short-short": {"difficulty": DIFFICULTIES, "clarity": CLARITIES},
}
"""Kind → placeholder → its values."""


def draw(kind: PairKind, seed: int, number: int) -> dict[str, str]:
    """Placeholder → uniformly drawn value for the example with this number."""
    return {
        name: values[text_hash(f"{seed}/{kind}/{number}/{name}") % len(values)]
        for name, values in VALUES[kind].items()
    }


def draw_language(languages: Mapping[str, str], kind: PairKind, seed: int, number: int) -> str:
    """Language code of the example with this number."""
    codes = sorted(languages)
    return codes[text_hash(f"{seed}/{kind}/{number}/language") % len(codes)]


def least_words(kind: PairKind, values: Mapping[str, str]) -> int:
    """Minimum words of the example's long text; 0 without a limit."""
    words = values.get("num_words", "")
    if kind == "short-long":
        return int(words)
    return int(words.rsplit(" ", 1)[1]) if words.startswith("at least ") else 0
