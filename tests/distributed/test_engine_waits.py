"""Under DeepSpeed the host of a GPU waits for the device a few times a step, not once a pass."""

from collections import Counter

import pytest
import torch
from engine_waits import engine_waits
from operators import Operators, has_cuda_kernel
from run_distributed import run_distributed
from toy_model import ToyModel
from train_made_up import made_up_batch

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.training import engine as engine_module
from rayembed.training.contrastive.step import run_step
from rayembed.training.deepspeed_settings import deepspeed_settings
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
        "optimizer": {"learning_rate": 0.01},
        "steps": 6,
    },
)
STEPS = 3
"""DeepSpeed's clock begins with the third."""

BUDGETS = (40, 120)
"""Tokens a pass."""

CASES = [
    (zero, dtype, cache)
    for zero in (0, 1, 2, 3)
    for dtype, cache in (("float32", False), ("float32", True), ("bfloat16", True))
]


class Waiting(ToyModel):
    """Asks the device in each pass."""

    def __init__(self, ask):
        super().__init__(context=False)
        self.ask = ask

    def forward(self, *given):
        output = super().forward(*given)
        self.ask(output.embeddings)
        return output


def waits_of(world, zero, dtype, cache, budget, model=None):
    """Number of passes of the last step, and its waits by kind and line."""
    with engine_waits(pytest.MonkeyPatch()) as waits:
        model = (model or ToyModel(context=False)).to(getattr(torch, dtype))
        engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), dtype, world)
        settings = StepSettings(budget, cache, torch.device("cpu"), pass_cost_tokens=1)
        batches = [made_up_batch(model, STAGE, number) for number in range(STEPS)]
        for batch in batches:
            waits.places.clear()
            report = run_step(model, engine.forward, engine.backward, batch, STAGE, settings)
            engine.step(1.0)
    return report.micro_batches, waits.places


def cases(rank, world):
    found = {
        (*case, budget): waits_of(world, *case, budget) for case in CASES for budget in BUDGETS
    }
    asking = {
        name: waits_of(world, 2, "float32", True, 60, Waiting(ask))
        for name, ask in (("a value", lambda x: x.sum().item()), (".cpu()", lambda x: x.cpu()))
    }
    before = deepspeed_settings
    engine_module.deepspeed_settings = lambda *given: before(*given) | {"timers": {}}
    timed = {case: waits_of(world, *case, 60) for case in CASES if case[1] == "float32"}
    return found, asking, timed


def operators_of_engines(rank, world):
    """Names of what two steps run under each ZeRO stage and optimiser."""
    with Operators() as operators:
        for zero, optimizer in ((0, "adamw"), (2, "adamw"), (3, "adamw"), (0, "muon"), (2, "muon")):
            stage = STAGE.model_dump() | {"optimizer": {"kind": optimizer, "learning_rate": 0.01}}
            stage = parse(StageConfig, stage)
            model = ToyModel(context=False).to(torch.bfloat16)
            engine = DeepSpeedEngine(model, stage, Placement(zero_stage=zero), "bfloat16", world)
            settings = StepSettings(60, True, torch.device("cpu"), pass_cost_tokens=1)
            for number in range(2):
                batch = made_up_batch(model, stage, number)
                run_step(model, engine.forward, engine.backward, batch, stage, settings)
                engine.step(1.0)
    return operators.names


def test_engines_and_optimisers_have_kernels_on_cuda():
    (names,) = run_distributed(operators_of_engines, 1)
    assert len(names) > 60
    assert {name for name in names if not has_cuda_kernel(name)} == set()


@pytest.fixture(scope="module", params=[1, 2])
def found(request):
    return request.param, *run_distributed(cases, request.param)[0]


ON_THE_HOST = {
    "a value, collated.py:collated_step": 1,
    ".tolist(), step.py:run_step": 1,
}
"""Reads of tensors that are the host's anyway."""

OF_ALL_WORKERS = {
    ".cpu(), collectives.py:read_together": 1,
    ".tolist(), step.py:_of_all_workers": 1,
    "a value, step.py:_of_all_workers": 1,
}
"""What the largest of several workers needs: one read, and looks at what it brought."""

NUM_PARAMETERS = 5

WITH_PARTITIONS = {"a value, utils.py:is_invalid_grad_norm": 3, "a value, engine.py:step": 1}
WHOLE = {
    "a value, utils.py:is_invalid_grad_norm": 1,
    "a value, engine.py:step": 1,
    "a stream, stage3.py:independent_gradient_partition_epilogue": 1,
    # For a stream with nothing left to do.
    "a stream, stage3.py:_get_fp32_grad_state_partition": NUM_PARAMETERS,
}
OVERFLOW = {"a value, stage_1_and_2.py:has_overflow": 1}
OF_THE_ENGINE = {
    (0, "float32"): {"a value, engine.py:_norm_without_partitions": 1},
    (0, "bfloat16"): {
        "a value, engine.py:_not_finite": 1,
        "a value, utils.py:has_overflow": 1,
        "a value, utils.py:get_weight_norm": 4,
    },
    (1, "float32"): WITH_PARTITIONS,
    (2, "float32"): WITH_PARTITIONS,
    (1, "bfloat16"): WITH_PARTITIONS | OVERFLOW,
    (2, "bfloat16"): WITH_PARTITIONS | OVERFLOW,
    (3, "float32"): WHOLE,
    (3, "bfloat16"): WHOLE,
}
"""DeepSpeed's looks at the gradients' norm, after the last backward pass of a step."""

OF_ITS_PLAN = (
    "__reduce_and_partition_ipg_grads",
    "assert_lst_len_same_as_other_ranks",
    "get_lst_from_rank0",
    "<listcomp>",
    "_fetch_sub_module_impl",
    "partition_parameters.py:wait",
    "_allgather_params_coalesced",
)
"""Functions in which ZeRO-3 agrees on the order of modules, again in each step whose graphs are
kept, fetches weights and lets few reductions be under way."""


def test_a_step_waits_where_it_is_known_to(found):
    world, waits, *_ = found
    for (zero, dtype, cache, budget), (passes, places) in waits.items():
        assert passes > 1
        stated = {place: n for place, n in places.items() if not place.endswith(OF_ITS_PLAN)}
        assert zero == 3 or stated == places
        expected = Counter(ON_THE_HOST | OF_THE_ENGINE[zero, dtype])
        expected[".cpu(), collectives.py:read_together"] += 1
        if world > 1:
            expected += Counter(OF_ALL_WORKERS)
        assert stated == expected, (zero, dtype, cache, budget)


def test_no_wait_comes_with_each_pass(found):
    _, waits, *_ = found
    for case in CASES:
        (many, of_many), (few, of_few) = (waits[*case, budget] for budget in BUDGETS)
        assert many > few
        assert of_many == of_few, case


def test_the_control_what_waits_is_counted(found):
    _, _, asking, timed = found
    for kind, (passes, places) in asking.items():
        # GradCache has two forward passes each.
        assert sum(n for place, n in places.items() if place.startswith(kind)) >= 2 * passes
    for (zero, _, cache), (passes, places) in timed.items():
        assert places["the device, timer.py:start"] == passes * (1 + cache), zero
        assert places["the device, timer.py:stop"] == 1
