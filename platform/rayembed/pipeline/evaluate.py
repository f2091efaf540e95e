"""An evaluation from its settings to result files, a table and MLflow."""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mteb
from mteb.models import ModelMeta

from rayembed.assets.cache import cache_folder
from rayembed.assets.storage import check_writable, is_remote, join
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.evaluation import BM25
from rayembed.config.evaluation_run import EvaluationRun
from rayembed.config.yaml_text import write_yaml
from rayembed.errors import ArtifactError, ConfigError, RayembedError, WorkerError
from rayembed.evaluation.air_bench.catalogue import VERSIONS
from rayembed.evaluation.air_bench.job import AIR_BENCH_RESULT, AirBenchJob, air_bench_jobs
from rayembed.evaluation.air_bench.scores import write_dev_scores
from rayembed.evaluation.benchmarks import MtebTask
from rayembed.evaluation.bm25 import Bm25, bm25_meta
from rayembed.evaluation.code_version import VECTORS, code_version, versions
from rayembed.evaluation.jobs import (
    TASK_RESULT,
    Done,
    Job,
    ScoreTask,
    TaskFactory,
    longest_first,
)
from rayembed.evaluation.model_spec import ModelSpec, loader_of, make_spec
from rayembed.evaluation.plan import Scoring, find_results, retrieval_only, task_factories
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.on_ray import Workers, run_jobs
from rayembed.evaluation.prompts_table import prompts_record
from rayembed.evaluation.result_writer import ResultWriter, open_results
from rayembed.pipeline.on_ray import connect
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.tracking_uri import resolve_tracking_uri

logger = logging.getLogger(__name__)

RESULTS = "evaluation"
"""Folder of all results in the storage."""

_TOLD = ("mteb", "sentence-transformers", *VECTORS)
"""Packages whose versions stand beside the results."""

AIR_BENCH = "air-bench"
"""Folder of AIR-Bench's files in the storage."""


@dataclass
class AirBench:
    """One data set of AIR-Bench on its way."""

    job: AirBenchJob
    outcome: dict[str, Any] | None = None
    error: RayembedError | None = None

    @property
    def retriever(self) -> str:
        """Names the results of a finished data set."""
        assert self.outcome is not None
        return str(self.outcome[AIR_BENCH_RESULT]["retriever"])


@dataclass
class Evaluated:
    """What came of an evaluation."""

    run: EvaluationRun
    meta: ModelMeta
    results: str
    """Where mteb's result files are, in storage."""
    local: Path
    """Where they are on this machine."""
    scorings: list[Scoring] = field(default_factory=list)
    air_bench: list[AirBench] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[str, RayembedError]]:
        """Tasks without a score, and why."""
        found = [(s.name, s.error) for s in self.scorings if s.error is not None]
        return found + [(a.job.name, a.error) for a in self.air_bench if a.error is not None]

    @property
    def scores(self) -> dict[str, float]:
        """Main score by task, of tasks that are whole."""
        return {s.name: s.score for s in self.scorings if s.score is not None}


def evaluate(run: EvaluationRun) -> Evaluated:
    """Scores of the run's model on all its tasks; what is scored already is read.

    A task that fails stops no other: `failed` tells of it.

    Raises:
        RayembedError: what is wrong with the run, the model or the cluster, and what to do.
    """
    storage = absolute_storage(run.placement.storage_path)
    run = run.model_copy(
        update={"placement": run.placement.model_copy(update={"storage_path": storage})}
    )
    check_writable(storage)
    factories = task_factories(run)
    spec = None if loader_of(run.model.reference) == BM25 else _spec(run, factories)
    if spec is None:
        factories = _of_bm25(factories)
    meta = bm25_meta("bm25", _bm25_revision()) if spec is None else spec.meta
    air = [AirBench(job) for job in air_bench_of(run)]
    results = _results_folder(storage)
    with open_results(results.local, meta) as writer:
        results.fetch()
        place = writer.place.relative_to(results.local).as_posix()
        evaluated = Evaluated(run, meta, join(results.place, place), writer.place)
        evaluated.scorings = find_results(factories, writer)
        evaluated.air_bench = air
        for name, text in _about(run, spec, factories).items():
            writer.keep(name, text)
        # Of the first run: whoever comes later with other software has another revision.
        writer.keep_first("versions.yaml", write_yaml(versions(_TOLD)))
        try:
            _score(evaluated, spec, writer, results)
        finally:
            results.keep()
    _write_dev_scores(evaluated.air_bench)
    return evaluated


def _write_dev_scores(entries: Sequence[AirBench]) -> None:
    """Tables of AIR-Bench's dev scores, one for each version that has such."""
    for place in dev_places(entries):
        write_dev_scores(*place)


def dev_places(entries: Sequence[AirBench]) -> list[tuple[str, str, str]]:
    """Folder, version and retriever of each version of AIR-Bench that has dev scores by now."""
    places = (
        (entry.job.folder, entry.job.dataset.version, entry.retriever)
        for entry in entries
        if entry.outcome is not None and "dev" in entry.job.dataset.splits
    )
    return list(dict.fromkeys(places))


def _bm25_revision() -> str:
    return f"{Bm25.revision}-{code_version().scores[:8]}"


