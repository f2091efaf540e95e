"""What a worker does from a model and a plan to trained weights, whatever is learnt.

Knows no Ray: `train_function/on_ray.py` gives it the stream, the last checkpoint and the places to
report to.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from rayembed.config.course import Course
from rayembed.config.placement import Placement
from rayembed.distributed.collectives import rank, world_size
from rayembed.hardware import micro_batch_tokens, pass_cost_tokens
from rayembed.models.contract import TrainableModel
from rayembed.models.trainable import load_trainable_state
from rayembed.training.checkpoint import (
    Checkpoint,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.dropped import DroppedSteps, mean_of_finite
from rayembed.training.engine import DeepSpeedEngine, expert_group
from rayembed.training.expert_parallel import spread_experts
from rayembed.training.loop import RunStep, StepRecord, train_steps
from rayembed.training.notice import Notice
from rayembed.training.step import StepSettings
from rayembed.training.validation.handing_in import WorkerValidation

logger = logging.getLogger(__name__)

Make = Callable[[int], Any]
"""Makes this worker's batch of a step; picklable."""


@dataclass(frozen=True)
class Surroundings:
    """What a worker gets from whoever runs it."""

    stream: Callable[[Make, int, int], Generator[Any]]
    """Batches that are made for the steps from the first number up to the second, in order; closed
    when training ends, also by an error."""
    checkpoint: Path | None
    """The last checkpoint, on local disk."""
    report_checkpoint: Callable[[Path, int, float], None]
    """Hands over this worker's part of a checkpoint, after (steps, mean loss since the last)."""
    report_step: Callable[[StepRecord], None]
    """Takes the metrics of a step; called on worker 0 only."""
    of_other_run: bool = False
    """Whether the checkpoint is `Job.start_checkpoint`."""
    leaving: Callable[[], bool] = lambda: False
    """Whether this worker knows that training is to be ended; all of them ask together."""


class Job(Protocol):
    """What workers are started for, as every one of them gets it."""

    @property
    def weights(self) -> str:
        """Where in storage the trained weights go; there they mean that the job is done."""
        ...

    @property
    def course(self) -> Course:
        """Its steps."""
        ...

    @property
    def placement(self) -> Placement:
        """Where it runs."""
        ...

    @property
    def pretrained(self) -> tuple[str, ...]:
        """References of the models that it starts from."""
        ...

    @property
    def start_checkpoint(self) -> str | None:
        """Folder in storage of a checkpoint of another run to begin with; None: there is none."""
        ...

    def is_done(self) -> bool:
        """Whether the weights are in storage, made of the same.

        Raises:
            ArtifactError: those there were made of something else.
        """
        ...

    def train(self, surroundings: Surroundings) -> None:
        """Train on this worker and leave the weights in storage."""
        ...


@dataclass(frozen=True)
class Training:
    """A training that one worker can begin or go on with."""

    course: Course
    placement: Placement
    seed: int
    number: int
    """Of the course in its run: dropout is drawn differently in each."""
    dtype: str
    run_fingerprint: str
    plan_fingerprint: str
    load: Callable[[], TrainableModel]
    """The model that the course starts with, on the CPU."""
    batches: Callable[[Any], Make]
    """What makes the batches of the model."""
    run_step: RunStep
    of_step: Callable[[int], str]
    """What the batch of a step, from 0, was drawn from, in words."""
    validation: WorkerValidation | None = None


def train_on_worker(training: Training, surroundings: Surroundings) -> DeepSpeedEngine:
    """The engine after the last step, from the beginning or from the last checkpoint.

    Raises:
        RayembedError: an asset, plan or checkpoint cannot be used.
    """
    course, placement = training.course, training.placement
    device = torch.device("cuda") if placement.use_gpu else torch.device("cpu")
    position = expected_position(course.name, training.run_fingerprint, training.plan_fingerprint)
    last = surroundings.checkpoint
    checkpoint = (
        None if last is None else Checkpoint(last, position, of_other_run=surroundings.of_other_run)
    )
    model = training.load()
    if checkpoint is not None:
        load_trainable_state(model, checkpoint.weights())
    if placement.expert_parallel > 1:  # before they take room on a device
        spread_experts(model, expert_group(placement.expert_parallel))
    model = model.to(device)
    if placement.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    seed_worker(training.seed, training.number)
    settings = StepSettings(
        micro_batch_tokens=placement.micro_batch_tokens or micro_batch_tokens(device.type),
        grad_cache=placement.grad_cache,
        device=device,
        pass_cost_tokens=placement.pass_cost_tokens or pass_cost_tokens(device.type),
        seed=training.seed,
    )
    engine = DeepSpeedEngine(model, course, placement, training.dtype, world_size())
    start = dropped_before = 0
    if checkpoint is not None:
        checkpoint.restore(engine)
        start, dropped_before = checkpoint.position.step, checkpoint.position.dropped_steps
        logger.info("stage %s goes on after step %d", course.name, start)
    notice = Notice(surroundings.leaving, device)
    dropped = DroppedSteps(
        course,
        placement.end_after_dropped_steps,
        training.of_step,
        count=dropped_before,
        saved=start,
        tells=rank() == 0,
    )
    losses: list[float] = []

    def on_step(record: StepRecord) -> None:
        losses.append(record["loss"])
        if rank() == 0:
            surroundings.report_step(record)

    def on_checkpoint(step: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        try:
            save_checkpoint(folder, engine, position.at(step, dropped.count))
            surroundings.report_checkpoint(folder, step, mean_of_finite(losses))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        losses.clear()

    validation = training.validation
    ended = validation is not None and validation.has_ended(start)
    if start < course.steps and not ended:
        with closing(surroundings.stream(training.batches(model), start, course.steps)) as batches:
            train_steps(
                engine,
                batches,
                course,
                settings,
                start_step=start,
                dropped=dropped,
                on_step=on_step,
                on_checkpoint=on_checkpoint,
                ends_after=lambda step: validation is not None and validation.after(step, engine),
                saves_now=notice.came,
                run_step=training.run_step,
            )
    return engine
