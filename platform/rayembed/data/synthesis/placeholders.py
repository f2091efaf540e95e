"""What varies from example to example: the value sets of NV-Embed, Tables 15 and 16."""

from collections.abc import Mapping

from rayembed.config.synthesis import PairKind
from rayembed.data.hashes import text_hash

QUERY_TYPES = ("extremely long-tail", "long-tail", "common")
QUERY_LENGTHS = ("less than 5 words", "5 to 15 words", "at least 10 words")
DIFFICULTIES = ("high school", "college", "PhD")
CLARITIES = ("clear", "understandable with some effort", "ambiguous")
DOCUMENT_WORDS = ("50", "100", "200", "300", "400", "500")
"""Of each document of a short-long example, at least."""
INPUT_WORDS = ("less than 10", "at least 10", "at least 50", "at least 100", "at least 200")
"""Of the text of a long-short example."""

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
"""Placeholder → its values, by kind."""


def draw(kind: PairKind, seed: int, number: int) -> dict[str, str]:
    """Placeholder → value of the example with this number: all values are equally likely."""
    return {
        name: values[text_hash(f"{seed}/{kind}/{number}/{name}") % len(values)]
        for name, values in VALUES[kind].items()
    }


def draw_language(languages: Mapping[str, str], kind: PairKind, seed: int, number: int) -> str:
    """Code of the language of the example with this number."""
    codes = sorted(languages)
    return codes[text_hash(f"{seed}/{kind}/{number}/language") % len(codes)]


def least_words(kind: PairKind, values: Mapping[str, str]) -> int:
    """Words that the example's long text should have at least; 0: no bound."""
    words = values.get("num_words", "")
    if kind == "short-long":
        return int(words)
    return int(words.rsplit(" ", 1)[1]) if words.startswith("at least ") else 0
