"""Scoring of models: the only path to a score for training, validation, evaluation and analysis.

A model, tasks, whoever embeds, and where results lie: what is scored already is read, what is
missing is done by mteb, and every result is written down as it comes. Results are found by the
model's name and revision; the revision names the weights and all else that decides a vector or what
stands before a text, and a result file names its data, so that a score of something else is never
taken for this one.
"""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import mteb
from mteb.models import ModelMeta

from rayembed.assets.cache import cache_folder
from rayembed.assets.storage import is_remote, join
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.document import read_yaml, write_yaml
from rayembed.config.evaluation import BM25
from rayembed.errors import ArtifactError, ConfigError, RayembedError
from rayembed.evaluation.bm25 import Bm25
from rayembed.evaluation.jobs import (
    TASK_RESULT,
    Done,
    Job,
    ScoreTask,
    TaskFactory,
    longest_first,
)
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.plan import Scoring, find_results, retrieval_only
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.here import finish
from rayembed.evaluation.prompts_table import prompts_record, with_earlier_tasks
from rayembed.evaluation.query_results import OF_QUERIES
from rayembed.models.versions import LIBRARIES, versions, warn_of_other_versions
from rayembed.results.files import CONDITIONS_FILE
from rayembed.results.writer import ResultWriter, open_results

logger = logging.getLogger(__name__)

_PACKAGES = ("mteb", "numpy", "scikit-learn", "scipy", *LIBRARIES)
"""Packages whose versions stand beside the results."""

Pool = Callable[[Sequence[Job], ModelSpec, EmbeddingStore | None], Iterator[Done]]
"""Does jobs with a spec's model and gives each with its outcome, as they come: workers on Ray
(`pooled/on_ray.run_jobs`) or this process (`pooled/here.run_here`)."""


@dataclass(frozen=True)
class Store:
    """Storage of results and embeddings, so that nothing is computed twice."""

    results: str
    """Folder or object-storage prefix that holds mteb's result layout."""
    embeddings: str | None = None
    """Folder or object-storage prefix; None: embeddings are not stored."""
    precision: Literal["float32", "float16"] = "float32"
    """Number type of stored embeddings."""

    def open_results(self) -> StoredFolder:
        """Open the stored results, with a local copy if the storage is remote."""
        if not is_remote(self.results):
            return StoredFolder(self.results, Path(self.results), recursive=True)
        key = hashlib.sha256(self.results.encode()).hexdigest()[:12]
        return StoredFolder(self.results, cache_folder() / "evaluation" / key, recursive=True)

    def embeddings_of(self, spec: ModelSpec) -> EmbeddingStore | None:
        """Stored embeddings of a model; None if embeddings are not stored."""
        if self.embeddings is None:
            return None
        return EmbeddingStore(join(self.embeddings, spec.fingerprint), self.precision)


@dataclass
class ModelScores:
    """Scores of a model by task, and the locations of their files."""

    meta: ModelMeta
    results: str
    """mteb's result files of the model's revision, in storage."""
    local: Path
    """The same on this machine."""
    tasks: list[Scoring] = field(default_factory=list)
    model: ModelSpec | Bm25 | None = None
    """The model that was scored."""

    @property
    def failed(self) -> list[tuple[str, RayembedError]]:
        """Tasks without a score, with the reason."""
        return [(task.name, task.error) for task in self.tasks if task.error is not None]

    @property
    def scores(self) -> dict[str, float]:
        """Main score by task, for completed tasks."""
        return {task.name: task.score for task in self.tasks if task.score is not None}

    @property
    def queries(self) -> dict[str, list[Sequence[float]]]:
        """Scores of single queries by task, for each of its subsets in an order that all models
        share; of tasks that have such scores.
        """
        by_task: dict[str, list[Sequence[float]]] = {}
        for task in self.tasks:
            rows = [] if task.result is None else list(chain(*task.result.scores.values()))
            if rows and all(OF_QUERIES in row for row in rows):
                ordered = sorted(rows, key=lambda row: str(row["hf_subset"]))
                by_task[task.name] = [row[OF_QUERIES] for row in ordered]
        return by_task


