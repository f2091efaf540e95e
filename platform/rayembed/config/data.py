"""What a run learns from: sources, data sets, mining, the held-out split."""

from typing import Annotated, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.settings import Settings

TaskKind = Literal["retrieval", "classification", "clustering", "sts"]


class PairsSource(Settings):
    """The user's own pairs: JSONL, CSV or Parquet with a query and a positive a row."""

    kind: Literal["pairs"] = "pairs"
    path: str
    """A file, a folder or an object-storage prefix; relative paths are taken from `data.root`."""
    query: str = "query"
    """Column of the query."""
    positive: str = "positive"
    """Column of the positive text, or of a list of positive texts."""
    negatives: str | None = None
    """Column of a list of negative texts; None: there are none, or they are mined."""
    label: str | None = None
    """Column of the class, where rows of one class must never be negatives of each other."""
    instruction: str | None = None
    """Column of the query's own task definition, put in place of the data set's
    `query_instruction` (synthetic data with thousands of tasks); None: there is none."""
    max_rejected_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """The job fails when a larger share of rows lacks a query or a positive."""

    _no_credentials = field_validator("path")(refuse_credentials)


class WikipediaSource(Settings):
    """The sample of Wikipedia summaries (title, extract, description, topic), one JSON file."""

    kind: Literal["wikipedia"] = "wikipedia"
    path: str
    """Asset reference of the JSON file."""
    pairs: Literal["description", "sentence", "topic"]
    """`description`: description → text with its title masked. `sentence`: one sentence → the
    rest of its article. `topic`: text → another text (or the name) of its topic."""
    label_form: Literal["example", "label"] = "example"
    """For `topic`: positives and negatives are examples of the classes, or the classes' names
    (NV-Embed, section 5.2.4)."""
    text: Literal["extract", "description"] = "extract"
    """For `topic`: which text is classified."""

    _no_credentials = field_validator("path")(refuse_credentials)


Source = Annotated[PairsSource | WikipediaSource, Field(discriminator="kind")]


class MiningConfig(Settings):
    """Hard negatives from a teacher model, positive-aware (arXiv 2407.15831, TopK-PercPos)."""

    teacher: str
    """Asset reference of an embedding model (sentence-transformers or transformers format)."""
    num_negatives: PositiveInt = 7
    """Negatives kept for each query (NV-Embed, Table 11)."""
    max_relative_score: float = Field(default=0.95, gt=0.0, le=1.0)
    """A candidate that scores above this share of the positive's score is a likely positive."""
    candidates: PositiveInt = 100
    """Depth of the search from which negatives are taken."""
    max_length: PositiveInt = 128
    """Tokens of a text that the teacher sees."""
    query_prefix: str = ""
    """Before queries, in place of the one that the teacher's folder names; empty: that one."""
    document_prefix: str = ""
    """As `query_prefix`, for documents."""

    _no_credentials = field_validator("teacher")(refuse_credentials)

    @model_validator(mode="after")
    def _deep_enough(self) -> "MiningConfig":
        if self.num_negatives > self.candidates:
            raise ValueError(
                f"num_negatives {self.num_negatives} cannot be found among candidates "
                f"{self.candidates}; raise candidates"
            )
        return self


class DatasetConfig(Settings):
    """One data set of a run."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")
    """Unique within the run; stages refer to it, and it names folders."""
    source: Source
    task: TaskKind = "retrieval"
    """What the records stand for; decides nothing by itself, is carried with each record."""
    query_instruction: str = ""
    """Task definition put before queries; empty: none."""
    document_instruction: str = ""
    """Task definition put before documents, for symmetric tasks; empty: none."""
    in_batch_negatives: bool = True
    """Whether other records' documents may be negatives, in stages that use them at all."""
    num_samples: PositiveInt | None = None
    """Records drawn from the source; None: all."""
    mining: MiningConfig | None = None
    """How hard negatives are found; None: those of the source, or none."""

    @property
    def has_negatives(self) -> bool:
        """Whether its records can have hard negatives: mined, given, or of other classes."""
        match self.source:
            case PairsSource():
                return self.mining is not None or self.source.negatives is not None
            case WikipediaSource():
                return self.mining is not None or self.source.pairs == "topic"


class HeldOutConfig(Settings):
    """Which titles no training row may touch."""

    num_titles: int = Field(default=1000, ge=0)
    """Titles kept for evaluation, the smallest ones by a hash of seed and title."""


class DataConfig(Settings):
    """All data of a run."""

    root: str = ""
    """Where relative paths of sources start: a folder, `s3://…` or `gs://…`. It says where data
    lies and not what it is, so it is not part of the run's identity; the content is."""
    datasets: tuple[DatasetConfig, ...] = Field(min_length=1)
    held_out: HeldOutConfig = HeldOutConfig()

    _no_credentials = field_validator("root")(refuse_credentials)
