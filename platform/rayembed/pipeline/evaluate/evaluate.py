"""Evaluate a model, from the settings to result files, a table and MLflow."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayembed.assets.storage import check_writable, join
from rayembed.config.evaluation import BM25, EvaluationRun
from rayembed.config.named_benchmarks import job_benchmark, job_benchmark_names
from rayembed.errors import RayembedError
from rayembed.evaluation.benchmarks import MtebTask
from rayembed.evaluation.bm25 import Bm25, bm25_meta, bm25_revision
from rayembed.evaluation.hybrid import Baselines, baselines_of
from rayembed.evaluation.jobs import Done, TaskFactory
from rayembed.evaluation.model_spec import ModelSpec
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.pool import Workers
from rayembed.evaluation.run_scores import make_spec
from rayembed.evaluation.score import ModelScores, Store, meta_of, score
from rayembed.machine.device import placed_here
from rayembed.machine.hardware import Precision
from rayembed.pipeline.evaluate.findings import Finding, ScoredModels, make_findings
from rayembed.pipeline.run.runtime import runtime_of, with_device
from rayembed.pipeline.storage import absolute_storage, placed
from rayembed.registry.tracking_uri import resolve_tracking_uri

logger = logging.getLogger(__name__)

RESULTS = "evaluation"
"""Folder of all results in the storage."""


@dataclass
class EvaluationResult:
    """Result of an evaluation: scores, failed tasks and the location of the files."""

    run: EvaluationRun
    scored: ModelScores
    further: Mapping[str, Sequence[Done]] = field(default_factory=dict)
    """Outcome of each job, by the benchmark that brings its own jobs."""
    findings: tuple[Finding, ...] = ()
    """What the job's findings say about the scores."""

    @property
    def failed(self) -> list[tuple[str, RayembedError]]:
        """Tasks without a score, each with the error that prevented it."""
        further = (done for of_one in self.further.values() for done in of_one)
        return self.scored.failed + [(d.job.name, d.error) for d in further if d.error is not None]


def evaluate(run: EvaluationRun) -> EvaluationResult:
    """Score the run's model on all its tasks; stored scores are reused.

    A task that fails stops no other: `failed` tells of it.

    Raises:
        RayembedError: what is wrong with the run, the model or the cluster, and what to do.
    """
    run = placed(run)
    storage = run.placement.storage_path
    check_writable(storage)
    factories = task_factories(run)
    runtime = runtime_of(run.placement)
    neural = run.model.reference != BM25
    run = with_device(run, runtime) if neural else run
    asks = neural and run.model.dtype in ("auto", "bfloat16")
    model = evaluated_model(run, factories, runtime.precision(run.placement) if asks else None)
    jobs = further_jobs(run)
    beside = [job for of_one in jobs.values() for job in of_one]
    for job in beside:
        if job.finished(meta_of(model)):
            logger.info("%s: nothing to compute, because all results exist already", job.name)
    done_beside: dict[Any, Done] = {}

    def take(done: Done) -> None:
        done_beside[done.job] = done

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
    scored = score(
        model,
        factories,
        pool,
        store,
        about=about,
        baselines=_baselines(run, factories),
        price_per_hour=run.placement.price_per_hour,
        beside=beside,
        on_done=take,
    )
    further = {
        name: [done_beside[job] for job in of_one if job in done_beside]
        for name, of_one in jobs.items()
    }
    for name, done in further.items():
        job_benchmark(name).keep(run, done)
    return EvaluationResult(run, scored, further)


def with_findings(evaluated: EvaluationResult) -> EvaluationResult:
    """Run the configured analyses of an evaluation's scores and add their findings to the
    result.
    """
    run, scored = evaluated.run, evaluated.scored
    if not scored.scores:
        return evaluated
    label = str(scored.meta.name)
    storage = absolute_storage(run.placement.storage_path)
    subject = ScoredModels({label: scored}, label, None, run.model.reference, storage)
    return replace(evaluated, findings=make_findings(subject, run.placement.findings))


def _baselines(run: EvaluationRun, factories: Sequence[TaskFactory]) -> Baselines | None:
    """Make the baselines to score beside the model; None if the settings choose none.

    Raises:
        AssetError: the reranker is no cross-encoder.
    """
    if run.baselines == "none":
        return None
    own = {one.name for one in run.own_sets}
    names = (factory.name for factory in factories)
    return baselines_of(
        [name for name in names if run.baselines == "all" or name in own], run.reranker
    )


def evaluated_model(
    run: EvaluationRun, factories: Sequence[TaskFactory], precision: Precision | None = None
) -> ModelSpec | Bm25:
    """Make the spec of the model in the settings.

    Args:
        precision: what the workers' nodes compute fast; None: what this machine does.

    Raises:
        RayembedError: as `make_spec`.
    """
    if run.model.reference == BM25:
        return Bm25(bm25_meta(BM25, bm25_revision()))
    own = [factory.name for factory in factories if not isinstance(factory, MtebTask)]
    placement = run.placement
    storage = absolute_storage(placement.storage_path)
    tracking_uri = resolve_tracking_uri(placement.tracking_uri, storage, make_folder=False)
    on = precision or ("cuda" if placed_here(placement).on_gpu else "cpu")
    return make_spec(run.model, tracking_uri=tracking_uri, own_tasks=own, on=on)


def workers_of(run: EvaluationRun) -> Workers:
    """Number and resources of the workers that the settings request."""
    placement = run.placement
    return Workers(
        number=placement.workers,
        cpus=placement.cpus_per_worker,
        threads=placement.threads_per_worker,
        gpu=placement.on_gpu,
        tasks_at_once=placement.tasks_at_once,
    )


def further_jobs(run: EvaluationRun) -> dict[str, Sequence[Any]]:
    """Map benchmarks with their own evaluation jobs, such as AIR-Bench, to these jobs.

    Raises:
        ConfigError: one has nothing in the run's languages.
    """
    names = [name for name in run.benchmarks if name in job_benchmark_names()]
    return {name: job_benchmark(name).jobs(run) for name in names}
