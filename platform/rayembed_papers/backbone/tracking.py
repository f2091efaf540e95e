"""Log a backbone's evaluation to MLflow: scores by task, averages, tables."""

import hashlib
from statistics import fmean

from rayembed.assets.cache import cache_folder
from rayembed.assets.storage import write_atomic
from rayembed.config.document import fingerprint
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.run_folder import flatten
from rayembed.registry.tracking import Tracker
from rayembed_papers.backbone.catalogue import BENCHMARKS
from rayembed_papers.backbone.evaluation import BackboneScores


def track(scores: BackboneScores, tracking_uri: str) -> bool:
    """Log the evaluation; return whether MLflow has received all of it.

    A backbone evaluated with the same settings is one MLflow run, however often it is submitted.

    Raises:
        TrackingError: MLflow is away or refuses.
    """
    run, backbone = scores.run, scores.backbone
    key = fingerprint([run.fingerprint, backbone.fingerprint])
    name = f"{backbone.name}@{backbone.weights}-{key[:8]}"
    place = hashlib.sha256(f"{tracking_uri} {name}".encode()).hexdigest()[:12]
    folder = cache_folder() / "backbone-runs" / place
    with Tracker.open(
        tracking_uri,
        run.placement.experiment,
        name,
        key,
        flatten(run.model_dump(mode="json", exclude={"placement"})),
        {"rayembed.results": scores.folder, "rayembed.model_revision": backbone.weights},
        folder=folder,
        total_steps=1,
    ) as tracker:
        tracker.log_provenance(collect_provenance({}))
        for benchmark in BENCHMARKS:
            if summaries := scores.of_benchmark(benchmark):
                medians = {summary.task.name: summary.median for summary in summaries}
                tracker.log_scores(benchmark, medians, 0)
                diverged = {one.task.name: float(one.diverged) for one in summaries}
                if any(diverged.values()):
                    tracker.log_scores(f"{benchmark}_diverged_trials", diverged, 0)
                every = {summary.task.name: summary.median_of_all for summary in summaries}
                tracker.log_scores(f"{benchmark}_all_trials", every, 0)
                tracker.log_scores(benchmark, {"average": fmean(medians.values())}, 0)
        for file, text in scores.reports.items():
            write_atomic(folder / "reports" / file, text.encode())
        tracker.log_artifact(folder / "reports", "results")
        tracker.status = "FAILED" if scores.failed else "FINISHED"
    return tracker.complete
