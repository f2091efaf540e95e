"""NV-Embed with LoRA under DeepSpeed: against a plain loop, and resumed on other workers."""

from pathlib import Path

import pytest
from made_up_records import made_up_records
from plain_reference import train_by_hand
from run_distributed import run_distributed
from tiny_models import save_decoder
from train_made_up import distance, train_or_resume

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.loading.build import build_model
from rayembed.models.nvembed.config import NVEmbedConfig

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


def run(backbone, zero, **how):
    return train_or_resume(MODEL, backbone, STAGE, zero, **how)


def whole(rank, world, backbone, folder):
    found = {}
    for zero in (0, 1, 2, 3):
        found[zero, "cache"] = run(backbone, zero, save=folder / f"w{world}z{zero}")
        found[zero, "one graph"] = run(backbone, zero, cache=False)
    return found


def resumed(rank, world, backbone, folder):
    found = {}
    for saved in ("w1z0", "w2z3", "w4z2"):
        for zero in (0, 1, 2, 3):
            found[saved, zero] = run(backbone, zero, resume=folder / saved)
    found["control"] = run(backbone, 2, resume=folder / "w2z3", forget_moments=True)
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
        found[zero, "whole"] = run(backbone, zero, save=save, device="cuda")
        found[zero, "resumed"] = run(backbone, zero, resume=save, device="cuda")
        moved = folder / "w2z3"
        found[zero, "from CPUs"] = run(backbone, zero, resume=moved, device="cuda")
    return found


@pytest.mark.gpu
def test_a_gpu_goes_on_from_its_own_checkpoints_and_from_those_of_cpus(trained, expected):
    backbone, folder, _ = trained
    found = run_distributed(saved_and_resumed_on_gpu, 1, backbone, folder, accelerator="cuda")[0]
    for case, weights in found.items():
        assert distance(weights, expected) < 1e-3, case