def score(
    model: ModelSpec | Bm25,
    tasks: Sequence[TaskFactory],
    pool: Pool,
    store: Store,
    *,
    about: Mapping[str, str] | None = None,
    beside: Sequence[Job] = (),
    on_done: Callable[[Done], None] = lambda done: None,
) -> ModelScores:
    """Score the model on the tasks; stored results are reused.

    A task that fails stops no other: `ModelScores.failed` tells of it.

    Args:
        about: further files that say how the results were made, by their names.
        beside: jobs that are no tasks of mteb and are done by the same workers.
        on_done: takes each of those with its outcome, as they come.

    Raises:
        ArtifactError: another process writes the results of this model.
        ConfigError: BM25 is asked for tasks that are no retrieval.
        RayembedError: the model cannot be loaded, or the cluster has not got what it needs.
    """
    meta = meta_of(model)
    if isinstance(model, Bm25):
        tasks = _of_bm25(tasks)
    results = store.open_results()
    with open_results(results.local, meta) as writer:
        results.fetch()
        place = writer.place.relative_to(results.local).as_posix()
        scored = ModelScores(meta, join(results.place, place), writer.place, model=model)
        scored.tasks = find_results(tasks, writer)
        for name, text in (about or {}).items():
            writer.keep(name, text)
        if not isinstance(model, Bm25):
            record = prompts_record(model, [factory.load() for factory in tasks])
            earlier = writer.kept(CONDITIONS_FILE)
            writer.keep(CONDITIONS_FILE, write_yaml(with_earlier_tasks(record, earlier)))
        first = writer.keep_first("versions.yaml", write_yaml(versions(_PACKAGES)))
        warn_of_other_versions(f"results in {scored.results!r}", read_yaml(first))
        try:
            _do_what_is_missing(scored, model, pool, store, writer, results, beside, on_done)
        finally:
            results.keep()
    return scored


def meta_of(model: ModelSpec | Bm25) -> ModelMeta:
    """Return mteb's metadata of a model."""
    return model.mteb_model_meta if isinstance(model, Bm25) else model.meta


def _of_bm25(tasks: Sequence[TaskFactory]) -> list[TaskFactory]:
    """The tasks that a model without vectors can do; the others are named in a warning."""
    kept = retrieval_only(tasks)
    if left_out := [task.name for task in tasks if task not in kept]:
        told = ", ".join(left_out[:5]) + (" …" if len(left_out) > 5 else "")
        if not kept:
            raise ConfigError(f"{BM25} scores retrieval tasks only, not {told}")
        logger.warning("%s scores retrieval only: %d tasks skipped (%s)", BM25, len(left_out), told)
    return kept


def _do_what_is_missing(
    scored: ModelScores,
    model: ModelSpec | Bm25,
    pool: Pool,
    store: Store,
    writer: ResultWriter,
    results: StoredFolder,
    beside: Sequence[Job],
    on_done: Callable[[Done], None],
) -> None:
    """Run the missing jobs and record their results as they finish."""
    by_piece: dict[TaskFactory, list[Scoring]] = {}
    for scoring in scored.tasks:
        for job in scoring.missing():
            # A member of an aggregate may be asked for by its own name, too.
            by_piece.setdefault(job.task, []).append(scoring)
    count = len(scored.scores)
    if count:
        logger.info("%d of %d tasks are scored already", count, len(scored.tasks))
    for done in _run([*map(ScoreTask, by_piece), *beside], model, pool, store):
        if not isinstance(done.job, ScoreTask):
            _tell(done, "done")
            on_done(done)
            continue
        if done.outcome is None:
            _tell(done, "")
        for scoring in by_piece[done.job.task]:
            scoring.seconds += done.seconds
            if done.outcome is None:
                scoring.error = done.error
                continue
            result = mteb.TaskResult.from_dict(done.outcome[TASK_RESULT])
            scoring.take(done.job.task, result, writer)
            if scoring.score is not None:
                count += 1
                _tell(done, f"{scoring.score:.4f} ({count} of {len(scored.tasks)})")
        _keep_so_far(results)


def _run(jobs: Sequence[Job], model: ModelSpec | Bm25, pool: Pool, store: Store) -> Iterator[Done]:
    """The jobs with their outcomes; BM25 needs neither a pool nor a store."""
    if not jobs:
        return
    if isinstance(model, Bm25):
        for job in longest_first(jobs):
            yield finish(job, partial(Bm25, model.mteb_model_meta))
        return
    yield from pool(jobs, model, store.embeddings_of(model))


def _keep_so_far(results: StoredFolder) -> None:
    """Copy the results so far to storage, so that a killed job can resume; if storage is
    unreachable, the evaluation goes on.
    """
    try:
        results.keep()
    except ArtifactError as error:
        logger.warning("%s", error)


def _tell(done: Done, what: str) -> None:
    if done.error is not None:
        logger.warning("%s failed: %s", done.job.name, done.error)
    else:
        logger.info("%s  %s, %.1f s", done.job.name, what, done.seconds)
