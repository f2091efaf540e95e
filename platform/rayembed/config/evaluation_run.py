"""An evaluation: which model is scored on what, and where that is done."""

from typing import Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from rayembed.config.credentials import refuse_credentials
from rayembed.config.document import Document
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import Settings


class WikipediaTasks(Settings):
    """Tasks over held-out articles of the Wikipedia sample, which need no hub.

    The same sizes, seed and source as a training run's give the same tasks. The defaults are those
    of the quickstart, so that scores of both stand beside each other.
    """

    source: str | None = None
    """Asset reference of the Wikipedia JSON file; None: the English sample."""
    num_titles: PositiveInt = 1000
    """Held-out titles, `data.held_out.num_titles` of a training run."""
    num_documents: PositiveInt = 500
    """Documents of the retrieval corpora."""
    num_queries: PositiveInt = 200
    """Queries of the retrieval tasks."""
    max_length: PositiveInt = 48
    """Tokens to which the texts of retrieval are cut (by words); of other tasks half of it."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Chooses the held-out titles and the samples."""

    _no_credentials = field_validator("source")(refuse_credentials)


class OwnSet(Settings):
    """Queries, documents and judgements of the user's own, as a retrieval task."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """The task's name in results and tables; not that of another task."""
    path: str = Field(min_length=1)
    """Folder with `corpus`, `queries` and `qrels`, local or in object storage."""
    split: str = "test"
    """Which judgements are taken, `qrels/<split>.tsv`."""
    instruction: str | None = None
    """Task definition for models that take one."""

    _no_credentials = field_validator("path")(refuse_credentials)


class EvaluationPlacement(Settings):
    """Where an evaluation runs. Nothing here changes a score beyond rounding."""

    storage_path: str = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix for results and kept embeddings."""
    workers: PositiveInt = 1
    """Processes that hold the model."""
    use_gpu: bool = False
    """One GPU for each worker."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """What Ray reserves for each worker."""
    threads_per_worker: PositiveInt | None = None
    """Threads of torch in each worker; None: `cpus_per_worker`, rounded down."""
    tasks_at_once: PositiveInt | None = None
    """Tasks that run side by side, each in a process of its own that holds the task's queries and
    scores, not its corpus; None: one more than workers, at most 8."""
    cpus_per_task: float = Field(default=0.0, ge=0)
    """What Ray reserves for each running task, which fits classifiers and clusters on CPUs; 0: they
    share what there is."""
    keep_embeddings: Literal["float32", "float16", "none"] = "float32"
    """How embeddings are kept in storage, for a restart and for other tasks with the same texts.
    `float16` takes half the room and moves scores by about 1e-4; `none` keeps none."""
    tracking_uri: str | None = None
    """MLflow's address; None: a SQLite file in `storage_path`."""
    experiment: str = "rayembed-evaluation"
    """MLflow experiment."""

    _no_credentials = field_validator("storage_path", "tracking_uri")(refuse_credentials)


class ResultsPlace(Settings):
    """Where an evaluation that is done has left its results; all that a submission needs."""

    placement: EvaluationPlacement = EvaluationPlacement()


class EvaluationRun(Document):
    """A model, the tasks that score it, and where."""

    model: ModelUnderTest
    benchmarks: tuple[str, ...] = ()
    """Names such as `MTEB(eng, v1)`, `MTEB-MINI`, `BEIR`, `MIRACL`, `AIR-Bench_24.04`, `wikipedia`;
    all of mteb's by their own names."""
    tasks: tuple[str, ...] = ()
    """Single tasks of mteb by name, beside those of the benchmarks."""
    languages: tuple[str, ...] = ()
    """Only subsets of mteb's and AIR-Bench's tasks in these (`eng`, `deu`, …); none: all."""
    own_sets: tuple[OwnSet, ...] = ()
    wikipedia: WikipediaTasks = WikipediaTasks()
    """Sizes of the benchmark `wikipedia`."""
    placement: EvaluationPlacement = EvaluationPlacement()

    @model_validator(mode="after")
    def _something_to_do(self) -> "EvaluationRun":
        if not (self.benchmarks or self.tasks or self.own_sets):
            raise ValueError(
                "nothing to score the model on: name a benchmark (--benchmark wikipedia needs no "
                "hub), tasks (--tasks) or own sets (own_sets)"
            )
        names = [own.name for own in self.own_sets]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two own sets have the name {twice[0]!r}; it must be unique")
        return self
