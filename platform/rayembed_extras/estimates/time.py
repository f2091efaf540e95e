"""Estimate the time that a run takes on CPUs like this one.

Products make up most of a run on a CPU, so its floating-point operations are counted and divided by
the speed of a product that is timed here. What is not a product (attention, norms, the optimiser,
reading) stands in a measured share of that speed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from rayembed.config.backbone import Dtype
from rayembed.config.data import DatasetConfig
from rayembed.config.document import NamedRun
from rayembed.config.mining import Teacher
from rayembed.config.named_benchmarks import tokens_of_sets
from rayembed.config.run import Run
from rayembed.config.run_evaluation import HeldOutValidation, OwnSetsValidation
from rayembed.config.stage import StageConfig
from rayembed.config.table import NamedTable
from rayembed.errors import ArtifactError, ConfigError
from rayembed.machine.cores import num_cores
from rayembed.machine.device import placed_here
from rayembed.machine.hardware import Precision, product_speed
from rayembed.pipeline.run.dry_run import step_load
from rayembed.registry.provenance import cpu_summary
from rayembed_extras.estimates.requirements import expected_precision, flops_per_token

_TRAINING: dict[Dtype, float] = {"float32": 0.45, "bfloat16": 0.35}
"""Share of a product's speed that training reaches (benchmarks/log)."""

_ENCODING: dict[Dtype, float] = {"float32": 0.8, "bfloat16": 0.6}
"""Share of a product's speed that encoding by scored models and teachers reaches, without backward
pass."""

FILLED = 0.8
"""Tokens of a text, as a share of its maximum length."""

_ROWS = 3000
"""Assumed rows of a mined data set if the run does not set a number."""

_HELD_OUT = 0.1
"""Assumed share of held-out rows if the run does not set one."""

_MINILM = 2 * 10.6e6
"""Assumed operations a token of teachers and baselines whose size is not known here."""

_OF_GPU = 140e12
"""Operations a second of one H200 with BERT base in bfloat16 (benchmarks/gpu/README.md)."""

_START_SECONDS = 60.0
"""Assumed seconds to start Ray and to read data and the registry."""

_STAGE_SECONDS = 25.0
"""Assumed seconds to start the workers of a stage."""


@dataclass(frozen=True)
class Estimate:
    """Estimated duration of a run, and the machine that the estimate is for."""

    machine: str
    seconds: float
    data_seconds: float = 0.0
    """Part of `seconds` for teachers' vectors, shared by runs on the same data."""

    def __str__(self) -> str:
        return f"{self.machine}: about {max(round(self.seconds / 60), 1)} min from its start"


def estimate(run: NamedRun) -> Estimate | None:
    """Estimate a run's time on workers with this machine's CPU; None if it uses GPUs or cannot be
    estimated.

    Preparation of data that is there already, and stages that are done, are counted all the same;
    of an adaptation its preparation is not, as the size of its corpus is not known.
    """
    work = None if _on_gpu(run) else _work(run)
    if work is None:
        return None
    precision, speed, encoding = _speeds(run)
    data_seconds = _of_teachers([run]) / encoding if isinstance(run, Run) else 0.0
    seconds = work.training / (speed * _TRAINING[precision.dtype]) + work.scores / encoding
    seconds += data_seconds + _START_SECONDS + _STAGE_SECONDS * work.stages
    machine = f"{cpu_summary()}, {speed / 1e9:.0f} GFLOP/s in {precision}"
    return Estimate(machine, seconds, data_seconds)


def estimate_trials(
    trials: Sequence[NamedRun], prepared: Sequence[NamedRun], best: NamedRun
) -> Estimate | None:
    """Estimate the time of all trials of a sweep, which share the cores if they run concurrently;
    None if unknown.

    Args:
        prepared: one run for each different data.
        best: as the best trial's run is scored in the end, with its baselines.
    """
    found = [estimate(run) for run in trials]
    known = [one for one in found if one]
    work = _work(best)
    if not known or len(known) < len(found) or work is None:
        return None
    seconds = sum(one.seconds - one.data_seconds for one in known)
    *_, encoding = _speeds(best)
    data_seconds = _of_teachers([run for run in prepared if isinstance(run, Run)]) / encoding
    if isinstance(best, Run):  # an adaptation has been scored as a trial
        seconds += work.scores / encoding
    return Estimate(known[0].machine, seconds + data_seconds, data_seconds)


def gpu_hours(runs: Sequence[NamedRun]) -> str | None:
    """Format the GPU-hours that the training of runs takes; None if they use CPUs or cannot be
    estimated.

    Counted, and taken at the speed of the one training that a GPU has timed.
    """
    operations = 0.0
    for run in runs:
        work = _work(run) if _on_gpu(run) else None
        if work is None:
            return None
        operations += work.training
    hours = operations / _OF_GPU / 3600
    return (
        f"training takes {operations:.1e} floating-point operations, about {hours:.2g} GPU-hours "
        f"at the {_OF_GPU / 1e12:.0f} TFLOP/s at which an H200 trained BERT base; larger models "
        "reach more, and data, scores and starts come on top"
    )


