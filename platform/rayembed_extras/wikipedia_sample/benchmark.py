"""The sample as a named benchmark: the tasks that quickstarts score."""

from collections.abc import Iterable

from rayembed.config.own_sets import OwnSet, RetrievalSet
from rayembed.config.settings import changed, parse
from rayembed.data.languages import language_of
from rayembed.recipes.sample import (
    CROSS_LINGUAL,
    LANGUAGE_CODES,
    PREFIX,
    TASK_NAMES,
    ScoreSizes,
    TaskFolder,
    own_sets,
)
from rayembed_extras.wikipedia_sample.references import parse_reference

_TABLE_TEXTS = 440
"""Approximate number of texts of each set that is not retrieval; they are half as long."""


class WikipediaBenchmark:
    """The sample's tasks among benchmarks, `wikipedia?documents=300`."""

    name = "wikipedia"
    tasks: tuple[str, ...] = TASK_NAMES
    prefix = PREFIX
    licence = "cc-by-sa-4.0"

    def own_sets(
        self, sizes: dict[str, str], tasks: Iterable[str] | None = None
    ) -> tuple[OwnSet, ...]:
        """The benchmark's tasks at these sizes.

        Raises:
            ConfigError: an unknown size.
        """
        return own_sets(parse(ScoreSizes, sizes), tasks)

    def in_language(self, own: OwnSet, language: str) -> OwnSet | None:
        """A set in a language, by mteb's code; unchanged if it names a language, None if the sample
        has no such texts.
        """
        part = parse_reference(own.path).part
        assert isinstance(part, TaskFolder)
        if part.language or part.task == CROSS_LINGUAL:
            return own
        found = [code for code, name in LANGUAGE_CODES.items() if name == language]
        if not found:
            return None
        sizes = {name: getattr(part, name) for name in ScoreSizes.model_fields}
        (other,) = own_sets(ScoreSizes(**{**sizes, "language": found[0]}), [part.task])
        places = {n: getattr(other, n) for n in ("path", "train", "language") if hasattr(other, n)}
        return changed(own, **places)

    def language_of(self, texts: Iterable[str]) -> str:
        """Detect the language of most texts, by mteb's code; empty if unknown or mixed."""
        return language_of(texts)

    def num_tokens(self, own: OwnSet) -> float:
        """Approximate number of tokens of a set's texts."""
        part = parse_reference(own.path).part
        assert isinstance(part, TaskFolder)
        if isinstance(own, RetrievalSet):
            parts = max(len(part.languages), 1)
            return parts * part.max_length * (part.documents + part.queries)
        return _TABLE_TEXTS * part.max_length / 2


BENCHMARK = WikipediaBenchmark()
