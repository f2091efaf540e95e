"""Settings of an evaluation: the model, the prompts before its inputs, placement and tasks."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rayembed.config.backbone import Tf32
from rayembed.config.document import Document
from rayembed.config.own_sets import Scores
from rayembed.config.placement import RuntimeSettings
from rayembed.config.reports import FindingChoice
from rayembed.config.run_evaluation import Reranker
from rayembed.config.settings import Settings
from rayembed.config.types import (
    ModelReference,
    Reference,
    Seed,
    SortedDict,
    StoragePath,
    StoredVectors,
    UseGpu,
)

PromptTableName = Literal["auto", "nvembed", "causal2vec", "nomic", "cde", "folder", "none"]

BM25 = "bm25"
"""Reference of the BM25 baseline; it has no vectors and takes retrieval tasks."""


CONTEXT_SEED = 0
"""Default seed for drawing context documents: in `evaluate_model` and in all that a training run
scores, whatever its own seed is."""


class Prompts(Settings):
    """Prompts before texts, by task and role, for models that rayembed loads.

    Models that mteb loads are measured with the prompts of mteb's own wrapper; for them nothing
    may be set here.
    """

    table: PromptTableName = "auto"
    """Source of the prompts. `nvembed` and `causal2vec`: task instructions (NV-Embed's Table 13,
    Causal2Vec's Table 16) before queries and before texts of symmetric tasks, none before
    documents. `nomic`, `cde`: prefixes by kind of task (`search_query: `). `folder`: the prompts
    that the model's folder names. `none`: nothing. `auto`: for NV-Embed and Causal2Vec the table of
    that name; `cde` for CDE and `nomic` for NomicBert where the model has learnt the table's
    prefixes; else `folder`. What the folder was saved with under the name of a task or its type
    goes before every table but `none`."""
    wording: Literal["mteb", "paper"] = "mteb"
    """Source whose words an instruction table takes first. `mteb`: those of mteb's task, and the
    paper's where it has none. `paper`: the paper's table, and mteb's where that has none. They
    differ in five tasks of `MTEB(eng, v1)` for NV-Embed (ArguAna, Banking77Classification,
    NFCorpus, NQ, Touche2020), in full stops for Causal2Vec."""
    instructions: SortedDict[str, str] = Field(default_factory=dict)
    """Task definitions in place of the table's, by the name of an mteb task (`SciFact`) or a type
    of task (`STS`). They stand before queries and before texts of symmetric tasks; before documents
    only where the key says so (`SciFact-document`). An empty text takes the instruction away."""
    query_prefix: str | None = None
    """Literal text before queries and texts of symmetric tasks, replacing the text of table and
    folder; None: what they put. Not for models with an instruction template."""
    document_prefix: str | None = None
    """Literal text before documents, replacing the text of table and folder; see `query_prefix`."""


class ModelUnderTest(StoredVectors):
    """Settings of the evaluated model."""

    reference: ModelReference = Field(min_length=1)
    """One of: an asset reference (local folder, `hf://org/name@revision`, `s3://…`, `gs://…`,
    `pypi://…`) or a registered model (`models:/name@alias`, `models:/name/3`), which rayembed
    loads; a model of mteb or of the hub by its name (`intfloat/e5-base-v2`, `mteb:org/name`), which
    mteb loads with its own wrapper; `st:` and an asset reference, which sentence-transformers
    loads; `bm25`."""
    name: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?$"
    )
    """`org/name` in results and tables; None: what the reference says."""
    revision: str | None = None
    """Hub revision of a model that mteb loads; None: the one mteb measured, else the newest."""
    dtype: Literal["auto", "saved", "float32", "bfloat16"] | Tf32 = "auto"
    """Number type of the model. `auto`: as in the folder (float16 becomes float32), but float32
    where bfloat16 is emulated, as the model is loaded and served. `saved`: as in the folder,
    whatever computes. mteb's wrappers keep their own with both. `tf32`: float32, but a GPU rounds
    what its products take, which is several times faster. Only by name, since scores are then no
    longer those of a CPU; results of it have a revision of their own."""
    max_length: PositiveInt | None = None
    """Tokens of a text, special ones and prompt included, never above the model's own limit. None:
    512 for models that rayembed loads, as the papers have it; the wrapper's own for others."""
    dimensions: PositiveInt | None = None
    """Width to which vectors are truncated before normalisation (Matryoshka). None: the full one.
    """
    tokens_per_batch: PositiveInt | None = None
    """Padded tokens of one forward pass of a model that rayembed loads; None: by device. Changes
    nothing but speed and rounding."""
    context: Literal["corpus", "random", "none"] = "corpus"
    """Context in which CDE embeds a task's texts; other models have none. `corpus`: documents drawn
    from the task's own corpus, for tasks without one from its texts (section 10.12). `random`:
    those of the corpus that was saved with the model, whatever the task, as in the paper's baseline
    of random training documents. `none`: the null token."""
    context_seed: Seed = CONTEXT_SEED
    """Seed of the draw of context documents."""
    prompts: Prompts = Prompts()

    @property
    def stored(self) -> StoredVectors:
        """Number type in which a search stores the model's vectors, and how it rescores results."""
        return StoredVectors(precision=self.precision, rescore=self.rescore)

    @model_validator(mode="after")
    def _has_vectors(self) -> "ModelUnderTest":
        if self.reference == BM25 and self.precision != "float32":
            raise ValueError(
                f"precision = {self.precision!r} sets the number type of vectors, but {BM25} has "
                "no vectors; remove precision"
            )
        return self


class EvaluationPlacement(FindingChoice, RuntimeSettings):
    """Settings for where an evaluation runs and stores its results. Nothing here changes a score
    beyond rounding.
    """

    storage_path: StoragePath = Field(default="outputs", min_length=1)
    """Folder or object-storage prefix for results and kept embeddings."""
    workers: PositiveInt = 1
    """Number of processes that hold the model."""
    use_gpu: UseGpu = "auto"
    """Whether each worker has a GPU. `auto`: where torch sees one on this machine or, with Ray,
    where live nodes offer one for each."""
    cpus_per_worker: float = Field(default=1.0, gt=0)
    """CPUs that Ray reserves for each worker."""
    threads_per_worker: PositiveInt | None = None
    """Threads of torch in each worker; None: `cpus_per_worker`, rounded down."""
    tasks_at_once: PositiveInt | None = None
    """Tasks that run side by side, each in a process of its own that holds the task's queries and
    scores, not its corpus; None: one more than workers, at most 8."""
    keep_embeddings: Literal["float32", "float16", "none"] = "float32"
    """Number type of embeddings kept in storage, for a restart and for tasks with the same texts.
    `float16` takes half the room and moves scores by about 1e-4; `none` keeps none."""
    price_per_hour: PositiveFloat | None = None
    """Price of an hour of one worker, in any currency: with it the results have the price of a
    million documents. None: the price that they were stored with."""
    tracking_uri: Reference | None = None
    """MLflow's address; None: a SQLite file in `storage_path`."""
    experiment: str = "rayembed-evaluation"
    """MLflow experiment."""

    @property
    def on_gpu(self) -> bool:
        """Whether each worker has a GPU; `auto` counts as no until the job's start resolves it."""
        return self.use_gpu is True

    def asks_ray(self) -> dict[str, bool]:
        """Map each placement setting that can require Ray to whether its value does."""
        return {"workers": self.workers > 1, "tasks_at_once": self.tasks_at_once is not None}


class ResultsPlace(Settings):
    """Location of the results of a finished evaluation, the only setting that a submission
    needs.
    """

    placement: EvaluationPlacement = EvaluationPlacement()


class EvaluationRun(Scores, Document):
    """Settings of an evaluation: model, tasks and placement."""

    model: ModelUnderTest
    baselines: Literal["own_sets", "all", "none"] = "own_sets"
    """Retrieval tasks that have rows of BM25 and of hybrid search (both rankings fused) beside the
    model. `own_sets`: those of the user's own sets. `all`: mteb's too; BM25 indexes each corpus in
    one process with all its texts in memory, at 0.12 ms a document of 100 words. `none`: none."""
    reranker: Reranker | None = None
    """Cross-encoder of two further rows on the tasks of `baselines`: the best documents of the
    model, and those of the hybrid search, put in order by it; None: no such rows."""
    placement: EvaluationPlacement = EvaluationPlacement()

    @model_validator(mode="after")
    def _reranks_something(self) -> "EvaluationRun":
        if self.reranker is not None and (self.baselines == "none" or self.model.reference == BM25):
            raise ValueError(
                "reranker reorders the documents that the model and its hybrid search find: set "
                f"baselines to own_sets or all and evaluate a model other than {BM25}, or remove "
                "reranker"
            )
        if self.reranker is not None and self.baselines == "own_sets" and not self.own_sets:
            raise ValueError(
                "with baselines=own_sets, reranker reorders results of own sets only, but "
                "own_sets is empty: set baselines=all, name own_sets, or remove reranker"
            )
        return self

    @model_validator(mode="after")
    def _something_to_do(self) -> "EvaluationRun":
        if not self.any_tasks:
            raise ValueError(
                "nothing to score the model on: name a benchmark (--benchmark wikipedia needs no "
                "hub), tasks (--tasks) or own sets (own_sets)"
            )
        return self