def on_gpu_seconds(run: NamedRun) -> float | None:
    """Estimate a run's seconds on one GPU from its operations and a measured speed; None if it uses
    CPUs or its operations are unknown.
    """
    work = _work(run) if _on_gpu(run) else None
    if work is None:
        return None
    fixed = _START_SECONDS + _STAGE_SECONDS * work.stages
    return (work.training + work.scores) / _OF_GPU + fixed


@dataclass(frozen=True)
class Work:
    """Floating-point operations of a run's training and scoring, and its number of stages."""

    training: float
    scores: float
    stages: int


@dataclass(frozen=True)
class CountedKind:
    """Estimate functions for a kind of run that an optional package provides."""

    run: type[NamedRun]
    needs: Callable[[Any], dict[str, str]]
    """Rows of a dry run's table."""
    work: Callable[[Any], Work | None]
    """Operations of a run of this kind; None: not known."""


KINDS = NamedTable("rayembed.counted_runs", CountedKind, "kind of run", {})


def counted_kind(run: NamedRun) -> CountedKind | None:
    """Find the estimate functions for a run of an optional package; None if no package provides
    them.
    """
    return next((kind for kind in KINDS.members().values() if isinstance(run, kind.run)), None)


def _on_gpu(run: NamedRun) -> bool:
    """Whether the run's workers use GPUs; for `auto`, whether this kind of machine has them."""
    return placed_here(run.placement).on_gpu


def _work(run: NamedRun) -> Work | None:
    """Count the operations of a run; None if only the hub has the config.json of a part of its
    model.
    """
    try:
        return work_of(run)
    except (ArtifactError, ConfigError):  # the check of the run reports it with its remedy
        return None


def work_of(run: NamedRun) -> Work | None:
    """Count the operations of a run of any kind; None if they cannot be counted."""
    if not isinstance(run, Run):
        kind = counted_kind(run)
        return None if kind is None else kind.work(run)
    a_token = flops_per_token(run.model)
    if a_token is None:
        return None
    training = sum(stage.steps * _of_step(run, stage, a_token) for stage in run.stages)
    return Work(training, _of_scores(run, a_token), len(run.stages))


def _speeds(run: NamedRun) -> tuple[Precision, float, float]:
    """Number type of a run, and this machine's operations per second in matrix multiplication and
    in encoding.
    """
    precision = expected_precision(run)
    speed = num_cores() * product_speed(precision.dtype)
    return precision, speed, speed * _ENCODING[precision.dtype]


def _of_step(run: Run, stage: StageConfig, a_token: float) -> float:
    passes = 2.0 if "backbone" in run.model.adapters else 3.0
    forward = 2.0 if run.placement.grad_cache is True else 1.0
    passes += forward - 1
    if stage.hidden_states is not None:  # its teacher, taken to be of the model's size
        passes += forward
    return passes * FILLED * step_load(run, stage).tokens * a_token


def _of_scores(run: Run, a_token: float) -> float:
    settings = run.evaluation
    tokens = FILLED * (tokens_of_sets(settings.own_sets) + _of_held_out(run))
    own = len(run.stages) + settings.before_training + settings.num_mixtures
    encoders = sum(reference != "bm25" for reference in settings.baselines)
    validation = FILLED * _of_validation(run)
    return tokens * (own * a_token + encoders * _MINILM) + validation * a_token


def _of_validation(run: Run) -> float:
    """Largest number of tokens that validation reads during training; 0 for tasks of mteb and BEIR,
    whose sizes are not known here.
    """
    validation = run.evaluation.validation
    if validation is None:
        return 0.0
    times = sum(math.ceil(stage.steps / run.validation_interval(stage)) for stage in run.stages)
    match validation.data:
        case HeldOutValidation():
            return times * _of_held_out(run)
        case OwnSetsValidation(sets=sets):
            return times * tokens_of_sets(sets)
    return 0.0


def _of_held_out(run: Run) -> float:
    """Largest number of tokens in the queries and documents of held-out rows."""
    each = run.model.max_lengths["query"] + run.model.max_lengths["document"]
    parts = ((dataset.held_out, dataset.num_samples or _ROWS) for dataset in run.held_out_datasets)
    return sum(
        each * min(held_out.max_queries, rows * (getattr(held_out, "share", None) or _HELD_OUT))
        for held_out, rows in parts
        if held_out is not None
    )


def _of_teachers(runs: Sequence[Run]) -> float:
    """Count the teachers' operations in data preparation; a teacher embeds the texts of a data set
    once for all runs.
    """
    once: dict[tuple[str, str, str], float] = {}
    for run in runs:
        datasets = {dataset.name: dataset for dataset in run.data.datasets}
        of_steps = [
            (name, step)
            for name, dataset in datasets.items()
            for step in dataset.steps
            if isinstance(step, Teacher)
        ]
        of_stages = [
            both for stage in run.stages for both in product(stage.datasets, stage.teachers)
        ]
        for name, teacher in (*of_steps, *of_stages):
            texts = str(datasets[name].source.paths)
            once.setdefault((name, texts, teacher.teacher), _embedded(datasets[name], teacher))
    return sum(once.values()) * _MINILM


def _embedded(dataset: DatasetConfig, teacher: Teacher) -> float:
    """Estimate the tokens that a teacher reads in a data set's queries and positives."""
    return 2 * (dataset.num_samples or _ROWS) * min(teacher.max_length, 64) * FILLED
