"""What one worker does for one stage; what it needs of its surroundings is handed in.

Knows no Ray: `on_ray.py` gives it the stream, the last checkpoint and the places to report to.
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from rayembed.assets.storage import exists
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.step_batch import StepBatch
from rayembed.distributed.collectives import rank, world_size
from rayembed.errors import ArtifactError
from rayembed.models.contract import Tokenizer
from rayembed.models.trainable import load_trainable_state
from rayembed.training.checkpoint import (
    Checkpoint,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.loop import StepRecord, train_steps
from rayembed.training.step import StepSettings
from rayembed.training.weights import load_weights, read_made_of, weights_content, write_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StageJob:
    """One stage of a run, as every worker gets it."""

    run: Run
    stage_index: int
    plan_folder: str
    start_weights: str | None
    """Trainable weights of the stage before, in storage; None: freshly initialised."""
    weights: str
    """Where in storage the trained weights go; there they mean that the stage is done."""

    @property
    def stage(self) -> StageConfig:
        """The stage's settings."""
        return self.run.stages[self.stage_index]


@dataclass(frozen=True)
class Surroundings:
    """What a worker gets from whoever runs it."""

    stream: Callable[[Tokenizer, int, int, int], Iterable[StepBatch]]
    """Step batches of (tokenizer, worker, workers, first step)."""
    checkpoint: Path | None
    """The last checkpoint of this stage, on local disk."""
    report_checkpoint: Callable[[Path, int, float], None]
    """Hands over this worker's part of a checkpoint, after (steps, mean loss since the last)."""
    report_step: Callable[[StepRecord], None]
    """Takes the metrics of a step; called on worker 0 only."""


def train_stage(job: StageJob, surroundings: Surroundings) -> None:
    """Train the stage on this worker and leave its weights in storage.

    Raises:
        RayembedError: an asset, plan or checkpoint cannot be used.
    """
    run, stage, placement = job.run, job.stage, job.run.placement
    device = torch.device("cuda") if placement.use_gpu else torch.device("cpu")
    plan = BatchPlan.open(job.plan_folder)
    position = expected_position(stage.name, run.fingerprint, plan.fingerprint)
    last = surroundings.checkpoint
    checkpoint = None if last is None else Checkpoint(last, position)
    model = load_weights(run, job.start_weights)
    if checkpoint is not None:
        load_trainable_state(model, checkpoint.weights())
    model = model.to(device)
    if placement.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    seed_worker(run.seed, job.stage_index)
    engine = DeepSpeedEngine(model, stage, placement, run.model.backbone.dtype, world_size())
    start = 0
    if checkpoint is not None:
        checkpoint.restore(engine)
        start = checkpoint.position.step
        logger.info("stage %s goes on after step %d", stage.name, start)
    losses: list[float] = []

    def on_step(record: StepRecord) -> None:
        losses.append(record["loss"])
        if rank() == 0:
            surroundings.report_step(record)

    def on_checkpoint(step: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix="checkpoint-"))
        try:
            save_checkpoint(folder, engine, position.at(step))
            surroundings.report_checkpoint(folder, step, sum(losses) / len(losses))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        losses.clear()

    if start < stage.steps:
        train_steps(
            engine,
            surroundings.stream(model.tokenizer, rank(), world_size(), start),
            stage,
            StepSettings(placement.micro_batch_tokens, placement.grad_cache, device),
            start_step=start,
            on_step=on_step,
            on_checkpoint=on_checkpoint,
        )
    # All workers must go through the weights, one keeps them.
    state = {name: w.cpu().clone() for name, w in engine.trainable_weights() if rank() == 0}
    if rank() == 0:
        write_weights(job.weights, state, _made_of(job, plan))


def is_done(job: StageJob) -> bool:
    """Whether the stage's weights are in storage, made by this run from this plan.

    Raises:
        ArtifactError: the weights there are of another run or of other data.
    """
    if not exists(job.weights):
        return False
    found = read_made_of(job.weights)
    wanted = _made_of(job, BatchPlan.open(job.plan_folder))
    if {name: found.get(name) for name in wanted} != wanted:
        raise ArtifactError(
            f"{job.weights!r} was made of {found}, this run would make it of {wanted}: settings, "
            "data or the stage before have changed since. Give this run another --name, or remove "
            "the stage's folder."
        )
    return True


def _made_of(job: StageJob, plan: BatchPlan) -> dict[str, str]:
    """What a stage's weights depend on: the run, its data, the weights that it began with."""
    start = "" if job.start_weights is None else weights_content(job.start_weights)
    return {"run": job.run.fingerprint, "plan": plan.fingerprint, "start": start}
