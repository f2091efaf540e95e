"""NV-Embed with LoRA under DeepSpeed: against a plain loop, and resumed on other workers."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from made_up_records import made_up_records
from plain_reference import train_by_hand
from run_distributed import run_distributed
from tiny_models import save_decoder

from rayembed.config.model import NVEmbedConfig
from rayembed.config.run import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.models.build import build_model
from rayembed.models.trainable import load_trainable_state
from rayembed.training.checkpoint import (
    Checkpoint,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.loop import train_steps
from rayembed.training.step import StepSettings

pytestmark = pytest.mark.distributed

STEPS, PAIRS, SAVED_AT = 4, 8, 2
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {
            "learning_rate": 0.01,
            "pooling_learning_rate": 0.02,
            "weight_decay": 0.1,
            "warmup_steps": 1,
            "gradient_clipping": 0.5,
            # LoRA's A has no gradient but rounding while B is zero; Adam would magnify it.
            "eps": 1e-5,
        },
        "steps": STEPS,
        "checkpoint_every_steps": SAVED_AT,
    },
)
MODEL = parse(
    NVEmbedConfig,
    {
        "backbone": {"path": "given", "dtype": "float32"},
        "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2, "head_dim": 8},
        "lora": {"rank": 2, "alpha": 4, "dropout": 0.0},
        "query_max_length": 32,
        "document_max_length": 32,
    },
)
POSITION = ("s", "run", "plan")


def run(
    rank,
    world,
    backbone,
    zero,
    *,
    cache=True,
    save=None,
    resume=None,
    forget_moments=False,
    device="cpu",
):
    """Trainable weights on this worker after all steps, from the start or from a checkpoint."""
    position = expected_position(*POSITION)
    model = build_model(MODEL, backbone, seed=3)
    checkpoint = None if resume is None else Checkpoint(resume, position)
    if checkpoint is not None:
        load_trainable_state(model, checkpoint.weights())
    model = model.to(device)
    seed_worker(5, 0)
    engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), "float32", world)
    start = 0
    if checkpoint is not None:
        start = checkpoint.position.step
        if not forget_moments:
            checkpoint.restore(engine)
    share = PAIRS // world
    batches = [
        make_step_batch(
            s, made_up_records(PAIRS, seed=s)[rank * share : (rank + 1) * share], 2, model.tokenizer
        )
        for s in range(start, STEPS)
    ]

    def on_checkpoint(step):
        if save is not None and step == SAVED_AT:
            save.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            save_checkpoint(save, engine, position.at(step))
            dist.barrier()

    train_steps(
        engine,
        batches,
        STAGE,
        StepSettings(60 + 30 * rank, cache, torch.device(device)),
        start_step=start,
        on_step=lambda record: None,
        on_checkpoint=on_checkpoint,
    )
    return {name: weight.cpu().clone() for name, weight in engine.trainable_weights()}


def whole(rank, world, backbone, folder):
    found = {}
    for zero in (0, 1, 2, 3):
        found[zero, "cache"] = run(rank, world, backbone, zero, save=folder / f"w{world}z{zero}")
        found[zero, "one graph"] = run(rank, world, backbone, zero, cache=False)
    return found


def resumed(rank, world, backbone, folder):
    found = {}
    for saved in ("w1z0", "w2z3", "w4z2"):
        for zero in (0, 1, 2, 3):
            found[saved, zero] = run(rank, world, backbone, zero, resume=folder / saved)
    found["control"] = run(rank, world, backbone, 2, resume=folder / "w2z3", forget_moments=True)
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvembed")
    backbone = Path(save_decoder(folder / "backbone"))
    found = {w: run_distributed(whole, w, backbone, folder) for w in (1, 2, 4)}
    return backbone, folder, found


@pytest.fixture(scope="module")
def expected(trained):
    """Weights of AdamW by hand over the loss of a loop over texts."""
    model = build_model(MODEL, trained[0], seed=3).train()
    start = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    weights, _ = train_by_hand(model, STAGE, lambda step: made_up_records(PAIRS, seed=step))
    assert distance(start, weights) > 5e-3
    return weights


def distance(left, right):
    assert left.keys() == right.keys()
    return max((left[n] - right[n]).abs().max().item() for n in right)


TOLERANCE = 1e-5
"""Sums over workers and micro-batches in another order; the weights move by about 1e-2."""


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_are_those_of_the_plain_loop(trained, expected, world):
    for worker in trained[2][world]:
        for case, weights in worker.items():
            assert distance(weights, expected) < TOLERANCE, case


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_run_goes_on_with_other_workers_and_another_zero_stage(trained, expected, world):
    backbone, folder, _ = trained
    for worker in run_distributed(resumed, world, backbone, folder):
        control = worker.pop("control")
        for case, weights in worker.items():
            assert distance(weights, expected) < TOLERANCE, case
        assert distance(control, expected) > 1e-3


def test_each_parameter_stands_once_in_a_checkpoint(trained):
    from safetensors import safe_open

    sizes = []
    names = []
    for path in sorted((trained[1] / "w4z3").glob("state-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names_here = list(file.keys())
            names += names_here
            sizes.append(sum(file.get_tensor(key).numel() for key in names_here))
    assert len(names) == len(set(names)) == 4 * len(trained[2][1][0][0, "cache"])
    largest = 3 * max(weight.numel() for weight in trained[2][1][0][0, "cache"].values())
    assert max(sizes) < sum(sizes) / 4 + largest, "the workers share the writing"


def saved_and_resumed_on_gpu(rank, world, backbone, folder):
    found = {}
    for zero in (0, 1, 2, 3):
        save = folder / f"gpu{zero}"
        found[zero, "whole"] = run(rank, world, backbone, zero, save=save, device="cuda")
        found[zero, "resumed"] = run(rank, world, backbone, zero, resume=save, device="cuda")
        moved = folder / "w2z3"
        found[zero, "from CPUs"] = run(rank, world, backbone, zero, resume=moved, device="cuda")
    return found


@pytest.mark.gpu
def test_a_gpu_goes_on_from_its_own_checkpoints_and_from_those_of_cpus(trained, expected):
    backbone, folder, _ = trained
    found = run_distributed(saved_and_resumed_on_gpu, 1, backbone, folder, accelerator="cuda")[0]
    for case, weights in found.items():
        assert distance(weights, expected) < 1e-3, case
