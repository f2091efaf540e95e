"""Resolve a requested run into complete settings, and convert lengths in epochs into steps, first
by an estimated and then by the counted number of records.
"""

import logging
from collections.abc import Callable, Mapping

from rayembed.config.data import DatasetConfig
from rayembed.config.idle import without_idle_clusters
from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.config.stage import steps_of
from rayembed.errors import ConfigError, RayembedError

log = logging.getLogger(__name__)

MANY_PASSES = 10
"""Number of passes over the records above which a run warns; 1 to 3 are usual."""

ExpectedRecords = Callable[[DatasetConfig, str], int | None]
"""Function that estimates the training records of a data set, given `data.root`; None: not known.
"""


def expected_records(dataset: DatasetConfig, root: str) -> int | None:
    """Estimate the number of training records of a data set from its files on this machine.

    Returns:
        None where the files lie elsewhere or cannot be read, or where their rows make no records
        by themselves.
    """
    from rayembed.data.sources.check import is_here, look

    if not is_here(dataset, root):
        return None
    try:
        return look(dataset, root).trained_records
    except RayembedError:  # which the checks of the run tell
        return None


def resolve(run: Run, expected: ExpectedRecords = expected_records) -> Run:
    """Complete the settings of a requested run; return an already resolved run unchanged.

    1. Names of benchmarks become own sets.
    2. Stages with `epochs` get an estimate of their steps.
    3. Clusters that no stage takes go.

    What settings and files do not decide follows once the run has its folders: an absolute storage
    path, the number type it was begun with (`pipeline.train`), device, number type and threads
    (`runtime.started`), the steps of its plans and the sets of its held-out parts.

    Raises:
        ConfigError: as `with_named_benchmarks` and `with_expected_steps`.
    """
    run = with_named_benchmarks(run)
    run = with_expected_steps(run, expected)
    return without_idle_clusters(run)


def with_expected_steps(run: Run, expected: ExpectedRecords = expected_records) -> Run:
    """Copy the run with estimated `steps` for each stage that has `epochs`.

    The steps of a stage stay as they are where the records of a data set cannot be estimated.

    Raises:
        ConfigError: warm-up, schedule or validation do not fit the steps.
    """
    return _with_steps(run, estimated_steps(run, expected))


def estimated_steps(run: Run, expected: ExpectedRecords) -> dict[str, int]:
    """Estimate the steps of each stage that has `epochs`; a stage is left out if its records cannot
    be estimated.
    """
    datasets = {dataset.name: dataset for dataset in run.data.datasets}
    known: dict[str, int | None] = {}
    found = {}
    for stage in run.stages:
        if stage.epochs is None:
            continue
        for name in stage.datasets:
            if name not in known:
                known[name] = expected(datasets[name], run.data.root)
        rows = [known[name] for name in stage.datasets]
        if None not in rows:
            total = sum(number or 0 for number in rows)
            found[stage.name] = steps_of(stage.epochs, total, stage.batch.global_pairs)
    return found


def with_planned_steps(run: Run, plans: Mapping[str, str]) -> Run:
    """Copy the run with the number of steps of its finished plans, for stages that have
    `epochs`.

    Args:
        plans: stage → folder of its plan.

    Raises:
        ConfigError: warm-up, schedule or validation do not fit the steps.
        ArtifactError: a plan is missing or broken.
    """
    from rayembed.data.plan.batch_plan import BatchPlan

    counted = {}
    for stage in run.stages:
        if stage.epochs is None:
            continue
        plan = BatchPlan.open(plans[stage.name])
        rows = sum(of["rows"] for of in plan.manifest["datasets"].values())
        counted[stage.name] = plan.num_steps
        log.info(
            "stage %s: %s of %d records in batches of %d records take %d steps",
            *(stage.name, stage.length, rows, plan.global_pairs, plan.num_steps),
        )
    return _with_steps(run, counted)


def many_passes(stage: str, length: str, records: int, passes: float, about: str = "") -> list[str]:
    """Return a warning if a stage trains on its records more than `MANY_PASSES` times, else an
    empty list.

    Args:
        length: of the stage, in words.
        about: put before the numbers of an estimate.
    """
    if passes <= MANY_PASSES:
        return []
    return [
        f"stage {stage}: {length} are {about}{passes:,.0f} passes over {about}{records:,} records; "
        f"1 to 3 are usual, and more than {MANY_PASSES} mostly learn the records by heart: lower "
        f"stages.{stage}.steps, or set stages.{stage}.epochs=1, which counts them"
    ]


def _with_steps(run: Run, steps: Mapping[str, int]) -> Run:
    """Copy the run with the given steps of its stages that have `epochs`, and check that warm-up,
    schedule and validation fit.

    Args:
        steps: of those of these stages of which they are known.
    """
    run = _changed(run, steps)
    of_epochs = [stage for stage in run.stages if stage.epochs is not None]
    try:
        for stage in of_epochs:
            if stage.name in steps:
                stage.check_steps(stage.steps)
        if of_epochs and len(steps) == len(of_epochs):
            run.check_choice()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return run


def _changed(run: Run, steps: Mapping[str, int]) -> Run:
    if all(steps.get(stage.name, stage.steps) == stage.steps for stage in run.stages):
        return run
    stages = tuple(
        parse(type(stage), {**dict(stage), "steps": steps.get(stage.name, stage.steps)})
        for stage in run.stages
    )
    return parse(type(run), {**dict(run), "stages": stages})
