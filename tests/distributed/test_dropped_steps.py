"""A gradient that is no number on one worker: its step is left out on all, whatever partitions."""

import math
from types import SimpleNamespace

import pytest
import torch
from run_distributed import run_distributed
from toy_model import ToyModel
from train_made_up import distance, made_up_batch, train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.errors import DivergenceError
from rayembed.training import engine as engine_module
from rayembed.training.contrastive.step import run_step
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings
from rayembed.training.optimizer import learning_rate_factor

pytestmark = pytest.mark.distributed

STEPS, PAIRS, BROKEN = 5, 8, 2
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.01, "pooling_learning_rate": 0.02, "weight_decay": 0.1},
        "steps": STEPS,
    },
)
KINDS = [
    *((zero, "float32") for zero in (0, 1, 2, 3)),
    *((zero, "bfloat16") for zero in (0, 1, 2, 3)),
]


def engine_of(world, zero, dtype, stage=STAGE):
    model = ToyModel(context=True).to(getattr(torch, dtype))
    return model, DeepSpeedEngine(model, stage, Placement(zero_stage=zero), dtype, world)


def settings(rank):
    return StepSettings(30 + 40 * rank, True, torch.device("cpu"))


def with_nan(rank, world, model, engine):
    """Weights, records and updates of a stage; one step has a NaN gradient on the last worker."""
    now = {"step": 0}

    def broken(grad):
        return grad * math.nan if now["step"] == BROKEN and rank == world - 1 else grad

    model.hidden.weight.register_hook(broken)

    def step(*given):
        now["step"] = given[3].step
        return run_step(*given)

    records = []
    weights = train_made_up(
        engine, model, STAGE, settings(rank), on_step=records.append, run_step=step
    )
    updates = max(float(state["step"]) for _, state in engine.optimizer_state())
    return weights, records, updates


def left_out(rank, model, engine):
    """Weights after the same steps but that one."""
    model.train()
    for number in range(STEPS):
        if number != BROKEN:
            batch = made_up_batch(model, STAGE, number)
            run_step(model, engine.forward, engine.backward, batch, STAGE, settings(rank))
            engine.step(learning_rate_factor(number, STAGE))
    return {name: weight.clone() for name, weight in engine.trainable_weights()}


def unprotected(rank, world):
    """How many weights of ZeRO 0 in fp32 are finite where the update is not left out."""
    model, engine = engine_of(world, 0, "float32")
    engine_module.math = SimpleNamespace(isfinite=lambda _: True)
    try:
        with pytest.raises(DivergenceError):  # the steps after it are dropped
            with_nan(rank, world, model, engine)
    finally:
        engine_module.math = math
    return sum(int(weight.isfinite().sum()) for _, weight in engine.trainable_weights())


def runaway(rank, world, zero, dtype):
    """The message that a learning rate of 1e30 ends with, and the steps with a checkpoint."""
    stage = STAGE.model_copy(
        update={
            "optimizer": STAGE.optimizer.model_copy(update={"learning_rate": 1e30}),
            "checkpoint_every_steps": 1,
        }
    )
    model, engine = engine_of(world, zero, dtype, stage)
    saved = []
    try:
        train_made_up(engine, model, stage, settings(rank), on_checkpoint=saved.append)
    except DivergenceError as error:
        return str(error), saved
    raise AssertionError("it has ended well")


def cases(rank, world):
    found = {
        kind: (
            with_nan(rank, world, *engine_of(world, *kind)),
            left_out(rank, *engine_of(world, *kind)),
        )
        for kind in KINDS
    }
    ends = {kind: runaway(rank, world, *kind) for kind in KINDS}
    return found, unprotected(rank, world), ends


def test_a_step_with_nan_on_one_worker_is_left_out_on_all():
    workers = run_distributed(cases, 2)
    for found, unprotected_finite, ends in workers:
        for kind, ((weights, records, updates), expected) in found.items():
            assert distance(weights, expected) == 0.0, kind
            assert all(weight.isfinite().all() for weight in weights.values()), kind
            assert [r["dropped_steps"] for r in records] == [0, 0, 1, 1, 1], kind
            finite = [math.isfinite(r["grad_norm"]) for r in records]
            assert finite == [True, True, False, True, True], kind
            assert all(math.isfinite(r["loss"]) for r in records), kind
            assert updates == STEPS - 1, kind
        assert unprotected_finite == 0, "the control"
        for text, saved in ends.values():
            assert "stage 's': the steps 2 to 5 were dropped" in text
            assert "learning rate" in text
            assert saved == [1], "the last good checkpoint is the last"
    assert workers[0][2] == workers[1][2], "all workers end alike"
