"""Every architecture under DeepSpeed: two workers, ZeRO-3 and GradCache train one worker's weights,
and so do packed micro-batches.

The files beside this one look deeper into each: resumed runs, other stages, a loop by hand.
"""

import pytest
from run_distributed import run_distributed
from tiny_folders import KINDS, tiny_parts, tiny_settings
from train_made_up import distance, train_or_resume

from rayembed.config.model import ARCHITECTURES
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.loading.build import build_model

pytestmark = pytest.mark.distributed

STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        # Adam would magnify the rounding of small gradients.
        "optimizer": {"learning_rate": 0.01, "eps": 1e-4, "gradient_clipping": 0.5},
        "steps": 3,
        "checkpoint_every_steps": 3,
    },
)
TOLERANCE = 2e-5
"""Sums over workers and micro-batches in another order; the weights move by more than 5e-3."""


def settings(kind):
    """Settings of a tiny model that is trained whole."""
    whole = "lora" in ARCHITECTURES.classes()[kind].model_fields
    return tiny_settings(kind, **({"lora": None} if whole else {}))


WAYS = {
    "zero 3": {"zero": 3, "cache": True},
    "packed, zero 2": {"zero": 2, "cache": True, "unpadded": "always"},
    "packed, zero 3": {"zero": 3, "cache": True, "unpadded": "always"},
}


def trained(rank, world, parts):
    ways = WAYS if world == 2 else {"alone": {"zero": 0, "cache": False}}
    return {
        (kind, name): train_or_resume(settings(kind), dict(parts[kind]), STAGE, **way)
        for kind in KINDS
        for name, way in ways.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Parts by kind, and the weights of each worker by the number of workers."""
    home = tmp_path_factory.mktemp("contract")
    parts = {kind: tiny_parts(kind, home / kind) for kind in KINDS}
    return parts, {world: run_distributed(trained, world, parts) for world in (1, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_train_the_weights_of_one(results, kind):
    parts, weights = results
    expected = weights[1][0][kind, "alone"]
    for worker in weights[2]:
        for way in WAYS:
            assert distance(worker[kind, way], expected) < TOLERANCE, way
    model = build_model(settings(kind), parts[kind], seed=3)
    start = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    assert distance(start, expected) > 5e-3, "the control: training moves the weights"