def _of_bm25(factories: Sequence[TaskFactory]) -> list[TaskFactory]:
    kept = retrieval_only(factories)
    if left_out := [factory.name for factory in factories if factory not in kept]:
        told = ", ".join(left_out[:5]) + (" …" if len(left_out) > 5 else "")
        if not kept:
            raise ConfigError(f"{BM25} has no vectors and takes retrieval tasks alone, not {told}")
        logger.warning("%s takes no part in %d tasks (%s)", BM25, len(left_out), told)
    return kept


def _spec(run: EvaluationRun, factories: Sequence[TaskFactory]) -> ModelSpec:
    own = [factory.name for factory in factories if not isinstance(factory, MtebTask)]
    placement = run.placement
    tracking_uri = resolve_tracking_uri(placement.tracking_uri, placement.storage_path)
    device = "cuda" if placement.use_gpu else "cpu"
    return make_spec(run.model, tracking_uri=tracking_uri, own_tasks=own, device=device)


def _score(
    evaluated: Evaluated, spec: ModelSpec | None, writer: ResultWriter, results: StoredFolder
) -> None:
    """Do what is missing and take its results as they come."""
    by_piece: dict[TaskFactory, list[Scoring]] = {}
    for scoring in evaluated.scorings:
        for job in scoring.missing():
            # A member of an aggregate may be asked for by its own name, too.
            by_piece.setdefault(job.task, []).append(scoring)
    jobs: list[Job] = [ScoreTask(piece) for piece in by_piece]
    for entry in evaluated.air_bench:
        if entry.job.finished(evaluated.meta):
            logger.info("%s: all results are there", entry.job.name)
        jobs.append(entry.job)
    of_air_bench = {entry.job: entry for entry in evaluated.air_bench}
    there = len(evaluated.scores)
    if there:
        logger.info("%d of %d tasks are scored already", there, len(evaluated.scorings))
    count = there
    for done in _execute(evaluated, spec, jobs):
        if isinstance(done.job, AirBenchJob):
            entry = of_air_bench[done.job]
            entry.outcome, entry.error = done.outcome, done.error
            _tell(done, "done")
            continue
        assert isinstance(done.job, ScoreTask)
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
                _tell(done, f"{scoring.score:.4f} ({count} of {len(evaluated.scorings)})")
        _keep_so_far(results)


def _keep_so_far(results: StoredFolder) -> None:
    """So that a job that is killed has its results in storage; an outage ends no evaluation."""
    try:
        results.keep()
    except ArtifactError as error:
        logger.warning("%s", error)


def _tell(done: Done, what: str) -> None:
    if done.error is not None:
        logger.warning("%s failed: %s", done.job.name, done.error)
    else:
        logger.info("%s  %s, %.1f s", done.job.name, what, done.seconds)


def _execute(evaluated: Evaluated, spec: ModelSpec | None, jobs: Sequence[Job]) -> Iterator[Done]:
    """The jobs with their outcomes: over the cluster, or here for what needs no model."""
    if not jobs:
        return
    if spec is None:
        yield from _one_after_the_other(jobs, Bm25(evaluated.meta))
        return
    placement = evaluated.run.placement
    connect()
    store = None
    if placement.keep_embeddings != "none":
        folder = join(placement.storage_path, "embeddings", spec.fingerprint)
        store = EmbeddingStore(folder, placement.keep_embeddings)
    workers = Workers(
        number=placement.workers,
        cpus=placement.cpus_per_worker,
        threads=placement.threads_per_worker,
        gpu=placement.use_gpu,
        tasks_at_once=placement.tasks_at_once,
        cpus_per_task=placement.cpus_per_task,
    )
    yield from run_jobs(jobs, spec, store, workers)


def _one_after_the_other(jobs: Sequence[Job], model: Any) -> Iterator[Done]:
    for job in longest_first(jobs):
        began = time.monotonic()
        try:
            outcome = job.run(model)
        except RayembedError as error:
            yield Done(job, error=error)
        except Exception as error:  # noqa: BLE001 # of mteb or of a task: the others go on
            told = WorkerError(f"{job.name}: {type(error).__name__}: {error}")
            yield Done(job, error=told)
        else:
            yield Done(job, outcome, seconds=time.monotonic() - began)


def air_bench_of(run: EvaluationRun) -> list[AirBenchJob]:
    """The run's data sets of AIR-Bench.

    Raises:
        ConfigError: a version has none of the languages.
    """
    folder = join(run.placement.storage_path, AIR_BENCH)
    return [
        job
        for version in run.benchmarks
        if version in VERSIONS
        for job in air_bench_jobs(version, folder, languages=run.languages)
    ]


def _results_folder(storage: str) -> StoredFolder:
    """The results in storage, with their copy on this machine where storage is no disk."""
    place = join(storage, RESULTS)
    if not is_remote(storage):
        return StoredFolder(place, Path(place), recursive=True)
    key = hashlib.sha256(place.encode()).hexdigest()[:12]
    return StoredFolder(place, cache_folder() / "evaluation" / key, recursive=True)


def _about(
    run: EvaluationRun, spec: ModelSpec | None, factories: Sequence[TaskFactory]
) -> dict[str, str]:
    """Files that say how the results were made: name → content."""
    # No JSON: mteb takes every JSON file there for the result of a task.
    about = {"evaluation.yaml": run.to_yaml()}
    if spec is not None:
        tasks = [factory.load() for factory in factories]
        about["prompts.yaml"] = write_yaml(prompts_record(spec, tasks))
    return about
