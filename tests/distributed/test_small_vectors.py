"""Quantised vectors and the spread-out regulariser with DeepSpeed: workers, ZeRO, GradCache."""

import pytest
import torch
import torch.distributed as dist
import train_made_up as made_up
from run_distributed import run_distributed
from toy_model import ToyModel

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.losses import spread_out as module
from rayembed.training.checkpoints.checkpoint import seed_worker
from rayembed.training.contrastive import batch_loss
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

PAIRS = 16


def train(rank, world, zero, *, cache=True, alone=False, block=2**23):
    config = parse(
        StageConfig,
        {
            "name": "s",
            "datasets": {"d": 1},
            "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
            "loss": {
                "dimensions": [4],
                "precisions": ["int8", "binary"],
                "spread_out": 3.0,
                "temperature": 0.2,
            },
            "optimizer": {"learning_rate": 0.01},
            "steps": 3,
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_loss, "_BLOCK", block)
        if alone:  # each worker's own products in place of all workers'
            patch.setattr(module, "sum_with_gradient", lambda local: local)
        model = ToyModel(context=True)
        seed_worker(5, 0)
        engine = DeepSpeedEngine(model, config, Placement(zero_stage=zero), "float32", world)
        settings = StepSettings(30 + 40 * rank, cache, torch.device("cpu"), pass_cost_tokens=1)
        return made_up.train_made_up(engine, model, config, settings)


def cases(rank, world):
    assert dist.get_world_size() == world
    return {
        "one graph": train(rank, world, 0, cache=False),
        "cache": train(rank, world, 0),
        "ZeRO 2": train(rank, world, 2),
        "rows in blocks": train(rank, world, 0, block=100),
        "each for itself": train(rank, world, 0, alone=True),
    }


def test_weights_do_not_depend_on_workers_partitions_blocks_and_cache():
    expected = run_distributed(cases, 1)[0]
    of_one = expected["one graph"]
    for found in (expected, run_distributed(cases, 2)[0]):
        for how, weights in found.items():
            apart = made_up.distance(weights, of_one)
            if how == "each for itself" and found is not expected:
                assert apart > 1e-4, "the control"
            else:
                assert apart < 5e-5, how
