"""What one worker does for one stage; what it needs of its surroundings is handed in.

Knows no Ray: `on_ray.py` gives it the stream, the last checkpoint and the places to report to.
"""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import (
    exists,
    is_remote,
    join,
    read_bytes,
    remove_file,
    remove_folder,
    upload_folder,
    write_atomic,
)
from rayembed.config.run import Run
from rayembed.config.stage import StageConfig
from rayembed.data.plan import BatchPlan
from rayembed.data.step_batch import StepBatch
from rayembed.distributed.collectives import rank, world_size
from rayembed.errors import ArtifactError
from rayembed.models.build import build_model
from rayembed.models.contract import EmbeddingModel, Tokenizer
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
    model = load_start(job)
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
        data = safetensors.torch.save(state, metadata=_made_of(job, plan))
        write_atomic(job.weights, data)


def is_done(job: StageJob) -> bool:
    """Whether the stage's weights are in storage, made by this run from this plan.

    Raises:
        ArtifactError: the weights there are of another run or of other data.
    """
    if not exists(job.weights):
        return False
    found = _metadata(read_bytes(job.weights))
    wanted = _made_of(job, BatchPlan.open(job.plan_folder))
    if found != wanted:
        raise ArtifactError(
            f"{job.weights!r} was made of {found}, this run would make it of {wanted}: settings, "
            "data or the stage before have changed since. Give this run another --name, or remove "
            "the stage's folder."
        )
    return True


def _made_of(job: StageJob, plan: BatchPlan) -> dict[str, str]:
    """What a stage's weights depend on: the run, its data, the weights that it began with."""
    start = "" if job.start_weights is None else _digest(job.start_weights)
    return {"run": job.run.fingerprint, "plan": plan.fingerprint, "start": start}


def _digest(path: str) -> str:
    return hashlib.sha256(read_bytes(path)).hexdigest()[:12]


MADE_OF_FILE = "made-of.json"
"""What an exported model was made of; written last, so that a half export has none."""


def export(run: Run, weights: str | None, folder: str) -> None:
    """Leave the model with the weights (None: untrained) in a folder of storage.

    One that is there whole, of the same run, weights and instructions, stays; another is replaced.

    Raises:
        RayembedError: the backbone or the weights cannot be had, or the storage refuses the model.
    """
    prompts = {d.name: d.query_instruction for d in run.data.datasets if d.query_instruction}
    instructions = {**prompts, **run.evaluation.instructions}
    values = {"run": run.fingerprint, "weights": "untrained", "instructions": instructions}
    if weights is not None:
        values["weights"] = _digest(weights)
    made_of = json.dumps(values, indent=1, sort_keys=True).encode()
    note = join(folder, MADE_OF_FILE)
    if exists(note):
        if read_bytes(note) == made_of:
            return
        remove_file(note)  # before the rest: what is removed or replaced in part is not whole
    model = load_weights(run, weights)
    if is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="export-") as scratch:
            model.save(Path(scratch) / "model", instructions=instructions)
            remove_folder(folder)
            upload_folder(Path(scratch) / "model", folder)
    else:
        model.save(Path(folder), instructions=instructions)
    write_atomic(note, made_of)


def _metadata(data: bytes) -> dict[str, str]:
    """What was written beside the tensors of a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return found


def load_start(job: StageJob) -> EmbeddingModel:
    """The model as the stage begins with it: pretrained, and with the weights of the stage before.

    Raises:
        RayembedError: the backbone or the weights cannot be had or do not fit.
    """
    return load_weights(job.run, job.start_weights)


def load_weights(run: Run, weights: str | None) -> EmbeddingModel:
    """The run's model on the CPU with trained weights from storage, or untrained for None.

    Raises:
        RayembedError: the backbone or the weights cannot be had or do not fit.
    """
    model = build_model(run.model, resolve_model(run.model.backbone.path), seed=run.seed)
    if weights is not None:
        load_trainable_state(model, safetensors.torch.load(read_bytes(weights)))
    return model
