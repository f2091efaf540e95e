"""Detect settings that differ from their defaults but have no effect on a run.

What contradicts itself is refused where it stands. These are told instead: recipes, placements and
sweeps carry them from run to run, and what switches them off is often tried.
"""

from collections.abc import Iterator

from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.settings import changed
from rayembed.config.stage_data import with_taken_clusters

_OF_VALIDATION = ("validation_cpus", "validation_gpus", "validations_at_once", "validation_minutes")


def idle_settings(run: Run) -> list[str]:
    """One line for each setting of the run that has no effect, with the reason."""
    return [*_of_stages(run), *_of_scores(run), *_of_placement(run)]


def without_idle_clusters(run: Run) -> Run:
    """Copy the run without clusters that no stage uses.

    A teacher would embed all texts for them. A sweep's run keeps them, for the trials that do.
    """
    datasets = tuple(with_taken_clusters(dataset, run.stages) for dataset in run.data.datasets)
    if datasets == run.data.datasets:
        return run
    return changed(run, data=changed(run.data, datasets=datasets))


def idle_clusters(run: Run) -> list[str]:
    """One line for each data set whose clusters `without_idle_clusters` removes."""
    lines = []
    for dataset in run.data.datasets:
        if with_taken_clusters(dataset, run.stages) != dataset:
            policies = ", ".join(
                f"stages.{stage.name}.batch.policy={stage.batch.policy}"
                for stage in run.stages
                if dataset.name in stage.datasets
            )
            lines.append(
                f"data.datasets.{dataset.name}.clusters are not made: no stage takes them "
                f"({policies}); batch.policy=clustered does"
            )
    return lines


def _of_stages(run: Run) -> Iterator[str]:
    for stage in run.stages:
        optimizer, at = stage.optimizer, f"stages.{stage.name}"
        if optimizer.warmup_steps and optimizer.warmup_share:
            yield (
                f"{at}.optimizer.warmup_share={optimizer.warmup_share} has no effect with "
                f"warmup_steps={optimizer.warmup_steps}, which overrides it"
            )
        if stage.batch.in_batch_negatives and not stage.loss.reads_in_batch:
            yield (
                f"{at}.batch.in_batch_negatives=true has no effect: the loss {stage.loss.kind!r} "
                "reads a query's own documents alone where infonce_weight is 0"
            )


def _of_scores(run: Run) -> Iterator[str]:
    if run.evaluation.baselines and not run.takes_scores:
        named = ", ".join(run.evaluation.baselines)
        yield (
            f"evaluation.baselines=[{named}] are not scored: the run takes no scores, for it names "
            "no tasks (evaluation.benchmarks, tasks, own_sets) and holds nothing out"
        )


def _of_placement(run: Run) -> Iterator[str]:
    placement = run.placement
    unread = _OF_VALIDATION if run.evaluation.validation is None else ()
    why = dict.fromkeys(unread, "evaluation.validation is null")
    if not placement.is_elastic:
        why["resize_interval_seconds"] = "the number of workers is fixed (min_workers)"
    for name, reason in why.items():
        value = getattr(placement, name)
        if value != Placement.model_fields[name].default:
            yield f"placement.{name}={value} has no effect: {reason}"
