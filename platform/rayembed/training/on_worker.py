"""Training on one worker, from a model and a plan to trained weights, for any objective.

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

from rayembed.config.placement import Placement
from rayembed.config.train_loop import TrainLoopConfig
from rayembed.distributed.collectives import rank, world_size
from rayembed.hardware import micro_batch_tokens, pass_cost_tokens
from rayembed.models.contract import TrainableModel, load_trainable_state
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
from rayembed.training.step import StepSettings
from rayembed.training.stop_notice import StopNotice
from rayembed.training.validation.submission import WorkerValidation

logger = logging.getLogger(__name__)

MakeBatch = Callable[[int], Any]
"""Builds this worker's batch of a step; picklable."""


@dataclass(frozen=True)
class TrainerHooks:
    """Callbacks and inputs that the launcher gives to a training worker."""

    stream: Callable[[MakeBatch, int, int], Generator[Any]]
    """Generator of the batches from the first step to the second (exclusive), in order; closed when
    training ends, also by an error."""
    checkpoint: Path | None
    """Last checkpoint on local disk."""
    report_checkpoint: Callable[[Path, int, float], None]
    """Reports this worker's part of a checkpoint, with the steps and the mean loss since the last.
    """
    report_step: Callable[[StepRecord], None]
    """Receives the metrics of a step; called on worker 0 only."""
    from_other_run: bool = False
    """Whether the checkpoint is `Job.start_checkpoint`."""
    should_stop: Callable[[], bool] = lambda: False
    """Whether this worker knows that training must end; all workers call it together."""


class Job(Protocol):
    """Training job, as passed to every worker."""

    @property
    def weights(self) -> str:
        """Storage path of the trained weights; their presence marks the job as done."""
        ...

    @property
    def loop_config(self) -> TrainLoopConfig:
        """Steps and optimiser of the job."""
        ...

    @property
    def placement(self) -> Placement:
        """Workers and hardware of the job."""
        ...

    @property
    def pretrained(self) -> tuple[str, ...]:
        """References of the pretrained models."""
        ...

    @property
    def start_checkpoint(self) -> str | None:
        """Storage folder of another run's checkpoint to start from, if any."""
        ...

    def is_done(self) -> bool:
        """Whether the weights are in storage, made from the same inputs.

        Raises:
            ArtifactError: those there were made of something else.
        """
        ...

    def train(self, hooks: TrainerHooks) -> None:
        """Train on this worker and write the weights to storage."""
        ...


@dataclass(frozen=True)
class Training:
    """A training that one worker can start or resume."""

    loop_config: TrainLoopConfig
    placement: Placement
    seed: int
    number: int
    """Number within the run; dropout is drawn differently for each."""
    dtype: str
    run_fingerprint: str
    plan_fingerprint: str
    load: Callable[[], TrainableModel]
    """Loads the initial model on the CPU."""
    batches: Callable[[Any], MakeBatch]
    """Maps the model to its batch builder."""
    run_step: RunStep
    of_step: Callable[[int], str]
    """Describes the source of the batch of a step, from 0."""
    trace: str = ""
    """Option of the job that shows the rows of `STAGE:STEP`; empty: the job has none."""
    validation: WorkerValidation | None = None


def train_on_worker(training: Training, hooks: TrainerHooks) -> DeepSpeedEngine:
    """Train from the beginning or the last checkpoint; the engine after the last step.

    Raises:
        RayembedError: an asset, plan or checkpoint cannot be used.
    """
    loop_config, placement = training.loop_config, training.placement
    device = torch.device("cuda") if placement.use_gpu else torch.device("cpu")
    position = expected_position(
        loop_config.name, training.run_fingerprint, training.plan_fingerprint
    )
    last = hooks.checkpoint
    checkpoint = (
        None if last is None else Checkpoint(last, position, from_other_run=hooks.from_other_run)
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
        pass_cost_tokens=placement.pass_cost_tokens or pass_cost_tokens(device.type, model),
        seed=training.seed,
    )
    engine = DeepSpeedEngine(model, loop_config, placement, training.dtype, world_size())
    start = dropped_before = 0
    if checkpoint is not None:
        checkpoint.restore(engine)
        start, dropped_before = checkpoint.position.step, checkpoint.position.dropped_steps
        logger.info("stage %s goes on after step %d", loop_config.name, start)
    notice = StopNotice(hooks.should_stop, device)
    dropped = DroppedSteps(
        loop_config,
        placement.end_after_dropped_steps,
        training.of_step,
        count=dropped_before,
        saved=start,
        tells=rank() == 0,
        trace=training.trace,
    )
    losses: list[float] = []

    def on_step(record: StepRecord) -> None:
        losses.append(record["loss"])
        if rank() == 0:
            hooks.report_step(record)

    def on_checkpoint(step: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        try:
            save_checkpoint(folder, engine, position.at(step, dropped.count))
            hooks.report_checkpoint(folder, step, mean_of_finite(losses))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        losses.clear()

    validation = training.validation
    ended = validation is not None and validation.has_ended(start)
    if start < loop_config.steps and not ended:
        with closing(hooks.stream(training.batches(model), start, loop_config.steps)) as batches:
            train_steps(
                engine,
                batches,
                loop_config,
                settings,
                start_step=start,
                dropped=dropped,
                on_step=on_step,
                on_checkpoint=on_checkpoint,
                ends_after=lambda step: validation is not None and validation.after(step, engine),
                saves_now=notice.arrived,
                run_step=training.run_step,
            )
    return engine
