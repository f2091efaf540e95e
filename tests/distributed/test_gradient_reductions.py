"""Gradients are reduced over workers once a step, however many micro-batches it has, in fp32."""

from collections import Counter
from functools import partial

import pytest
import torch
from run_distributed import run_distributed
from torch.utils._python_dispatch import TorchDispatchMode
from toy_model import ToyModel
from train_made_up import distance, made_up_batch

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.contract import TrainableModel
from rayembed.training.contrastive.step import run_step
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings

pytestmark = pytest.mark.distributed

STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 16, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 0},
        "steps": 2,
    },
)
REDUCTIONS = ("allreduce_", "reduce_", "reduce_scatter_", "_reduce_scatter_base_")
ZERO = (0, 1, 2, 3)


class Collectives(TorchDispatchMode):
    """Counts collectives by their names."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.seen[func._schema.name.removeprefix("c10d::")] += 1
        return func(*args, **(kwargs or {}))


class Weight(TrainableModel):
    """What goes in is the gradient of its weight; nothing ever uses the other one."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16))
        self.idle = torch.nn.Parameter(torch.zeros(16))

    def forward(self, gradient):
        return (self.weight * gradient).sum()

    def backbone_parameter(self, name):
        return True


def counted(engine, seen, passes, loss, last):
    passes.append(last)
    with Collectives(seen):
        engine.backward(loss, last)


def train(zero, once):
    """Reductions in the backward passes of the last of two steps, their number, and the weights."""
    model = ToyModel(context=True)
    engine = DeepSpeedEngine(
        model, STAGE, Placement(zero_stage=zero, reduce_once=once), "float32", 2
    )
    settings = StepSettings(200, True, torch.device("cpu"), pass_cost_tokens=1)
    for number in range(2):
        seen, passes = Counter(), []
        batch = made_up_batch(model, STAGE, number)
        backward = partial(counted, engine, seen, passes)
        run_step(model, engine.forward, backward, batch, STAGE, settings)
        engine.step(1.0)
    weights = {name: weight.clone() for name, weight in engine.trainable_weights()}
    return sum(seen[name] for name in REDUCTIONS), len(passes), weights


def gradient(rank, zero, once, sums=torch.float32, dtype="bfloat16", *, keeps_graphs=False):
    """(16,) gradient of a weight, twice: of 256 and 15 times 0.5, eight from each of two.

    Args:
        keeps_graphs: all forward passes of a step run before its first backward pass.
    """
    from deepspeed.utils import safe_get_full_grad

    model = Weight().to(getattr(torch, dtype))
    placement = Placement(zero_stage=zero, reduce_once=once)
    engine = DeepSpeedEngine(model, STAGE, placement, dtype, 2)
    model.weight.grad_dtype = sums
    found = []
    for _ in range(2):
        sizes = [0.5 if place or rank else 256.0 for place in range(8)]
        passes = (engine.forward(torch.full((16,), s, dtype=model.weight.dtype)) for s in sizes)
        for place, loss in enumerate(list(passes) if keeps_graphs else passes):
            engine.backward(loss, place == 7)
        found.append(safe_get_full_grad(model.weight) if zero else model.weight.grad.clone())
        engine.step(0.0)
    return found


def cases(rank, world):
    cases = [(zero, True) for zero in ZERO] + [(zero, False) for zero in (2, 3)]
    steps = {case: train(*case) for case in cases}
    sums = {case: gradient(rank, *case) for case in cases}
    for case in cases:
        for dtype in ("float32", "bfloat16"):
            sums[*case, dtype] = gradient(rank, *case, dtype=dtype, keeps_graphs=True)
    control = {zero: gradient(rank, zero, True, torch.bfloat16) for zero in ZERO}
    return steps, sums, control


def test_gradients_are_reduced_once_a_step_in_fp32():
    steps, sums, control = run_distributed(cases, 2)[0]
    for (zero, once), (reductions, passes, weights) in steps.items():
        assert passes >= 5
        assert reductions == (1 if once else passes), zero
        # Adam divides by the root of the second moment: rounding of 1e-7 grows to about 1e-5.
        assert distance(weights, steps[0, True][2]) < 5e-5, (zero, once)
    for case, found in sums.items():
        for of_step in found:
            assert of_step.float().tolist() == [131.75] * 16, case
    for zero, found in control.items():
        assert found[0][0].item() != 131.75, f"the control of stage {zero}: sums in bf16"
