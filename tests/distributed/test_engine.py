"""DeepSpeed on CPU: workers, ZeRO stage, micro-batches and GradCache do not change the weights."""

import pytest
import torch
from made_up_records import made_up_records
from plain_reference import train_by_hand
from run_distributed import run_distributed
from toy_model import ToyModel
from train_made_up import distance, train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.training.deepspeed_settings import deepspeed_settings
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings
from rayembed.training.optimizer import learning_rate_factor

pytestmark = pytest.mark.distributed

STEPS, PAIRS = 3, 16
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
        },
        "steps": STEPS,
    },
)


def records_of(step):
    return made_up_records(PAIRS, seed=step)


def train(
    rank, world, zero, cache, budget, dtype="float32", device="cpu", pass_cost=1, sums="float32"
):
    model = ToyModel(context=True).to(device, getattr(torch, dtype))
    engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), dtype, world)
    for parameter in model.parameters():
        parameter.grad_dtype = getattr(torch, sums)
    norms = []
    # Passes that cost next to nothing: many micro-batches, whose gradients are added up.
    settings = StepSettings(budget, cache, torch.device(device), pass_cost_tokens=pass_cost)
    weights = train_made_up(
        engine, model, STAGE, settings, on_step=lambda record: norms.append(record["grad_norm"])
    )
    return {name: weight.float() for name, weight in weights.items()}, norms


def cases(rank, world):
    found = {}
    for zero in (0, 1, 2, 3):
        found[zero, "cache"] = train(rank, world, zero, True, 30 + 40 * rank)
        found[zero, "one graph"] = train(rank, world, zero, False, 30 + 40 * rank)
        found[zero, "bf16"] = train(rank, world, zero, True, 30 + 40 * rank, "bfloat16")
        found[zero, "bf16 graphs"] = train(rank, world, zero, False, 30 + 40 * rank, "bfloat16")
        found[zero, "bf16 whole"] = train(
            rank, world, zero, False, 10**6, "bfloat16", pass_cost=10**6
        )
        if world == 1:
            found[zero, "bf16 sums"] = train(
                rank, world, zero, True, 30, "bfloat16", sums="bfloat16"
            )
    return found


def reference(stage=STAGE):
    return train_by_hand(ToyModel(context=True), stage, records_of)


@pytest.mark.parametrize("num_trained", [7, 8])
def test_buffers_are_even_and_no_smaller_than_the_weights(num_trained):
    """DeepSpeed refuses odd ones in stages 1 and 2, whatever the number of weights."""
    placement = Placement(zero_stage=2)
    zero = deepspeed_settings(STAGE, placement, "float32", 2, num_trained)["zero_optimization"]
    assert zero["allgather_bucket_size"] == zero["reduce_bucket_size"] == 8


@pytest.mark.parametrize("world", [1, 2, 4])
def test_trained_weights_are_those_of_the_reference(world):
    expected, norms = reference()
    found = run_distributed(cases, world)[0]
    start = dict(ToyModel(context=True).named_parameters())
    for (zero, kind), (weights, seen) in found.items():
        assert weights.keys() == expected.keys()
        if kind.startswith("bf16"):
            # bf16 keeps 8 bits; each tensor must have moved by the right size all the same.
            for name in expected:
                taken = (weights[name] - start[name]).abs().mean()
                wanted = (expected[name] - start[name]).abs().mean()
                assert taken.item() == pytest.approx(wanted.item(), rel=0.1), (zero, name)
            continue
        # Adam divides by the root of the second moment: rounding of 1e-7 grows to about 1e-5.
        assert distance(weights, expected) < 5e-5, (zero, kind)
        assert seen == pytest.approx(norms, rel=1e-4), (zero, kind)
    optimizer = STAGE.optimizer.model_copy(update={"gradient_clipping": 0.0})
    unclipped, _ = reference(STAGE.model_copy(update={"optimizer": optimizer}))
    assert distance(unclipped, expected) > 1e-4, "clipping must matter here"
    if world == 1:
        cut = {
            (zero, kind): _relative(found[zero, kind], found[zero, "bf16 whole"], start)
            for zero in range(4)
            for kind in ("bf16", "bf16 graphs")
        }
        # Each micro-batch rounds its gradients to 8 bits; only fp32 sums do not round again.
        assert max(cut.values()) < 0.015, cut
        sums = [_relative(found[z, "bf16 sums"], found[z, "bf16 whole"], start) for z in range(4)]
        assert min(sums) > 2 * max(cut.values()), "the control: sums in bf16"


def _relative(left, right, start):
    """Mean distance of two runs' weights over the mean way from the start, in the worst tensor."""
    return max(
        ((left[0][n] - right[0][n]).abs().mean() / (right[0][n] - start[n]).abs().mean()).item()
        for n in start
    )


def test_schedule_by_hand():
    assert [learning_rate_factor(s, STAGE) for s in range(3)] == [1.0, 1.0, 0.5]


def cases_on_gpu(rank, world):
    return {zero: train(rank, world, zero, True, 30, device="cuda") for zero in (0, 1, 2, 3)}


@pytest.mark.gpu
def test_trained_weights_on_the_gpu_are_those_of_the_reference():
    expected, norms = reference()
    for zero, (weights, seen) in run_distributed(cases_on_gpu, 1, accelerator="cuda")[0].items():
        assert distance(weights, expected) < 2e-4, zero
        assert seen == pytest.approx(norms, rel=1e-3), zero
