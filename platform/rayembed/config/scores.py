"""Which texts a model is scored on: one setting for training runs and evaluations alike."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.own_sets import OwnSet, kinds_by_default
from rayembed.config.settings import Settings
from rayembed.config.types import unique_names

WIKIPEDIA = "wikipedia"
"""The benchmark of the Wikipedia sample's tasks, which needs no hub."""


class WikipediaTasks(Settings):
    """Sizes of the tasks over held-out articles of the Wikipedia sample.

    The same sizes, seed and source give the same tasks in a training run and in an evaluation of
    its own. The defaults are those of the quickstart, so that scores of both stand beside each
    other.
    """

    source: str | None = None
    """Asset reference of the Wikipedia JSON file. None: in a training run that of its data sets,
    else the English sample."""
    num_titles: PositiveInt | None = None
    """Held-out titles. None: in a training run `data.held_out.num_titles` without those for
    validation, else 1000. A training run must leave it out."""
    first_title: NonNegativeInt = 0
    """Place of the first title that is used among the held-out ones; those before it are left to
    other tasks. A training run must leave it out."""
    num_documents: PositiveInt = 500
    """Documents of the retrieval corpora."""
    num_queries: PositiveInt = 200
    """Queries of the retrieval tasks."""
    max_length: PositiveInt = 48
    """Tokens to which the texts of retrieval are cut (by words); of other tasks half of it."""
    seed: int | None = Field(default=None, ge=0, lt=2**32)
    """Chooses the held-out titles and the samples. None: in a training run its `seed`, else 0. A
    training run must leave it out."""
    translations: dict[str, str] = Field(default_factory=dict)
    """mteb's code of a language (`fra-Latn`) → asset reference of the sample in it. Adds the task
    `WikiCrossLingualRetrieval`: its articles find those of the same title in `source`."""

    _no_credentials = field_validator("source")(refuse_credentials)

    @field_validator("translations")
    @classmethod
    def _sorted_without_credentials(cls, translations: dict[str, str]) -> dict[str, str]:
        """Sorted, because the order in which they are written decides nothing."""
        for reference in translations.values():
            refuse_credentials(reference)
        return dict(sorted(translations.items()))

    @model_validator(mode="after")
    def _each_query_has_its_document(self) -> "WikipediaTasks":
        if self.num_queries > self.num_documents:
            raise ValueError(
                f"num_queries {self.num_queries} exceeds num_documents {self.num_documents}: each "
                "query has its document"
            )
        return self


class Scores(Settings):
    """The tasks that a model is scored on; none named: it is not scored."""

    benchmarks: tuple[str, ...] = ()
    """Names such as `MTEB(eng, v1)`, `NanoBEIR`, `BEIR`, `MIRACL`, `wikipedia`; all of mteb's by
    their own names."""
    tasks: tuple[str, ...] = ()
    """Single tasks of mteb, or of the Wikipedia sample, by name, beside those of the benchmarks."""
    languages: tuple[str, ...] = ()
    """Only subsets of mteb's and AIR-Bench's tasks in these (`eng`, `deu`, …); none: all."""
    own_sets: Annotated[tuple[OwnSet, ...], kinds_by_default, unique_names("own sets")] = ()
    """Sets of the user's own, for retrieval where no `kind` is named."""
    wikipedia: WikipediaTasks = WikipediaTasks()
    """Sizes of the benchmark `wikipedia`."""

    @property
    def any_tasks(self) -> bool:
        """Whether there is something to score a model on."""
        return bool(self.benchmarks or self.tasks or self.own_sets)
