"""Settings of own evaluation sets: the user's files that become mteb tasks, one class for each kind
of task.

Rows are JSONL, TSV, CSV or Parquet, local, in object storage, or what an asset reference leads to.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt

from rayembed.config.settings import Settings
from rayembed.config.types import Distinct, FileName, Reference, unique_names


class OwnSetBase(Settings):
    """Base class with the settings that all kinds of own sets share."""

    name: FileName
    """The task's name in results and tables; not that of another task."""
    path: Reference = Field(min_length=1)
    """File or folder with the rows of the test split."""
    instruction: str | None = None
    """Task definition for models that take one."""
    language: str = "eng-Latn"
    """Language and script of the texts: codes of ISO 639-3 and ISO 15924."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files and folders of the set."""
        return (self.path,)


class RetrievalSet(OwnSetBase):
    """Queries, documents and judgements in BEIR's layout; the main score is NDCG@10."""

    kind: Literal["retrieval"] = "retrieval"
    path: Reference = Field(min_length=1)
    """Folder with `corpus`, `queries` and `qrels`, local or in object storage."""
    split: str = "test"
    """Split whose judgements are read, from `qrels/<split>.tsv`."""
    languages: Distinct[str] = ()
    """Folders below `path` that each hold a set whose queries are in that language (`fra-Latn`);
    the score is the mean over them. None named: `path` itself is the set."""


class ClassificationSet(OwnSetBase):
    """Texts with classes, scored by logistic regression on a few examples of each class; the main
    score is accuracy.
    """

    kind: Literal["classification"] = "classification"
    train: Reference = Field(min_length=1)
    """File or folder with rows of `text` and `label`, from which examples are drawn; `path` has the
    rows that are classified."""
    samples_per_label: PositiveInt = 8
    """Number of training examples of each class in one experiment."""
    experiments: PositiveInt = 10
    """Number of draws of training examples; the score is their mean."""

    @property
    def paths(self) -> tuple[str, ...]:
        """All files and folders of the set."""
        return (self.path, self.train)


class ClusteringSet(OwnSetBase):
    """Rows of `text` and `label`, grouped by k-means; the main score is the V-measure."""

    kind: Literal["clustering"] = "clustering"
    documents_per_experiment: PositiveInt = 2048
    """Number of texts drawn with replacement and clustered in one experiment."""
    experiments: PositiveInt = 10
    """Number of draws of texts; the score is their mean."""


class PairClassificationSet(OwnSetBase):
    """Rows of `sentence1`, `sentence2` and `label`, 1 for pairs that belong together and 0 for
    others; the main score is the average precision of the similarities.
    """

    kind: Literal["pair_classification"] = "pair_classification"


class STSSet(OwnSetBase):
    """Rows of `sentence1`, `sentence2` and `score`, a similarity on any scale; the main score is
    Spearman's correlation with the cosine of the vectors.
    """

    kind: Literal["sts"] = "sts"


def _with_kinds(values: Any) -> Any:
    """Add the kind `retrieval` to own sets that name no kind."""
    if not isinstance(values, list | tuple):
        return values
    return [{"kind": "retrieval", **v} if isinstance(v, dict) else v for v in values]


OwnSet = Annotated[
    RetrievalSet | ClassificationSet | ClusteringSet | PairClassificationSet | STSSet,
    Field(discriminator="kind"),
]

kinds_by_default = BeforeValidator(_with_kinds)
"""Makes the kind of a set optional: it is of retrieval then."""


class Scores(Settings):
    """Settings that select the tasks to score a model on; without any task the model is not
    scored.
    """

    benchmarks: tuple[str, ...] = ()
    """Names such as `MTEB(eng, v1)`, `NanoBEIR`, `BEIR`, `MIRACL`, and all others of mteb."""
    tasks: tuple[str, ...] = ()
    """Single mteb tasks by name, in addition to those of the benchmarks."""
    languages: tuple[str, ...] = ()
    """Languages that mteb's and AIR-Bench's tasks are restricted to (`eng`, …); none: all."""
    own_sets: Annotated[tuple[OwnSet, ...], kinds_by_default, unique_names("own sets")] = ()
    """The user's own sets, of kind retrieval where no `kind` is named."""

    @property
    def any_tasks(self) -> bool:
        """Whether any task is named."""
        return bool(self.benchmarks or self.tasks or self.own_sets)
