"""Workers do not change the gradient: its scale against one process is 1.000."""

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from made_up_records import made_up_records
from plain_reference import reference_loss
from run_distributed import run_distributed
from toy_model import ToyModel

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.distributed import collectives
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive import step as step_module
from rayembed.training.contrastive.collated import collated_step
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

RECORDS = made_up_records(24)
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 24, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.1},
        "steps": 1,
    },
)
PARTS = {"plain": {}, "context": {"context": True}}


def averaged_gradient(rank, world, parts, cache, budget):
    """The gradient that a data-parallel engine would step with."""
    torch.manual_seed(rank)
    model = ToyModel(**parts)
    share = len(RECORDS) // world
    batch = make_step_batch(0, RECORDS[rank * share : (rank + 1) * share], 2, model.tokenizer)
    settings = StepSettings(budget, cache, torch.device("cpu"))
    run_step(model, EngineModule(model), lambda loss, last: loss.backward(), batch, STAGE, settings)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(gradient)
    return gradient / world


def cases(rank, world):
    found = {}
    for name, parts in PARTS.items():
        for cache in (True, False):
            # Budgets differ between workers, so that their numbers of micro-batches do too.
            found[name, cache] = averaged_gradient(rank, world, parts, cache, 30 + 45 * rank)
    # Controls: what the peers do gives another scale or another direction.
    original = batch_loss.gather_with_gradient
    batch_loss.gather_with_gradient = batch_loss.gather
    found["no gradient through gather"] = averaged_gradient(rank, world, {}, True, 40)
    batch_loss.gather_with_gradient = original
    # What NCCL does, which gloo can do too.
    collectives._scatters = lambda device: True
    reduced, scatter = [], dist.reduce_scatter_single

    def counted(own, whole):
        reduced.append((len(own), len(whole)))
        scatter(own, whole)

    dist.reduce_scatter_single = counted
    found["reduce-scatter"] = averaged_gradient(rank, world, {}, True, 40), reduced
    return found


GRADES = np.arange(24, dtype=np.float32) % 5 / 4
GRADED = parse(
    StageConfig,
    {
        **STAGE.model_dump(mode="json"),
        "batch": {"global_pairs": 24, "in_batch_negatives": False},
        "loss": {"kind": "cosent", "dimensions": [4]},
    },
)


def graded_gradient(rank, world, cache, budget):
    """The averaged gradient of a loss that compares the rows of all workers with each other."""
    model = ToyModel()
    own = slice(rank * len(RECORDS) // world, (rank + 1) * len(RECORDS) // world)
    batch = make_step_batch(0, RECORDS[own], 0, model.tokenizer)
    batch = dataclasses.replace(batch, similarity=GRADES[own])
    settings = StepSettings(budget, cache, torch.device("cpu"))
    run_step(
        model, EngineModule(model), lambda loss, last: loss.backward(), batch, GRADED, settings
    )
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(gradient)
    return gradient / world


def graded_cases(rank, world):
    found = [graded_gradient(rank, world, cache, 30 + 45 * rank) for cache in (True, False)]
    batch_loss.gather_with_gradient = lambda local: local
    batch_loss.gather = lambda local: local
    return [*found, graded_gradient(rank, world, True, 40)]


def test_graded_pairs_of_all_workers_are_compared():
    ((expected, *_),) = run_distributed(graded_cases, 1)
    *found, control = run_distributed(graded_cases, 2)[0]
    for gradient in found:
        assert (gradient.norm() / expected.norm()).item() == pytest.approx(1.0, abs=1e-5)
        torch.testing.assert_close(gradient, expected, atol=2e-5, rtol=1e-4)
    assert torch.cosine_similarity(control, expected, dim=0) < 0.999, "each worker for itself"


def auxiliary(rank, world, cache=True):
    """Texts that several rows or workers share count in the statistics as often as they stand."""
    model = ToyModel(experts=3)
    share = len(RECORDS) // world
    batch = make_step_batch(0, RECORDS[rank * share : (rank + 1) * share], 2, model.tokenizer)
    settings = StepSettings(30, cache, torch.device("cpu"))
    run_step(model, EngineModule(model), lambda loss, last: loss.backward(), batch, STAGE, settings)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    dist.all_reduce(gradient)
    return gradient / world


def auxiliary_both_ways(rank, world):
    return [auxiliary(rank, world, cache) for cache in (True, False)]


def reference_gradient(parts, records=RECORDS):
    model = ToyModel(**parts)
    reference_loss(model, records, temperature=0.1, num_negatives=2, in_batch=True).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("world", [2, 4])
def test_averaged_gradient_is_the_one_process_gradient(world):
    found = run_distributed(cases, world)[0]
    for (name, cache), gradient in [item for item in found.items() if isinstance(item[0], tuple)]:
        reference = reference_gradient(PARTS[name])
        ratio = (gradient.norm() / reference.norm()).item()
        assert ratio == pytest.approx(1.0, abs=1e-5), (name, cache)
        torch.testing.assert_close(gradient, reference, atol=3e-6, rtol=1e-4)
    gradient, reduced = found["reduce-scatter"]
    torch.testing.assert_close(gradient, reference_gradient({}), atol=3e-6, rtol=1e-4)
    documents = len(RECORDS) * 3
    assert reduced == [(documents // world, documents)], "one message, of which each has its part"
    control = found["no gradient through gather"]
    cosine = torch.cosine_similarity(control, reference_gradient({}), dim=0)
    assert cosine < 0.999, "the control without gradient through the gather must differ"


def report(rank, world):
    """What a step tells of large counts: loss, texts, tokens and padded tokens."""
    model = ToyModel()
    settings = StepSettings(10**6, False, torch.device("cpu"))
    own = RECORDS[rank * 12 : rank * 12 + 12]
    ready = collated_step(model, make_step_batch(0, own, 2, model.tokenizer), STAGE, settings)
    counts = [2**53 // 4 + rank, 3, 2**25 + rank]
    ready = dataclasses.replace(ready, counts=torch.tensor(counts, dtype=ready.counts.dtype))
    told = run_step(
        model, EngineModule(model), lambda loss, last: loss.backward(), ready, STAGE, settings
    )
    return told.loss, told.texts, told.tokens, told.padded_tokens


def reports(rank, world):
    found = report(rank, world)
    exact = step_module.summed
    step_module.summed = lambda values: exact(values.float())
    control = report(rank, world)
    step_module.summed = exact
    return found, control


def test_sums_of_a_step_are_exact_also_of_large_counts():
    """The loss goes in the same message, in whose own type the last digits would be lost."""
    for found, control in run_distributed(reports, 2):
        assert found[1:] == (2**52 + 1, 6, 2**26 + 1)
        assert control[1:] == (2**52, 6, 2**26)
        loss = reference_loss(ToyModel(), RECORDS, temperature=0.1, num_negatives=2, in_batch=True)
        assert found[0] == pytest.approx(loss.item(), rel=1e-6)


def test_auxiliary_loss_counts_once():
    texts = [(r.query, *r.positives[:1], *(n.text for n in r.negatives[:2])) for r in RECORDS]
    assert len({t for row in texts for t in row}) < sum(map(len, texts))
    expected = reference_gradient({"experts": 3})
    for gradient in run_distributed(auxiliary_both_ways, 2)[0]:
        torch.testing.assert_close(gradient, expected, atol=3e-6, rtol=1e-4)
