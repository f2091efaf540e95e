"""A stage over made-up records on one worker under DeepSpeed, from its start or a checkpoint."""

import shutil
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from made_up_records import made_up_records
from made_up_teachers import TEACHERS
from told import Told, in_turn

from rayembed.config.placement import Placement
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.models.contract import load_trainable_state
from rayembed.models.loading.build import build_model
from rayembed.training.checkpoints.checkpoint import Checkpoint, expected_position, seed_worker
from rayembed.training.contrastive.step import EmbeddingObjective
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings
from rayembed.training.trainer import Callback, StageTrainer

PLAN = SimpleNamespace(fingerprint="plan", teachers=())


class MadeUp(EmbeddingObjective):
    """Contrastive over the records of seed s in step s, of which each worker takes an equal share.

    Args:
        run_step: in place of the objective's own.
    """

    def __init__(self, run_step=None):
        if run_step is not None:
            self.run_step = run_step

    def batches(self, plan, model, stage, seed):
        return partial(made_up_batch, model, stage)

    def source(self, plan, step):
        return str(step)


def made_up_batch(model, stage, step):
    """This worker's share of the step, over the records of seed `step`."""
    share = stage.batch.global_pairs // dist.get_world_size()
    own = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    records = made_up_records(stage.batch.global_pairs, seed=step)[own]
    teachers = TEACHERS[: len(stage.teachers)]
    return make_step_batch(step, records, stage.batch.num_negatives, model.tokenizer, teachers)


def train_made_up(
    engine,
    model,
    stage,
    settings,
    *,
    start=0,
    run_step=None,
    objective=None,
    callbacks=(),
    **functions,
):
    """Trainable weights on this worker after the stage.

    Args:
        functions: of `Told`.
    """
    trainer = StageTrainer(
        stage,
        Placement(),
        model,
        objective or MadeUp(run_step),
        PLAN,
        seed=0,
        run_fingerprint="run",
        callbacks=[Told(**functions), *callbacks],
        stream=in_turn,
    )
    trainer.train(engine, settings, start)
    return {name: weight.cpu().clone() for name, weight in engine.trainable_weights()}


class KeepFirst(Callback):
    """Keeps the first checkpoint in a folder, if there is one."""

    def __init__(self, folder):
        self.folder = folder

    def on_checkpoint(self, step, folder):
        if self.folder is not None:
            shutil.copytree(folder, self.folder, dirs_exist_ok=True)
            dist.barrier()
            self.folder = None


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
    unpadded="auto",
    objective=None,
):
    """Trainable weights on this worker after all steps, from the start or from a checkpoint.

    Args:
        save: folder of the checkpoint, which is that of the first step at which there is one.
        resume: such a folder.
        objective: makes batches and runs steps; None: contrastive over made-up records.
    """
    model = build_model(config, folders, seed=3)
    checkpoint = None
    if resume is not None:
        checkpoint = Checkpoint(resume, expected_position("s", "run", "plan"))
        load_trainable_state(model, checkpoint.weights())
    model = model.to(device)
    model.unpadded = unpadded
    seed_worker(5, 0)
    world = dist.get_world_size()
    engine = DeepSpeedEngine(model, stage, Placement(zero_stage=zero), "float32", world)
    start = 0
    if checkpoint is not None:
        start = checkpoint.position.step
        if not forget_moments:
            checkpoint.restore(engine)
    # Micro-batches of other sizes on each worker, so that some are fillers.
    settings = StepSettings(60 + 30 * dist.get_rank(), cache, torch.device(device))
    return train_made_up(
        engine,
        model,
        stage,
        settings,
        start=start,
        objective=objective,
        callbacks=[KeepFirst(save)],
    )


def distance(left, right):
    """The largest difference of two sets of weights."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in right)
