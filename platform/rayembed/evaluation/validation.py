"""Score a model during training, on small tasks."""

import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import mteb
import torch

from rayembed.config.document import fingerprint
from rayembed.config.evaluation import Prompts
from rayembed.config.run import Run
from rayembed.config.run_evaluation import BeirValidation, HeldOutValidation, MtebValidation
from rayembed.config.settings import nearest
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation.jobs import TaskFactory, load_data
from rayembed.evaluation.loaded_spec import loaded_spec, scores_of
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.prompts import ModelPrompts
from rayembed.evaluation.rayembed_spec import lengths_read
from rayembed.evaluation.run_scores import run_prompts
from rayembed.machine.hardware import wide_enough
from rayembed.models.contract import EmbeddingModel
from rayembed.models.loading.backbones import torch_dtype

logger = logging.getLogger(__name__)

ALLOWED_BENCHMARKS = ("NanoBEIR", "NanoBEIR-multilingual")
"""Benchmarks of mteb whose tasks may choose weights: no other is small, and others are reported."""


MAX_SIZE = 200_000
"""More would make every score of a training run as long as an evaluation of its own."""


def validation_factories(run: Run) -> list[TaskFactory]:
    """Picklable factories of the run's validation tasks, to be loaded by the scoring
    process.

    Raises:
        ConfigError: an unknown task, a task that models are compared by, or no source.
        DataError: the user's files are not in order, or are no small set.
    """
    assert run.evaluation.validation is not None, "the run has no validation"
    data = run.evaluation.validation.data
    if isinstance(data, MtebValidation):
        _check_small(data.tasks)
    factories = task_factories(run.validation_scores)
    for factory in factories:
        if isinstance(factory, OwnTask):
            _check_size(factory, held_out=isinstance(data, HeldOutValidation))
    return factories


def validation_tasks(run: Run) -> list[Any]:
    """Load fresh mteb tasks for the run's validation. Data of the hub are not loaded yet.

    Raises:
        ConfigError, DataError: as `validation_factories`.
    """
    return [factory.load() for factory in validation_factories(run)]


def check_validation(run: Run) -> None:
    """Check that the validation tasks exist, and download their data.

    Raises:
        ConfigError, DataError: as `validation_tasks`.
        AssetError: the hub does not give a task's data.
    """
    for task in validation_tasks(run):
        load_data(task)


def data_revision(tasks: Sequence[Any]) -> str:
    """Fingerprint of the validation tasks' names and data, twelve hexadecimal digits."""
    return fingerprint({task.metadata.name: task.metadata.dataset["revision"] for task in tasks})


def validate(model: EmbeddingModel, run: Run) -> dict[str, float]:
    """Score a model on the run's validation tasks; return scores by task name and store nothing on
    disk.

    As in the scores after training: lengths, the documents of each task's corpus that a contextual
    model has as context, and float32 where bfloat16 is emulated. The model stays in that type.

    Raises:
        RayembedError: a task cannot be scored.
    """
    meta = model_meta(
        f"{run.name}-validation",
        "in-training",
        n_parameters=sum(parameter.numel() for parameter in model.parameters()),
        embed_dim=model.dimensions[0],
        similarity_fn_name="cosine",
    )
    first = next(model.parameters())
    device = str(first.device)
    if first.dtype == torch.bfloat16:
        model.to(torch_dtype(wide_enough("bfloat16", device)))
    spec = loaded_spec(model, meta, validation_prompts(run), lengths_read(run.model))
    with tempfile.TemporaryDirectory(prefix="validation-") as results:
        return scores_of(spec, validation_factories(run), results, device)


def validation_prompts(run: Run) -> ModelPrompts:
    """Prompts for the run's validation, the same as for scores after training."""
    given: dict[str, str] = {}
    assert run.evaluation.validation is not None, "the run has no validation"
    match run.evaluation.validation.data:
        case MtebValidation(instructions=instructions):
            given = instructions
        case BeirValidation(name=name, instruction=instruction) if instruction:
            given = {name: instruction}
    return run_prompts(run, Prompts(instructions=given))


def deciding_score(scores: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Weighted mean of the validation scores, which selects the best step; the default
    weight is 1.

    Summed exactly and rounded once, so that it does not depend on the order of the tasks.
    """
    shares = {task: weights.get(task, 1.0) for task in scores}
    total = math.fsum(shares[task] * score for task, score in scores.items())
    return total / math.fsum(shares.values())


def _check_size(own: OwnTask, *, held_out: bool) -> None:
    size, counted = own.size
    if size > MAX_SIZE:
        remedy = (
            "hold fewer out (data.datasets.NAME.held_out), or set evaluation.validation=null"
            if held_out
            else "take a sample of the corpus with all relevant documents"
        )
        what = own.settings.name if held_out else f"the set at {own.settings.path!r}"
        raise DataError(
            f"{what} has {size:,} {counted}, more than {MAX_SIZE:,}: validation needs a small set "
            f"that is scored in a minute; {remedy}"
        )


def _check_small(names: Sequence[str]) -> None:
    allowed = {
        task.metadata.name
        for benchmark in ALLOWED_BENCHMARKS
        for task in mteb.get_benchmark(benchmark).tasks
    }
    for name in names:
        if name not in allowed:
            raise ConfigError(
                f"evaluation.validation.data.tasks: {name!r} is not a task of "
                f"{ALLOWED_BENCHMARKS[0]}; tasks that compare models after training must not "
                f"select weights during it; {nearest(name, allowed)} For your own queries set "
                "evaluation.validation.data.kind=beir"
            )
