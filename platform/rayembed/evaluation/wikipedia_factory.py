"""Tasks of the Wikipedia sample as something to send to a runner."""

from dataclasses import dataclass
from typing import Any

from rayembed.assets.resolver import resolve
from rayembed.assets.samples import WIKIPEDIA_EN
from rayembed.config.evaluation_run import WikipediaTasks
from rayembed.data.sources.wikipedia import held_out_titles, read_articles
from rayembed.errors import ConfigError
from rayembed.evaluation.wikipedia_tasks import RETRIEVAL_TASKS, TASK_NAMES, wikipedia_tasks


@dataclass(frozen=True)
class WikipediaTask:
    """One task of the sample by its name and all sizes."""

    name: str
    settings: WikipediaTasks

    @property
    def num_texts(self) -> int:
        """Of a retrieval task documents and queries, of others a rough number."""
        if self.name in RETRIEVAL_TASKS:
            return self.settings.num_documents + self.settings.num_queries
        return 500

    def load(self) -> Any:
        """The task, with its data at hand.

        Raises:
            ConfigError: fewer held-out articles than documents.
            DataError: too few articles for a task.
        """
        settings = self.settings
        articles = read_articles(resolve(settings.source or WIKIPEDIA_EN))
        titles = held_out_titles(articles, settings.num_titles, settings.seed)
        held_out = [article for article in articles if article.title in titles]
        if len(held_out) < settings.num_documents:
            raise ConfigError(
                f"wikipedia.num_documents {settings.num_documents} exceeds the {len(held_out)} "
                f"held-out articles (wikipedia.num_titles {settings.num_titles}); hold out more "
                "or ask for fewer"
            )
        tasks = wikipedia_tasks(
            held_out,
            num_documents=settings.num_documents,
            num_queries=settings.num_queries,
            max_length=settings.max_length,
            seed=settings.seed,
            names=(self.name,),
        )
        return tasks[0]


def wikipedia_factories(settings: WikipediaTasks) -> list[WikipediaTask]:
    """All tasks of the sample, in the order of tables."""
    return [WikipediaTask(name, settings) for name in TASK_NAMES]
