"""A loss with parameters under DeepSpeed: workers, ZeRO stage, GradCache and resume."""

import math

import pytest
import torch
import torch.distributed as dist
from made_up_records import made_up_records
from plain_reference import reference_loss
from run_distributed import run_distributed
from toy_model import ToyModel
from train_made_up import distance, train_made_up

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.models.contract import load_trainable_state
from rayembed.training import engine as engine_module
from rayembed.training.checkpoints.checkpoint import (
    Checkpoint,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.contrastive import step as step_module
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings
from rayembed.training.optimizer import learning_rate_factor

pytestmark = pytest.mark.distributed

STEPS, PAIRS = 4, 16
SCALE, BIAS = 5.0, -2.0
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"kind": "siglip", "scale": SCALE, "bias": BIAS},
        "optimizer": {
            "learning_rate": 0.01,
            "loss_learning_rate": 0.05,
            "weight_decay": 0.1,
            "gradient_clipping": 0.5,
        },
        "steps": STEPS,
        "checkpoint_every_steps": 2,
    },
)
LOSS = ("loss:log_scale", "loss:bias")


def reference():
    """Weights and changes of the loss's parameters after the stage, in one process."""
    model = ToyModel(context=True)
    log_scale = torch.tensor(math.log(SCALE), requires_grad=True)
    bias = torch.tensor(BIAS, requires_grad=True)

    def of_row(cosines):
        signs = torch.tensor([1.0, *[-1.0] * (len(cosines) - 1)])
        return -torch.nn.functional.logsigmoid(signs * (log_scale.exp() * cosines + bias)).sum()

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.1, "peak": 0.01},
        {"params": vectors, "weight_decay": 0.0, "peak": 0.01},
        {"params": [log_scale, bias], "weight_decay": 0.0, "peak": 0.05},
    ]
    optimizer = torch.optim.AdamW(groups)
    everything = [p for group in groups for p in group["params"]]
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        reference_loss(
            model,
            made_up_records(PAIRS, seed=step),
            temperature=1.0,
            num_negatives=2,
            in_batch=True,
            of_row=of_row,
        ).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(everything, 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * learning_rate_factor(step, STAGE)
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    changes = (log_scale.detach() - math.log(SCALE)).view(1), (bias.detach() - BIAS).view(1)
    return {**weights, **dict(zip(LOSS, changes, strict=True))}, norms


def partitioned(settings):
    """DeepSpeed's settings under which ZeRO-3 keeps no parameter whole."""

    def changed(*arguments):
        values = settings(*arguments)
        values["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return values

    return changed


def train(
    rank, world, zero, *, cache=True, dtype="float32", save=None, resume=None, all_parted=False
):
    """The model's weights with the fp32 loss parameters, and the gradient's norms."""
    position = expected_position("s", "run", "plan")
    model = ToyModel(context=True).to(getattr(torch, dtype))
    checkpoint = None if resume is None else Checkpoint(resume, position)
    if checkpoint is not None:
        load_trainable_state(model, checkpoint.weights())
    seed_worker(5, 0)
    with pytest.MonkeyPatch.context() as patch:
        if all_parted:
            patch.setattr(
                engine_module, "deepspeed_settings", partitioned(engine_module.deepspeed_settings)
            )
        engine = DeepSpeedEngine(model, STAGE, Placement(zero_stage=zero), dtype, world)
    start = 0
    if checkpoint is not None:
        checkpoint.restore(engine)
        start = checkpoint.position.step
    norms = []

    def on_checkpoint(step):
        if save is not None and step == STAGE.checkpoint_every_steps:
            save.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            save_checkpoint(save, engine, position.at(step))
            dist.barrier()

    settings = StepSettings(30 + 40 * rank, cache, torch.device("cpu"), pass_cost_tokens=1)
    weights = train_made_up(
        engine,
        model,
        STAGE,
        settings,
        start=start,
        on_step=lambda record: norms.append(record["grad_norm"]),
        on_checkpoint=on_checkpoint,
    )
    assert not weights.keys() & set(LOSS), "the weights that are handed on are the model's"
    states = {name: state["weight"].cpu().clone() for name, state in engine.optimizer_state()}
    return {**{n: w.float() for n, w in weights.items()}, **{n: states[n] for n in LOSS}}, norms


def cases(rank, world):
    found = {}
    for zero in (0, 1, 2, 3):
        found[zero, "cache"] = train(rank, world, zero)
        found[zero, "one graph"] = train(rank, world, zero, cache=False)
        found[zero, "bf16"] = train(rank, world, zero, dtype="bfloat16")
    found[3, "all partitioned"] = train(rank, world, 3, all_parted=True)
    named = step_module.named_values
    step_module.named_values = lambda shapes, values: named(shapes, values.detach())
    found["control"] = train(rank, world, 2)
    step_module.named_values = named
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_weights_and_parameters_of_the_loss_are_those_of_one_process(world):
    expected, norms = reference()
    found = run_distributed(cases, world)[0]
    control, seen = found.pop("control")
    assert all(torch.equal(control[name], torch.zeros(1)) for name in LOSS)
    assert abs(seen[0] - norms[0]) > 1e-2, "the control without their gradient"
    start = dict(ToyModel(context=True).named_parameters())
    for (zero, kind), (weights, seen) in found.items():
        assert weights.keys() == expected.keys()
        if kind == "bf16":
            for name, weight in expected.items():
                before = start.get(name, torch.zeros(1))
                taken, wanted = ((w - before).abs().mean().item() for w in (weights[name], weight))
                assert taken == pytest.approx(wanted, rel=0.1), (zero, name)
            continue
        # Adam divides by the root of the second moment: rounding of 1e-7 grows to about 1e-5.
        assert distance(weights, expected) < 5e-5, (zero, kind)
        assert seen == pytest.approx(norms, rel=1e-4), (zero, kind)
    assert all(expected[name].abs() > 0.1 for name in LOSS)


def resumed(rank, world, folder):
    found = {}
    for zero in (0, 1, 2, 3):
        for dtype in ("float32", "bfloat16"):
            here = folder / f"{zero}{dtype}"
            found[zero, dtype, "whole"], _ = train(rank, world, zero, dtype=dtype, save=here)
            found[zero, dtype, "resumed"], _ = train(rank, world, zero, dtype=dtype, resume=here)
    DeepSpeedEngine._restore_loss = lambda *_: None
    found["control"], _ = train(rank, world, 2, dtype="bfloat16", resume=folder / "2bfloat16")
    return found


def other_workers(rank, world, folder):
    return {zero: train(rank, world, zero, resume=folder / "2float32")[0] for zero in (0, 2, 3)}


def test_a_resumed_run_ends_as_the_uninterrupted_one(tmp_path):
    found = run_distributed(resumed, 2, tmp_path)[0]
    control = found.pop("control")
    for zero in (0, 1, 2, 3):
        for dtype in ("float32", "bfloat16"):
            whole, again = found[zero, dtype, "whole"], found[zero, dtype, "resumed"]
            for name in whole:
                assert torch.equal(whole[name], again[name]), (zero, dtype, name)
    whole = found[2, "bfloat16", "whole"]
    assert any(not torch.equal(whole[name], control[name]) for name in whole)
    for zero, weights in run_distributed(other_workers, 1, tmp_path)[0].items():
        assert distance(weights, found[2, "float32", "whole"]) < 5e-5, zero


def former(rank, world):
    """Weights with InfoNCE as it is, and with the function from before the table of losses."""
    from former_loss import former_contrastive_loss

    values = STAGE.model_dump(mode="json") | {"loss": {"temperature": 0.1, "dimensions": [4]}}
    values["optimizer"]["loss_learning_rate"] = None
    found = []
    for of_stage in (step_module.contrastive_loss, former_contrastive_loss):
        step_module.contrastive_loss = of_stage
        stage, model = parse(StageConfig, values), ToyModel(context=True)
        engine = DeepSpeedEngine(model, stage, Placement(zero_stage=2), "float32", world)
        settings = StepSettings(30 + 40 * rank, True, torch.device("cpu"), pass_cost_tokens=1)
        found.append(train_made_up(engine, model, stage, settings))
    return found


def test_infonce_of_two_workers_is_that_of_before_to_the_bit():
    now, before = run_distributed(former, 2)[0]
    assert all(torch.equal(now[name], before[name]) for name in before)
