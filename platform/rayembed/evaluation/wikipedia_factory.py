"""Tasks of the Wikipedia sample as something to send to a runner."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from mteb.languages.check_language_code import check_language_code

from rayembed.assets.resolver import resolve
from rayembed.assets.samples import WIKIPEDIA_EN
from rayembed.config.scores import WikipediaTasks
from rayembed.data.sources.wikipedia import Article, held_out_in_order, read_articles
from rayembed.errors import ConfigError
from rayembed.evaluation.wikipedia_tasks import (
    CROSS_LINGUAL,
    RETRIEVAL_TASKS,
    TASK_NAMES,
    wikipedia_tasks,
)

_TITLES = 1000
"""Held-out titles where nothing says how many, those of the quickstart."""


@dataclass(frozen=True)
class WikipediaTask:
    """One task of the sample by its name and all sizes."""

    name: str
    settings: WikipediaTasks

    @property
    def num_texts(self) -> int:
        """Documents and queries of a retrieval task, a rough number for others."""
        if self.name in RETRIEVAL_TASKS:
            return self.settings.num_documents + self.settings.num_queries
        return 500

    def load(self) -> Any:
        """A fresh task, with its data at hand.

        Raises:
            ConfigError: fewer held-out articles than documents, or an unknown language.
            DataError: too few articles for a task.
        """
        # Not the one at hand: a task has random generators, which go on where they were.
        made = _made(self.name, self.settings.model_dump_json())
        return type(made)(made.sample)

    def __hash__(self) -> int:
        return hash((self.name, self.settings.model_dump_json()))


def wikipedia_factories(
    settings: WikipediaTasks, names: Iterable[str] | None = None
) -> list[WikipediaTask]:
    """Tasks of the sample, in the order of tables.

    Args:
        names: of some; None: all that the settings give.
    """
    known = (*TASK_NAMES, *([CROSS_LINGUAL] if settings.translations else ()))
    wanted = known if names is None else set(names)
    return [WikipediaTask(name, settings) for name in known if name in wanted]


def is_wikipedia_task(name: str) -> bool:
    """Whether the sample has a task of that name."""
    return name in (*TASK_NAMES, CROSS_LINGUAL)


def held_out_articles(settings: WikipediaTasks) -> list[Article]:
    """The articles that the tasks are over.

    Raises:
        ConfigError: fewer held-out articles than documents.
    """
    articles = all_articles(settings)
    last = settings.first_title + (settings.num_titles or _TITLES)
    ordered = held_out_in_order(articles, last, settings.seed or 0)
    titles = set(ordered[settings.first_title :])
    kept = [article for article in articles if article.title in titles]
    if len(kept) < settings.num_documents:
        raise ConfigError(
            f"wikipedia.num_documents {settings.num_documents} exceeds the {len(kept)} held-out "
            f"articles (data.held_out.num_titles of a run, wikipedia.num_titles of an evaluation: "
            f"{settings.num_titles or _TITLES}); hold out more or ask for fewer"
        )
    return kept


def all_articles(settings: WikipediaTasks) -> list[Article]:
    """All articles of the sample, held-out ones among them."""
    return read_articles(resolve(settings.source or WIKIPEDIA_EN))


@lru_cache(maxsize=16)
def _made(name: str, settings: str) -> Any:
    """The task, made once in a process: reading all articles takes longer than most tasks."""
    sizes = WikipediaTasks.model_validate_json(settings)
    (task,) = wikipedia_tasks(
        held_out_articles(sizes),
        num_documents=sizes.num_documents,
        num_queries=sizes.num_queries,
        max_length=sizes.max_length,
        seed=sizes.seed or 0,
        names=(name,),
        translations=_translations(sizes),
    )
    return task


def _translations(settings: WikipediaTasks) -> dict[str, list[Article]]:
    """The sample in other languages, by mteb's code of the language."""
    found = {}
    for code, reference in settings.translations.items():
        try:
            check_language_code(code)
        except ValueError as error:
            raise ConfigError(
                f"wikipedia.translations: {code!r} is no language of mteb's, such as 'fra-Latn': "
                f"{error}"
            ) from None
        found[code] = read_articles(resolve(reference))
    return found
