"""Evaluate a backbone: run the finetunings, collect scores, and tabulate them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import check_writable, file_name, join, write_atomic
from rayembed.errors import ArtifactError, DivergenceError, RayembedError, WorkerError
from rayembed.machine.device import settled_placement
from rayembed.machine.hardware import settled
from rayembed.models.loading.files import check_weight_files, weights_fingerprint
from rayembed.pipeline.storage import absolute_storage
from rayembed_papers.backbone.catalogue import BENCHMARKS, Plan, plan_of, task_named
from rayembed_papers.backbone.heads import (
    check_heads,
    check_length,
    encoder_folder,
    family_of,
)
from rayembed_papers.backbone.results import (
    Summary,
    best_result,
    converged,
    find_results,
    keep_best_model,
    missing,
    summarize,
    trials_of,
)
from rayembed_papers.backbone.rows import StoredRows, prepare
from rayembed_papers.backbone.settings import BackboneRun
from rayembed_papers.backbone.tables import markdown, scores_csv
from rayembed_papers.backbone.tasks import Finetuning, TaskRows
from rayembed_papers.backbone.tokens import BackboneTokenizer
from rayembed_papers.backbone.trial import Backbone, Trial

logger = logging.getLogger(__name__)

RESULTS = "backbones"
"""Storage folder of these evaluations."""

_MOST_ROUNDS = 3
"""Maximum repetitions of a finetuning that others start from: a repeated trial may score slightly
lower because of rounding, and another one become the best."""


@dataclass
class BackboneScores:
    """Scores of a backbone's tasks, and the finetunings that failed."""

    run: BackboneRun
    plan: Plan
    backbone: Backbone
    storage: str
    summaries: dict[str, Summary] = field(default_factory=dict)
    """Summaries by task, for tasks with all trials finished."""
    failed: dict[str, RayembedError] = field(default_factory=dict)
    """Errors by trial or finetuning."""

    @property
    def folder(self) -> str:
        """Storage folder of the backbone's results."""
        return join(self.storage, RESULTS, "results", self.backbone.name, self.backbone.weights)

    def of_benchmark(self, benchmark: str) -> list[Summary]:
        """Return the summaries of a benchmark's requested tasks, in the table's order."""
        names = [task.name for task in self.plan.tasks if task.benchmark == benchmark]
        return [self.summaries[name] for name in names if name in self.summaries]

    @property
    def reports(self) -> dict[str, str]:
        """File name → content of each report file: settings, and tables of each benchmark."""
        label = self.run.fingerprint
        found = {f"evaluation-{label}.yaml": self.run.to_yaml()}
        for benchmark in BENCHMARKS:
            if summaries := self.of_benchmark(benchmark):
                table = markdown(benchmark, summaries, self.backbone.name)
                found[f"{benchmark}-{label}.md"] = table
                found[f"{benchmark}-{label}.csv"] = scores_csv(summaries)
        return found


def evaluate_backbone(run: BackboneRun) -> BackboneScores:
    """Score the run's backbone; finished trials are reused.

    Raises:
        RayembedError: what is wrong with the run, the backbone, the data or the cluster.
    """
    from rayembed.pipeline.run.on_ray import OnRay

    storage = absolute_storage(run.placement.storage_path)
    placement = settled_placement(run.placement, OnRay().gpus(run.placement))
    run = run.model_copy(update={"placement": placement})
    plan = plan_of(run)
    backbone = find_backbone(run, plan)
    check_writable(storage)
    data = prepare(plan.finetunings, join(storage, RESULTS, "data"), run.data_root)
    scores = BackboneScores(run, plan, backbone, storage)
    best: dict[str, Trial] = {}
    for wave in _waves(plan.finetunings):
        groups = [_trials(one, scores, data, best) for one in wave]
        _do(groups, scores)
        for one, trials in zip(wave, groups, strict=True):
            _take(one, trials, scores, best)
    for name, text in scores.reports.items():
        write_atomic(join(scores.folder, name), text.encode())
    return scores


def find_backbone(run: BackboneRun, plan: Plan) -> Backbone:
    """Locate the backbone of a run and check that all planned finetunings can use it.

    Raises:
        AssetError, ArtifactError: no encoder there, one that is not supported, or files or weights
            of it are missing, damaged or cut off.
        ConfigError: it has learnt too few positions for a task, or its family lacks a head.
    """
    folder = resolve_model(run.backbone)
    encoder = encoder_folder(folder)
    family_of(encoder)
    check_weight_files(folder)
    longest = max(plan.finetunings, key=lambda one: one.protocol.max_length)
    check_length(encoder, longest.protocol.max_length, longest.name)
    check_heads(encoder, plan.finetunings)
    BackboneTokenizer(encoder, longest.protocol.max_length)
    name = run.name or file_name(run.backbone.partition("@")[0])
    weights = weights_fingerprint(folder)
    precision = settled(run.precision, "cuda" if run.placement.on_gpu else "cpu")
    return Backbone(run.backbone, name, weights, precision, run.head_dropout)


