"""Define the sample as a named benchmark, with the tasks on which quickstarts are scored."""

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
    """The sample's tasks as a benchmark, named like `wikipedia?documents=300`."""

    name = "wikipedia"
    tasks: tuple[str, ...] = TASK_NAMES
    prefix = PREFIX
    licence = "cc-by-sa-4.0"

    def own_sets(
        self, sizes: dict[str, str], tasks: Iterable[str] | None = None
    ) -> tuple[OwnSet, ...]:
        """Return the benchmark's tasks with the given sizes.

        Raises:
            ConfigError: an unknown size.
        """
        return own_sets(parse(ScoreSizes, sizes), tasks)

    def in_language(self, own: OwnSet, language: str) -> OwnSet | None:
        """Return a task's version in another language (mteb's code); None if the sample has no
        texts in it.
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
        """Estimate the number of tokens in a task's texts."""
        part = parse_reference(own.path).part
        assert isinstance(part, TaskFolder)
        if isinstance(own, RetrievalSet):
            parts = max(len(part.languages), 1)
            return parts * part.max_length * (part.documents + part.queries)
        return _TABLE_TEXTS * part.max_length / 2


BENCHMARK = WikipediaBenchmark()
