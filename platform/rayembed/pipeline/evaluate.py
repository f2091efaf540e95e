"""An evaluation from its settings to result files, a table and MLflow."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rayembed.assets.storage import check_writable, join
from rayembed.config.evaluation import BM25
from rayembed.config.evaluation_run import EvaluationRun
from rayembed.device import placed_here
from rayembed.errors import RayembedError
from rayembed.evaluation.air_bench.catalogue import VERSIONS
from rayembed.evaluation.air_bench.job import AIR_BENCH_RESULT, AirBenchJob, air_bench_jobs
from rayembed.evaluation.air_bench.scores import write_dev_scores
from rayembed.evaluation.benchmarks import MtebTask
from rayembed.evaluation.bm25 import Bm25, bm25_meta
from rayembed.evaluation.jobs import Done, TaskFactory
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.pool import Workers
from rayembed.evaluation.run_scores import bm25_revision, loader_of, make_spec
from rayembed.evaluation.score import ModelScores, Store, meta_of, score
from rayembed.hardware import Precision
from rayembed.pipeline.runtime import runtime_of, with_device
from rayembed.pipeline.storage import absolute_storage, placed
from rayembed.registry.tracking_uri import resolve_tracking_uri

logger = logging.getLogger(__name__)

RESULTS = "evaluation"
"""Folder of all results in the storage."""

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
        """Name of the model in the results of a finished data set."""
        assert self.outcome is not None
        return str(self.outcome[AIR_BENCH_RESULT]["retriever"])


@dataclass
class EvaluationResult:
    """Scores of an evaluation, and its failures."""

    run: EvaluationRun
    scored: ModelScores
    air_bench: list[AirBench] = field(default_factory=list)

    @property
    def failed(self) -> list[tuple[str, RayembedError]]:
        """Tasks without a score, and why."""
        of_air_bench = [(a.job.name, a.error) for a in self.air_bench if a.error is not None]
        return self.scored.failed + of_air_bench


def evaluate(run: EvaluationRun) -> EvaluationResult:
    """Scores of the run's model on all its tasks; what is scored already is read.

    A task that fails stops no other: `failed` tells of it.

    Raises:
        RayembedError: what is wrong with the run, the model or the cluster, and what to do.
    """
    run = placed(run)
    storage = run.placement.storage_path
    check_writable(storage)
    factories = task_factories(run)
    runtime = runtime_of(run.placement)
    neural = loader_of(run.model.reference) != BM25
    run = with_device(run, runtime) if neural else run
    asks = neural and run.model.dtype in ("auto", "bfloat16")
    model = evaluated_model(run, factories, runtime.precision(run.placement) if asks else None)
    air = {job: AirBench(job) for job in air_bench_of(run)}

    for job in air:
        if job.finished(meta_of(model)):
            logger.info("%s: all results are there", job.name)

    def take(done: Done) -> None:
        assert isinstance(done.job, AirBenchJob)
        air[done.job].outcome, air[done.job].error = done.outcome, done.error

    def pool(*given: Any) -> Any:
        runtime.start()  # only where something is left to do
        return runtime.pool(workers_of(run))(*given)

    keep = run.placement.keep_embeddings
    store = Store(
        join(storage, RESULTS),
        None if keep == "none" else join(storage, "embeddings"),
        "float32" if keep == "none" else keep,
    )
    # No JSON: mteb takes every JSON file there for the result of a task.
    about = {"evaluation.yaml": run.published()}
    scored = score(model, factories, pool, store, about=about, beside=list(air), on_done=take)
    evaluated = EvaluationResult(run, scored, list(air.values()))
    _write_dev_scores(evaluated.air_bench)
    return evaluated


def evaluated_model(
    run: EvaluationRun, factories: Sequence[TaskFactory], precision: Precision | None = None
) -> ModelSpec | Bm25:
    """The model of the settings, before it is loaded.

    Args:
        precision: what the workers' nodes compute fast; None: what this machine does.

    Raises:
        RayembedError: as `make_spec`.
    """
    if loader_of(run.model.reference) == BM25:
        return Bm25(bm25_meta(BM25, bm25_revision()))
    own = [factory.name for factory in factories if not isinstance(factory, MtebTask)]
    placement = run.placement
    storage = absolute_storage(placement.storage_path)
    tracking_uri = resolve_tracking_uri(placement.tracking_uri, storage, make_folder=False)
    on = precision or ("cuda" if placed_here(placement).on_gpu else "cpu")
    return make_spec(run.model, tracking_uri=tracking_uri, own_tasks=own, on=on)


def workers_of(run: EvaluationRun) -> Workers:
    """The workers that the settings ask for."""
    placement = run.placement
    return Workers(
        number=placement.workers,
        cpus=placement.cpus_per_worker,
        threads=placement.threads_per_worker,
        gpu=placement.on_gpu,
        tasks_at_once=placement.tasks_at_once,
        cpus_per_task=placement.cpus_per_task,
    )


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
