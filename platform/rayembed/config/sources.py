"""Sources of training rows and their columns: one class for each kind.

A column is named by its name or by a path into nested cells, `answers.text`; a list on the way
gives a list, and a number leads to one element, `set.0`. `title+text` joins several fields of one
level by a space: `passages.title+text`. A line of JSONL that is a list has columns `0`, `1`, ….
Web pages often open with their title: of a text, `text.first_line` is that line and
`text.other_lines` what follows.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, StringConstraints, field_validator, model_validator

from rayembed.config.settings import Settings
from rayembed.config.types import Reference

Column = Annotated[str, StringConstraints(min_length=1)]

LabelForm = Literal["example", "label"]

DEFAULT_REJECTED_SHARE = 0.01


class FileSource(Settings):
    """Common settings of sources that read files."""

    path: Reference
    """A file, a folder, a prefix or a pattern (`*` within a name, `**/` over folders) of Parquet,
    JSONL, CSV or TSV files: local, `s3://…`, `gs://…`, on the hub,
    `hf://datasets/owner/name@revision/…`, or what an asset reference such as `sample://…` leads to;
    relative paths are taken from `data.root`."""
    max_rejected_share: float = Field(default=DEFAULT_REJECTED_SHARE, ge=0.0, le=1.0)
    """Maximum share of rows without the expected contents; the job fails above it."""
    language: Column | None = None
    """Column of a language code, by which batches and filters can be separated."""


class NamedRows(FileSource):
    """Settings of sources whose rows may have names of their own."""

    id: Column | None = None
    """Column of a row's name, by which equal rows are told and samples are drawn; None: the content
    of the row names it."""


class PairsSource(NamedRows):
    """One query and its positives in each row: retrieval, title–body, duplicate questions,
    cross-lingual pairs.
    """

    kind: Literal["pairs"] = "pairs"
    query: Column = "query"
    """Column of the query."""
    positive: Column = "positive"
    """Column of the positive text, or of a list of positive texts."""
    negatives: Column | tuple[Column, ...] | None = None
    """Column of a list of negative texts, or several columns (`[neg_1, neg_2]`); None: there are
    none, or they are mined. `[]`: none are read, though columns look like them."""
    label: Column | None = None
    """Column of the class; rows of one class are never negatives of each other."""
    instruction: Column | None = None
    """Column of the query's own task instruction, which replaces the data set's `query_instruction`
    (synthetic data with thousands of tasks); None without one."""
    both_directions: bool = False
    """Whether positives also serve as queries: duplicates, translations."""

    @field_validator("negatives", mode="before")
    @classmethod
    def _one_column_or_several(cls, given: Any) -> Any:
        several = list(given) if isinstance(given, list | tuple) else [given]
        if given is not None and not all(isinstance(one, str) and one for one in several):
            raise ValueError("must be a column, or a list of columns, written [a, b]")
        return given


class NLISource(FileSource):
    """Natural-language inference: a premise, a hypothesis and their relation in each row.

    All rows of a premise become one record: entailed hypotheses are its positives, contradicting
    ones its negatives; a premise that entails nothing is rejected.
    """

    kind: Literal["nli"] = "nli"
    premise: Column = "premise"
    hypothesis: Column = "hypothesis"
    label: Column = "label"
    entailment: str = "0"
    """Value of `label` for entailment; numbers are compared by their digits."""
    contradiction: str = "2"
    """Value of `label` for contradiction."""


class STSSource(FileSource):
    """Two sentences and their similarity; similar ones give a record in both directions."""

    kind: Literal["sts"] = "sts"
    first: Column = "sentence1"
    second: Column = "sentence2"
    score: Column = "score"
    min_score: float = 4.0
    """Minimum similarity; pairs below are rejected as `not similar`, which does not count against
    `max_rejected_share` (NV-Embed, section 4.2: at least 4 of 5)."""


class GradedSource(FileSource):
    """Two sentences and their similarity; every pair gives one record, with its similarity.

    For losses over graded pairs, such as CoSENT. The pair need not be similar, so that the records
    serve no other loss, and neither mining nor held-out parts.
    """

    kind: Literal["graded"] = "graded"
    first: Column = "sentence1"
    second: Column = "sentence2"
    score: Column = "score"
    lowest: float = 0.0
    """Score of a pair without anything in common; the similarity is 0 there."""
    highest: float = 5.0
    """Score of a pair that means the same; the similarity is 1 there."""

    @model_validator(mode="after")
    def _is_a_scale(self) -> "GradedSource":
        if self.lowest >= self.highest:
            raise ValueError(
                f"lowest {self.lowest:g} must be below highest {self.highest:g}: the scores of the "
                "least and of the most similar pairs"
            )
        return self


class ClassesSource(NamedRows):
    """A text and its class in each row: classification and clustering (NV-Embed, sections 4.2,
    5.2.4).
    """

    kind: Literal["classes"] = "classes"
    text: Column = "text"
    label: Column = "label"
    names: dict[str, str] = Field(default_factory=dict)
    """Text of a label for columns with numbers or codes; labels not listed are used as they are."""
    label_form: LabelForm = "example"
    """Form of positives and negatives: other examples of the classes, or the classes' names. With
    two classes examples say little; use names."""
    num_negatives: PositiveInt = 7
    """Negatives from other classes for each row; fewer if there are fewer class names."""
    examples_per_class: PositiveInt = 1000
    """Size of the example pool of a class, the same for all rows: those with the smallest seeded
    hash."""


class BeirSource(FileSource):
    """Retrieval in BEIR's layout: documents, queries, and the judgements that join them.

    `path` holds the judgements, the other files lie where they are named, relative to `data.root`.
    `language` is a column of the queries.
    """

    kind: Literal["beir"] = "beir"
    corpus: Reference
    """Corpus files with `_id`, `title`, `text`."""
    queries: Reference
    """Query files with `_id`, `text`."""
    query_id: Column = "query-id"
    document_id: Column = "corpus-id"
    score: Column = "score"
    min_score: float = 1.0
    """Minimum score of a positive judgement."""
    document: Column = "title+text"
    """Columns of the corpus that form a document."""
    query: Column = "text"
    """Columns of the queries that form a query."""


class MtebSource(Settings):
    """A split of an mteb task, converted to records by the task's type."""

    kind: Literal["mteb"] = "mteb"
    task: str
    """Name of a retrieval, reranking, pair, sts, classification, clustering or bitext task."""
    split: str = "train"
    """Split of the task's data; evaluation splits are refused."""
    subset: str | None = None
    """Language or subset of the task; None: all."""
    names: dict[str, str] = Field(default_factory=dict)
    """Text of each numeric label of a task without label texts; see `ClassesSource`."""
    label_form: LabelForm = "example"
    """Form of positives and negatives; see `ClassesSource`."""
    num_negatives: PositiveInt = 7
    """Negatives from other classes for each row; see `ClassesSource`."""
    max_rejected_share: float = Field(default=DEFAULT_REJECTED_SHARE, ge=0.0, le=1.0)


class RecordsSource(Settings):
    """Records written by another job: prepared, mined, filtered or synthesised."""

    kind: Literal["records"] = "records"
    path: Reference
    """Folder with its `manifest.json`; provenance of rows and negatives is kept."""


Source = Annotated[
    PairsSource
    | NLISource
    | STSSource
    | GradedSource
    | ClassesSource
    | BeirSource
    | MtebSource
    | RecordsSource,
    Field(discriminator="kind"),
]
