"""Muon under DeepSpeed: workers, ZeRO stages, resume, and matrices that a shard's border cuts."""

import pytest
import torch
import torch.distributed as dist
from made_up_records import made_up_records
from plain_muon import PlainMuon
from plain_reference import reference_loss
from run_distributed import run_distributed
from toy_model import ToyModel
from train_made_up import distance, train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.contract import load_trainable_state
from rayembed.optim import orthogonal as orthogonal_module
from rayembed.training.checkpoints.checkpoint import (
    Checkpoint,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings
from rayembed.training.optimizer import learning_rate_factor

pytestmark = pytest.mark.distributed

STEPS, PAIRS = 4, 16
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {
            "kind": "muon",
            "learning_rate": 0.02,
            "pooling_learning_rate": 0.01,
            "weight_decay": 0.1,
            "gradient_clipping": 0.5,
            "schedule": {"kind": "wsd", "decay_share": 0.5},
        },
        "steps": STEPS,
        "checkpoint_every_steps": 2,
    },
)
# hidden, first and router have 64 + 64 + 24 elements: with two workers `first` lies in both shards,
# with four `hidden` as well.
PARTS = {"context": True, "experts": 3}


def reference():
    """Weights after the stage in one process, Muon by way of singular values."""
    model = ToyModel(**PARTS)
    named = dict(model.named_parameters())
    matrices = [named[f"{layer}.weight"] for layer in ("hidden", "first", "router")]
    muon = PlainMuon(matrices, weight_decay=0.1)
    groups = [
        {"params": [named["tokens.weight"]], "weight_decay": 0.1, "peak": 0.02},
        {"params": [named["out.weight"]], "weight_decay": 0.1, "peak": 0.01},
        {"params": [named["out.bias"]], "weight_decay": 0.0, "peak": 0.01},
        {
            "params": [named[f"{layer}.bias"] for layer in ("hidden", "first", "router")],
            "weight_decay": 0.0,
            "peak": 0.02,
        },
    ]
    adamw = torch.optim.AdamW(groups)
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        reference_loss(
            model,
            made_up_records(PAIRS, seed=step),
            temperature=0.1,
            num_negatives=2,
            in_batch=True,
        ).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        factor = learning_rate_factor(step, STAGE)
        for group in adamw.param_groups:
            group["lr"] = group["peak"] * factor
        adamw.step()
        muon.step(0.02 * factor)
    return {name: p.detach() for name, p in named.items()}, norms


def train(rank, world, zero, *, cache=True, dtype="float32", save=None, resume=None):
    position = expected_position("s", "run", "plan")
    model = ToyModel(**PARTS).to(getattr(torch, dtype))
    checkpoint = None if resume is None else Checkpoint(resume, position)
    if checkpoint is not None:
        load_trainable_state(model, checkpoint.weights())
    seed_worker(5, 0)
    engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), dtype, world)
    start = 0
    if checkpoint is not None:
        checkpoint.restore(engine)
        start = checkpoint.position.step
    norms = []

    def on_checkpoint(step):
        if save is not None and step == STAGE.checkpoint_every_steps:
            save.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            save_checkpoint(save, engine, position.at(step))
            dist.barrier()

    settings = StepSettings(30 + 40 * rank, cache, torch.device("cpu"), pass_cost_tokens=1)
    weights = train_made_up(
        engine,
        model,
        STAGE,
        settings,
        start=start,
        on_step=lambda record: norms.append(record["grad_norm"]),
        on_checkpoint=on_checkpoint,
    )
    states = {name: set(state) for name, state in engine.optimizer_state()}
    assert states["hidden.weight"] == {"weight", "momentum_buffer", "step"}
    assert states["tokens.weight"] == {"weight", "exp_avg", "exp_avg_sq", "step"}
    return {name: weight.float() for name, weight in weights.items()}, norms


def cases(rank, world):
    found = {}
    for zero in (0, 1, 2):
        found[zero, "cache"] = train(rank, world, zero)
        found[zero, "one graph"] = train(rank, world, zero, cache=False)
        found[zero, "bf16"] = train(rank, world, zero, dtype="bfloat16")
    if world > 1:  # the control: each worker for itself, as if its part were the whole
        orthogonal_module.gather = lambda shard: shard.repeat(world)
        found["control"] = train(rank, world, 2)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_are_those_of_whole_matrices_in_one_process(world):
    expected, norms = reference()
    results = run_distributed(cases, world)
    found = results[0]
    if world > 1:
        control, _ = found.pop("control")
        assert distance(control, expected) > 1e-3
    start = dict(ToyModel(**PARTS).named_parameters())
    for (zero, kind), (weights, seen) in found.items():
        assert weights.keys() == expected.keys()
        for other in results[1:]:
            assert all(torch.equal(other[zero, kind][0][n], weights[n]) for n in weights)
        if kind == "bf16":
            # The router's gradient has a singular value of zero, of which rounding to 8 bits makes
            # one that the iteration brings to 1.
            for name in expected.keys() - {"router.weight"}:
                taken = (weights[name] - start[name]).abs().mean().item()
                wanted = (expected[name] - start[name]).abs().mean().item()
                assert taken == pytest.approx(wanted, rel=0.15), (zero, name)
            continue
        # Both Adam and small singular values magnify rounding of 1e-7.
        assert distance(weights, expected) < 1e-4, (zero, kind)
        assert seen == pytest.approx(norms, rel=1e-3), (zero, kind)


def resumed(rank, world, folder):
    found = {}
    for zero in (0, 1, 2):
        for dtype in ("float32", "bfloat16"):
            here = folder / f"{zero}{dtype}"
            found[zero, dtype, "whole"], _ = train(rank, world, zero, dtype=dtype, save=here)
            found[zero, dtype, "resumed"], _ = train(rank, world, zero, dtype=dtype, resume=here)
    DeepSpeedEngine.restore_optimizer_state = lambda *_: None
    found["control"], _ = train(rank, world, 2, resume=folder / "2float32")
    return found


def other_workers(rank, world, folder):
    """From a checkpoint of two workers under ZeRO 2, also under another stage."""
    return {zero: train(rank, world, zero, resume=folder / "2float32")[0] for zero in (0, 1, 2)}


def test_a_resumed_run_ends_as_the_uninterrupted_one(tmp_path):
    found = run_distributed(resumed, 2, tmp_path)[0]
    control = found.pop("control")
    for zero in (0, 1, 2):
        for dtype in ("float32", "bfloat16"):
            whole, again = found[zero, dtype, "whole"], found[zero, dtype, "resumed"]
            for name in whole:
                assert torch.equal(whole[name], again[name]), (zero, dtype, name)
    whole = found[2, "float32", "whole"]
    assert distance(whole, control) > 1e-3, "without the states it ends elsewhere"
    for world in (1, 4):
        for zero, weights in run_distributed(other_workers, world, tmp_path)[0].items():
            assert distance(weights, whole) < 1e-4, (world, zero)
