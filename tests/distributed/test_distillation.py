"""Losses under a teacher's scores with DeepSpeed: workers, ZeRO stage, GradCache."""

import dataclasses
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import train_made_up as made_up
from made_up_records import made_up_records
from run_distributed import run_distributed
from toy_model import ToyModel

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.training.checkpoints.checkpoint import seed_worker
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

PAIRS = 16
LOSSES = ({"kind": "listwise_kl", "temperature": 0.5}, {"kind": "margin_mse"})


def stage(loss):
    return parse(
        StageConfig,
        {
            "name": "s",
            "datasets": {"d": 1},
            "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
            "loss": {"dimensions": [4], **loss},
            "optimizer": {"learning_rate": 0.01},
            "steps": 3,
        },
    )


def scored_records(number, seed, shift=0.0):
    """Records with scores that their step and place decide; every fifth negative has none."""
    draw = np.random.default_rng(seed)
    found = []
    for place, record in enumerate(made_up_records(number, seed=seed)):
        scores = draw.normal(size=1 + len(record.negatives)).tolist()
        negatives = tuple(
            dataclasses.replace(n, score=None if (place + i) % 5 == 0 else score)
            for i, (n, score) in enumerate(zip(record.negatives, scores[1:], strict=True))
        )
        found.append(
            dataclasses.replace(record, positive_score=scores[0] + shift, negatives=negatives)
        )
    return found


def train(rank, world, loss, zero, *, cache=True, shift=0.0):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made_up, "made_up_records", partial(scored_records, shift=shift))
        model, config = ToyModel(context=True), stage(loss)
        seed_worker(5, 0)
        engine = DeepSpeedEngine(model, config, Placement(zero_stage=zero), "float32", world)
        settings = StepSettings(30 + 40 * rank, cache, torch.device("cpu"), pass_cost_tokens=1)
        return made_up.train_made_up(engine, model, config, settings)


def cases(rank, world):
    assert dist.get_world_size() == world
    found = {}
    for loss in LOSSES:
        kind = loss["kind"]
        for zero in (0, 2, 3):
            found[kind, zero, "cache"] = train(rank, world, loss, zero)
        found[kind, 0, "one graph"] = train(rank, world, loss, 0, cache=False)
        found[kind, 0, "control"] = train(rank, world, loss, 0, shift=1.0)
    return found


def test_weights_do_not_depend_on_workers_partitions_and_cache():
    expected = run_distributed(cases, 1)[0]
    for found in (expected, run_distributed(cases, 2)[0]):
        for (kind, zero, how), weights in found.items():
            of_one = expected[kind, 0, "one graph"]
            apart = made_up.distance(weights, of_one)
            if how == "control":
                assert apart > 1e-3, (kind, "other scores of the positives")
            else:
                assert apart < 5e-5, (kind, zero, how)
