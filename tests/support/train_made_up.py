"""A stage over made-up records on one worker under DeepSpeed, from its start or a checkpoint."""

import torch
import torch.distributed as dist
from made_up_records import made_up_records

from rayembed.config.placement import Placement
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.models.build import build_model
from rayembed.models.contract import load_trainable_state
from rayembed.training.checkpoint import (
    Checkpoint,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.dropped import DroppedSteps
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.loop import train_steps
from rayembed.training.step import StepSettings


def nothing(_):
    return None


def made_up_batch(model, stage, step):
    """This worker's share of the step, over the records of seed `step`."""
    share = stage.batch.global_pairs // dist.get_world_size()
    own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    records = made_up_records(stage.batch.global_pairs, seed=step)[own]
    return make_step_batch(step, records, stage.batch.num_negatives, model.tokenizer)


def train_made_up(
    engine, model, stage, settings, *, start=0, on_step=nothing, on_checkpoint=nothing, **more
):
    """Trainable weights on this worker after the stage, whose step s is over the records of seed s.

    Each worker takes an equal share of them.
    """
    batches = [made_up_batch(model, stage, step) for step in range(start, stage.steps)]
    train_steps(
        engine,
        batches,
        stage,
        settings,
        start_step=start,
        dropped=DroppedSteps(stage, 5, str, count=0, saved=start),
        on_step=on_step,
        on_checkpoint=on_checkpoint,
        **more,
    )
    return {name: weight.cpu().clone() for name, weight in engine.trainable_weights()}


def train_or_resume(
    config,
    folders,
    stage,
    zero,
    *,
    cache=True,
    save=None,
    resume=None,
    forget_moments=False,
    device="cpu",
):
    """Trainable weights on this worker after all steps, from the start or from a checkpoint.

    Args:
        save: folder of the checkpoint, which is that of the first step at which there is one.
        resume: such a folder.
    """
    position = expected_position("s", "run", "plan")
    model = build_model(config, folders, seed=3)
    checkpoint = None if resume is None else Checkpoint(resume, position)
    if checkpoint is not None:
        load_trainable_state(model, checkpoint.weights())
    model = model.to(device)
    seed_worker(5, 0)
    world = dist.get_world_size()
    engine = DeepSpeedEngine(model, stage, Placement(zero_stage=zero), "float32", world)
    start = 0
    if checkpoint is not None:
        start = checkpoint.position.step
        if not forget_moments:
            checkpoint.restore(engine)

    def on_checkpoint(step):
        if save is not None and step == stage.checkpoint_every_steps:
            save.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            save_checkpoint(save, engine, position.at(step))
            dist.barrier()

    # Micro-batches of other sizes on each worker, so that some are fillers.
    settings = StepSettings(60 + 30 * dist.get_rank(), cache, torch.device(device))
    return train_made_up(engine, model, stage, settings, start=start, on_checkpoint=on_checkpoint)


def distance(left, right):
    """The largest difference of two sets of weights."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in right)