def _waves(finetunings: Sequence[Finetuning]) -> list[list[Finetuning]]:
    """Group finetunings that can run concurrently; each group follows the ones that it
    starts from.
    """
    depth: dict[str, int] = {}
    for one in finetunings:
        depth[one.name] = 0 if one.start is None else depth[one.start] + 1
    return [
        [one for one in finetunings if depth[one.name] == wave]
        for wave in range(max(depth.values()) + 1)
    ]


def _trials(
    one: Finetuning,
    scores: BackboneScores,
    data: Mapping[TaskRows, StoredRows],
    best: Mapping[str, Trial],
) -> list[Trial]:
    """List the trials of a finetuning's grid; none if the model to start from is missing."""
    if one.start is not None and one.start not in best:
        why = f"{one.name} starts from the best model of {one.start}, whose trials "
        scores.failed[one.name] = (
            DivergenceError(why + "all diverged")
            if isinstance(scores.failed.get(one.start), DivergenceError)
            else WorkerError(why + "are not all done")
        )
        return []
    start = None if one.start is None else best[one.start]
    keeps = any(other.start == one.name for other in scores.plan.finetunings)
    return trials_of(one, scores.backbone, data, scores.folder, keeps_model=keeps, start=start)


def _do(groups: Sequence[Sequence[Trial]], scores: BackboneScores) -> None:
    """Run all unfinished trials of several finetunings."""
    from rayembed.pipeline.run.on_ray import connect
    from rayembed_papers.backbone.on_ray import run_trials

    by_name = {trials[0].finetuning.name: trials for trials in groups if trials}
    for _ in range(_MOST_ROUNDS):
        left = [
            trial
            for trials in by_name.values()
            for trial in missing(trials, find_results(trials))
            if trial.key not in scores.failed
        ]
        if not left:
            return
        total = sum(map(len, by_name.values()))
        logger.info(
            "starting trials of %s: %d of %d are not done yet", ", ".join(by_name), len(left), total
        )
        connect()
        scores.failed |= run_trials(left, scores.run.placement, partial(_when_done, by_name))


def _when_done(
    groups: Mapping[str, Sequence[Trial]], trial: Trial, error: RayembedError | None
) -> None:
    """Log the end of a trial, and remove models from which no later trial starts."""
    if error is not None:
        logger.warning("%s failed: %s", trial.key, error)
        return
    try:
        (result,) = find_results([trial])
        if result.diverged:
            logger.warning(
                "the trial %s diverged (its loss or outputs are not finite), so it has no result",
                trial.key,
            )
            return
        first = task_named(trial.finetuning.scored[0].task)
        logger.info("%s  %s %s %.4f", trial.key, first.name, first.metric, result.score(first))
        keep_best_model(groups[trial.finetuning.name])
    except ArtifactError as problem:  # storage may answer later; nothing is lost
        logger.warning("%s", problem)


def _take(
    one: Finetuning, trials: Sequence[Trial], scores: BackboneScores, best: dict[str, Trial]
) -> None:
    """Summarise a finetuning once all its trials are finished, and choose its best model as the
    start of others.
    """
    results = find_results(trials)
    if not trials or missing(trials, results):
        return
    ended = converged(results)
    if diverged := len(results) - len(ended):
        shown = f"{diverged} of {len(results)} trials of {one.name} diverged"
        if not ended:
            scores.failed[one.name] = DivergenceError(
                f"{shown}, with a loss or outputs that are not finite: nothing is left to score. "
                f"Lower protocol.learning_rates={list(one.protocol.learning_rates)}, raise "
                f"protocol.warmup_share={one.protocol.warmup_share:g}, or clip gradients by "
                f"protocol.max_grad_norm={one.protocol.max_grad_norm:g} (0: not)"
            )
            return
        logger.warning("%s; these trials have no score and are left out of the medians", shown)
    if trials[0].keeps_model:
        best[one.name] = best_result(results).trial
    for name in one.tasks:
        scores.summaries[name] = summarize(task_named(name), results)
