"""A mixture of experts under DeepSpeed: workers, ZeRO stages and GradCache change nothing.

Balance loss, Matryoshka loss and texts that stand in rows of several workers are in it. bfloat16
changes what rounding does.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plain_adamw import plain_step, train_plainly
from run_distributed import run_distributed
from tiny_models import save_encoder
from train_made_up import distance, made_up_batch, train_made_up, train_or_resume

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.loading.build import build_model
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.training.checkpoints.checkpoint import seed_worker
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

STEPS, PAIRS = 3, 8
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1, "dimensions": [16]},
        "optimizer": {
            "learning_rate": 0.002,
            "weight_decay": 0.1,
            "gradient_clipping": 0.5,
            "eps": 1e-4,  # Adam would magnify rounding where a gradient is near zero
        },
        "steps": STEPS,
        "checkpoint_every_steps": STEPS - 1,
    },
)
MODEL = parse(
    NomicMoeConfig,
    {
        "backbone": {"path": "given", "dtype": "float32"},
        "experts": {"num_experts": 3, "top_k": 2, "start": "released"},
        "dimensions": [16],
        "query_max_length": 32,
        "document_max_length": 32,
    },
)


def run(rank, world, folder, zero, cache, again):
    """Weights on this worker and the metrics of each step."""
    model = build_model(MODEL, folder, seed=3)
    if again:
        model.recompute_layers()
    seed_worker(5, 0)
    engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), "float32", world)
    records = []
    # Micro-batches of other sizes on each worker, so that some are fillers.
    settings = StepSettings(60 + 30 * rank, cache, torch.device("cpu"))
    weights = train_made_up(engine, model, STAGE, settings, on_step=records.append)
    metrics = [{k: v for k, v in r.items() if k.startswith(("experts/", "loss"))} for r in records]
    return weights, metrics


WAYS = {
    1: [(2, True, False)],
    2: [(0, True, False), (3, True, True)],
}
"""Of each number of workers: ZeRO stage, GradCache or one graph, layers recomputed or not. Others
are compared with one plain run in `test_drawn_trainings.py`."""


def trained_ways(rank, world, folder):
    return {way: run(rank, world, folder, *way) for way in WAYS[world]}


def saved_by_one(rank, world, folder, checkpoint):
    train_or_resume(MODEL, folder, STAGE, 2, save=checkpoint)


def resumed_by_two(rank, world, folder, checkpoint):
    """Weights of the run that goes on, and of one that has lost the optimizer's moments."""
    return [
        train_or_resume(MODEL, folder, STAGE, 3, resume=checkpoint, forget_moments=forget)
        for forget in (False, True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_encoder(tmp_path_factory.mktemp("nomic") / "bert"))


@pytest.fixture(scope="module")
def trained(folder):
    return folder, {world: run_distributed(trained_ways, world, folder) for world in WAYS}


@pytest.fixture(scope="module")
def expected(trained):
    """Weights and metrics of torch's AdamW over plain steps in one process and one graph."""
    model = build_model(MODEL, trained[0], seed=3)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    weights, records = train_plainly(model, STAGE)
    metrics = [{k: v for k, v in record.items() if k != "grad_norm"} for record in records]
    for part in ("router", "experts.mlp.w1", "experts.mlp.w2", "experts.bias", "Wqkv"):
        moved = max((start[n] - weights[n]).abs().max().item() for n in start if part in n)
        assert moved > 5e-4, part
    return weights, metrics


TOLERANCE = 2e-5
"""Sums over workers and micro-batches in another order; the weights move by about 3e-3."""


@pytest.mark.parametrize("world", WAYS)
def test_weights_and_router_metrics_are_those_of_one_process(trained, expected, world):
    weights, metrics = expected
    for worker in trained[1][world]:
        assert len(worker) == len(WAYS[world])
        for way, (found, told) in worker.items():
            assert distance(found, weights) < TOLERANCE, way
            for one, other in zip(told, metrics, strict=True):
                assert one == pytest.approx(other, abs=1e-4), way


def test_a_run_goes_on_with_other_workers_and_another_zero_stage(trained, expected, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    run_distributed(saved_by_one, 1, trained[0], checkpoint)
    for resumed, control in run_distributed(resumed_by_two, 2, trained[0], checkpoint):
        assert distance(resumed, expected[0]) < TOLERANCE
        assert distance(control, expected[0]) > 1e-3


def with_balance(coefficient):
    """The settings with another weight of the balance loss."""
    balance = MODEL.experts.balance.model_copy(update={"coefficient": coefficient})
    experts = MODEL.experts.model_copy(update={"balance": balance})
    return MODEL.model_copy(update={"experts": experts})


def gradient_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def averaged_gradient(rank, world, folder, coefficient, cache):
    """The gradient that a data-parallel engine would step with, without any engine."""
    model = build_model(with_balance(coefficient), folder, seed=3).train()
    batch = made_up_batch(model, STAGE, 0)
    # Micro-batches of other sizes, and of another number, on each worker.
    settings = StepSettings(60 + 30 * rank, cache, torch.device("cpu"))
    run_step(model, EngineModule(model), lambda loss, last: loss.backward(), batch, STAGE, settings)
    gradient = gradient_of(model)
    dist.all_reduce(gradient)
    return gradient / world


def balance_gradients(rank, world, folder):
    """Of GradCache and one graph: the part of the gradient that is the balance loss's."""
    return [
        averaged_gradient(rank, world, folder, 1.0, cache)
        - averaged_gradient(rank, world, folder, 0.0, cache)
        for cache in (True, False)
    ]


@pytest.mark.parametrize("world", [1, 2])
def test_the_balance_loss_has_the_gradient_scale_of_one_process(trained, world):
    """1.000 whatever the micro-batches and workers; summed over either it would be 2 and more."""
    folder = trained[0]
    plain = {}
    for coefficient in (0.0, 1.0, 2.0):
        model = build_model(with_balance(coefficient), folder, seed=3).train()
        plain_step(model, STAGE, 0)
        plain[coefficient] = gradient_of(model)
    expected = plain[1.0] - plain[0.0]

    def scale(found):
        return (torch.dot(found, expected) / torch.dot(expected, expected)).item()

    for found in run_distributed(balance_gradients, world, folder)[0]:
        assert scale(found) == pytest.approx(1.0, abs=5e-4)
        assert torch.cosine_similarity(found, expected, dim=0) > 0.9999
    assert scale(plain[2.0] - plain[0.0]) == pytest.approx(2.0, abs=5e-4)  # the control


def test_without_the_balance_loss_the_weights_are_others(trained, expected):
    """The control: what the tests above compare would show a missing or doubled loss."""
    for coefficient in (0.0, 2.0):
        gradients = []
        for config in (MODEL, with_balance(coefficient)):
            model = build_model(config, trained[0], seed=3).train()
            plain_step(model, STAGE, 0)
            gradients.append(
                torch.cat([p.grad.flatten() for n, p in model.named_parameters() if "router" in n])
            )
        difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
        assert difference > 0.05


def moves(rank, world, folder, dtype, *, stage=STAGE, ignored=None):
    """How far each weight of the optimiser moved, from a start that bfloat16 holds without loss.

    Args:
        ignored: the worker whose gradients are left out.
    """
    backbone = MODEL.backbone.model_copy(update={"dtype": "bfloat16"})
    model = build_model(MODEL.model_copy(update={"backbone": backbone}), folder, seed=3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    start = {name: p.detach().float() for name, p in model.named_parameters()}
    if dtype == "float32":
        model = model.float()
    seed_worker(5, 0)
    engine = DeepSpeedEngine(model, stage, Placement(zero_stage=2), dtype, world)
    if rank == ignored:
        backward = engine.backward
        engine.backward = lambda loss, last: backward(0 * loss, last)
    settings = StepSettings(60 + 30 * rank, True, torch.device("cpu"))
    train_made_up(engine, model, stage, settings)
    states = {name: state["weight"].clone() for name, state in engine.optimizer_state()}
    return {name: weight - start[name] for name, weight in states.items()}


def moved_ways(rank, world, folder):
    warmer = STAGE.model_copy(update={"loss": STAGE.loss.model_copy(update={"temperature": 0.2})})
    return {
        "float32": moves(rank, world, folder, "float32"),
        "bfloat16": moves(rank, world, folder, "bfloat16"),
        "another temperature": moves(rank, world, folder, "bfloat16", stage=warmer),
        "one worker ignored": moves(rank, world, folder, "bfloat16", ignored=1),
    }


def apart(found, expected, part=""):
    """How far moves are from those expected, as a share of these: sums of absolute values."""
    names = [name for name in expected if part in name]
    missed = sum((found[name] - expected[name]).abs().sum().item() for name in names)
    return missed / sum(expected[name].abs().sum().item() for name in names)


def test_in_bfloat16_weights_move_as_in_float32(folder):
    """Rounding puts them apart by about 3 % of what they move, the controls by 20 % and more."""
    for worker in run_distributed(moved_ways, 2, folder):
        expected, found = worker["float32"], worker["bfloat16"]
        assert apart(found, expected) < 0.08
        assert apart(worker["another temperature"], expected) > 0.08
        assert apart(worker["one worker ignored"], expected) > 0.08
        for part in ("router", "experts.mlp.w1", "experts.mlp.w2", "experts.bias", "Wqkv"):
            assert max(expected[n].abs().max().item() for n in expected if part in n) > 5e-4, part
            control = apart(worker["one worker ignored"], expected, part)
            assert apart(found, expected, part) < 0.25 * control, part
