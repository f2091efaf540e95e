"""An evaluation in MLflow: scores by task and category, and the result files."""

import hashlib

from rayembed.assets.cache import cache_folder
from rayembed.config.document import fingerprint, published_values
from rayembed.config.named_benchmarks import job_benchmark
from rayembed.pipeline.evaluate.evaluate import EvaluationResult
from rayembed.pipeline.evaluate.report import benchmark_averages
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.mlflow_run import flatten
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.tracking import Status, Tracker


def track(evaluated: EvaluationResult, tracking_uri: str) -> bool:
    """Whether MLflow has all of the evaluation now.

    The run of a model at its revision is one, however often and with whichever tasks it is scored:
    a score that MLflow has already makes no second point.

    Raises:
        TrackingError: MLflow is away or refuses.
    """
    run, meta = evaluated.run, evaluated.scored.meta
    key = fingerprint([str(meta.name), str(meta.revision)])
    name = f"{meta.name}@{meta.revision}"
    place = hashlib.sha256(f"{tracking_uri} {name}".encode()).hexdigest()[:12]
    storage = absolute_storage(run.placement.storage_path)
    tracker = Tracker.open(
        tracking_uri,
        run.placement.experiment,
        name.replace("/", "__"),
        key,
        flatten({"model": published_values(run.model, storage)}),
        {
            "rayembed.results": evaluated.scored.results,
            "rayembed.model_revision": str(meta.revision),
        },
        folder=cache_folder() / "evaluation-runs" / place,
        total_steps=1,
        storage=storage,
    )
    status: Status = "FAILED"
    complete = False
    try:
        tracker.log_provenance(collect_provenance({}))
        tracker.log_scores("score", evaluated.scored.scores, 0)
        for benchmark, values in benchmark_averages(evaluated).items():
            tracker.log_scores(f"average/{benchmark}", values, 0)
        for name, done in evaluated.further.items():
            if scores := job_benchmark(name).scores(run, done):
                tracker.log_scores(f"dev/{name}", scores, 0)
        tracker.log_artifact(evaluated.scored.local, "results")
        status = "FAILED" if evaluated.failed else "FINISHED"
    finally:
        complete = tracker.close(status)
    return complete
