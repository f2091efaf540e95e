"""Settings of InfoNCE: the gradient is that of one process, with GradCache and without."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from made_up_records import made_up_records
from run_distributed import run_distributed
from toy_model import ToyModel

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.training.contrastive import batch_loss, directions
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

MADE = made_up_records(24)
RECORDS = [
    # Those of the first half know what rows of the second half train, which do not know of it.
    dataclasses.replace(one, positives=(*one.positives, other.positives[0]))
    for one, other in zip(MADE, MADE[12:], strict=False)
] + MADE[12:]
ALL = ["document_to_query", "query_to_query", "document_to_document"]
LOSSES = {
    "directions": {"directions": ALL},
    "symmetric": {"directions": ALL[:1], "partition": "per_direction"},
    "weights": {"hardness": {}, "focal": 0.5},
    "own": {"directions": ALL, "false_negatives": {"by": "own", "margin": 0.1}},
    "temperature": {"learnt_temperature": True, "directions": ["query_to_query"]},
    "positives": {"hardness": {"of": "all"}},
}


def stage_of(name):
    batch = {"global_pairs": 24, "num_negatives": 2, "in_batch_negatives": True}
    values = {"name": "s", "datasets": {"d": 1}, "steps": 1, "optimizer": {"learning_rate": 0.1}}
    batch["num_positives"] = 3 if name == "positives" else 1
    loss = {"temperature": 0.1, **LOSSES[name]}
    return parse(StageConfig, {**values, "batch": batch, "loss": loss})


def gradient(rank, world, name, cache, budget):
    """The gradient that a data-parallel engine would step with."""
    stage, model, share = stage_of(name), ToyModel(), len(RECORDS) // world
    own = RECORDS[rank * share : (rank + 1) * share]
    number = stage.batch.num_positives
    batch = make_step_batch(0, own, 2, model.tokenizer, num_positives=number)
    module = EngineModule(model, stage.loss)
    settings = StepSettings(budget, cache, torch.device("cpu"))
    run_step(model, module, lambda loss, last: loss.backward(), batch, stage, settings)
    found = torch.cat([p.grad.flatten() for p in module.parameters()])
    if world > 1:
        dist.all_reduce(found)
    return found / world


def cases(rank, world):
    found = {}
    for name in LOSSES:
        for cache, block in ((True, 1 << 23), (False, 200)):
            batch_loss._BLOCK = block
            found[name, cache] = gradient(rank, world, name, cache, 30 + 45 * rank)
    # The control: workers that know the positives of their own rows alone.
    directions.OtherRows.of = classmethod(_alone)
    found["control"] = gradient(rank, world, "directions", True, 40)
    return found


def _alone(cls, everyone, not_negatives, queries, documents, made=directions.OtherRows.of.__func__):
    right = made(cls, everyone, not_negatives, queries, documents)
    return dataclasses.replace(right, known=torch.zeros_like(right.known))


@pytest.mark.parametrize("world", [2, 3])
def test_workers_do_not_change_the_gradient(world):
    found = run_distributed(cases, world)[0]
    control = found.pop("control")
    for (name, cache), value in found.items():
        expected = gradient(0, 1, name, False, 10**6)
        torch.testing.assert_close(
            value, expected, atol=2e-5, rtol=1e-4, msg=lambda m, n=name, c=cache: f"{n} {c}: {m}"
        )
    expected = gradient(0, 1, "directions", False, 10**6)
    assert (control - expected).abs().max() > 1e-3
