"""Losses and masks by stored vectors of teachers under DeepSpeed: workers, ZeRO stage, GradCache,
resume, and plans of every batch policy.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from made_up_records import made_up_records
from made_up_teachers import TEACHERS, taught_loss
from plain_reference import reference_loss
from run_distributed import run_distributed
from toy_model import ToyModel, ToyTokenizer
from train_made_up import distance, train_made_up

from rayembed.config.loss import Widths
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.stream import PairSteps
from rayembed.data.prepare import prepare
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.distributed.collectives import summed, world_size
from rayembed.models.contract import load_trainable_state
from rayembed.training.checkpoints.checkpoint import (
    Checkpoint,
    expected_position,
    save_checkpoint,
    seed_worker,
)
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive import step as step_module
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import CONTRASTIVE, run_step
from rayembed.training.engine import DeepSpeedEngine
from rayembed.training.objective import StepSettings
from rayembed.training.optimizer import learning_rate_factor

pytestmark = pytest.mark.distributed

STEPS, PAIRS, NEGATIVES = 3, 16, 2
WIDTHS = tuple(teacher.width for teacher in TEACHERS)
PROJECTION = "loss:projection"


def stage_of(loss):
    values = {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": PAIRS, "num_negatives": NEGATIVES, "in_batch_negatives": True},
        "loss": loss | {"infonce_weight": 0.5, "infonce_temperature": 0.1},
        "teachers": [{"teacher": "five"}, {"teacher": "eight"}],
        "optimizer": {"learning_rate": 0.01, "gradient_clipping": 0.5},
        "steps": STEPS,
        "checkpoint_every_steps": 2,
    }
    if loss["kind"] == "vector_distillation":
        values["optimizer"]["loss_learning_rate"] = 0.05
    return parse(StageConfig, values)


STAGES = {
    "vectors": stage_of({"kind": "vector_distillation"}),
    "relations": stage_of({"kind": "similarity_distillation", "temperature": 0.3}),
}


def reference(stage):
    """Weights and the projection's change after the stage, in one process by loops over texts."""
    model = ToyModel()
    initial = stage.loss.initial_parameters(Widths(8, WIDTHS))
    projection = {n: value.clone().requires_grad_() for n, value in initial.items()}
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "peak": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2], "peak": 0.01},
        {"params": [*projection.values()], "peak": 0.05},
    ]
    groups = [group for group in groups if group["params"]]
    decay = stage.optimizer.weight_decay
    for place, group in enumerate(groups):
        group["weight_decay"] = 0.0 if place else decay
    optimizer = torch.optim.AdamW(groups, eps=stage.optimizer.eps)
    everything = [p for group in groups for p in group["params"]]
    for step in range(STEPS):
        optimizer.zero_grad()
        records = made_up_records(PAIRS, seed=step)
        loss = taught_loss(model, records, stage.loss, NEGATIVES, **projection)
        plain = reference_loss(
            model, records, temperature=0.1, num_negatives=NEGATIVES, in_batch=True
        )
        (loss + 0.5 * plain).backward()
        torch.nn.utils.clip_grad_norm_(everything, 0.5)
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * learning_rate_factor(step, stage)
        optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for name, value in projection.items():
        weights[f"loss:{name}"] = (value.detach() - initial[name]).flatten()
    return weights


def train(rank, world, kind, zero, *, cache=True, save=None, resume=None):
    """The model's weights with the change of the projection."""
    stage, position = STAGES[kind], expected_position("s", "run", "plan")
    model = ToyModel()
    checkpoint = None if resume is None else Checkpoint(resume, position)
    if checkpoint is not None:
        load_trainable_state(model, checkpoint.weights())
    seed_worker(5, 0)
    placement = Placement(zero_stage=zero)
    engine = DeepSpeedEngine(model, stage, placement, "float32", world, WIDTHS)
    start = 0
    if checkpoint is not None:
        checkpoint.restore(engine)
        start = checkpoint.position.step

    def on_checkpoint(step):
        if save is not None and step == stage.checkpoint_every_steps:
            save.mkdir(parents=True, exist_ok=True)
            dist.barrier()
            save_checkpoint(save, engine, position.at(step))
            dist.barrier()

    settings = StepSettings(30 + 40 * rank, cache, torch.device("cpu"), pass_cost_tokens=1)
    weights = train_made_up(
        engine, model, stage, settings, start=start, on_checkpoint=on_checkpoint
    )
    assert PROJECTION not in weights, "the weights that are handed on are the model's"
    states = {name: state["weight"].cpu().clone() for name, state in engine.optimizer_state()}
    return weights | {name: v for name, v in states.items() if name == PROJECTION}


def cases(rank, world, folder):
    found = {}
    for kind in STAGES:
        for zero in (0, 2, 3):
            found[kind, zero, "cache"] = train(rank, world, kind, zero)
        found[kind, 1, "graphs"] = train(rank, world, kind, 1, cache=False)
    found["vectors", 3, "saved"] = train(rank, world, "vectors", 3, save=folder / str(world))
    found["vectors", 3, "resumed"] = train(rank, world, "vectors", 3, resume=folder / str(world))
    own = batch_loss.gather
    batch_loss.gather = lambda local: own(local).roll(1, 0) if local.ndim == 2 else own(local)
    found["control"] = train(rank, world, "relations", 2)
    batch_loss.gather = own
    named = step_module.named_values
    step_module.named_values = lambda shapes, values: named(shapes, values.detach())
    found["fixed"] = train(rank, world, "vectors", 2)
    step_module.named_values = named
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_weights_and_projection_are_those_of_one_process(world, tmp_path):
    expected = {kind: reference(stage) for kind, stage in STAGES.items()}
    found = run_distributed(cases, world, tmp_path)[0]
    control, fixed = found.pop("control"), found.pop("fixed")
    assert distance(control, expected["relations"]) > 1e-3, "with vectors of other documents"
    assert fixed[PROJECTION].abs().max() == 0.0, "the control without the projection's gradient"
    for (kind, zero, way), weights in found.items():
        # Adam divides by the root of the second moment: rounding of 1e-7 grows to about 1e-5.
        assert distance(weights, expected[kind]) < 1e-4, (kind, zero, way)
    assert expected["vectors"][PROJECTION].abs().max() > 0.05
    assert all(
        torch.equal(found["vectors", 3, "saved"][name], weight)
        for name, weight in found["vectors", 3, "resumed"].items()
    )


POLICIES = ("blended", "homogeneous", "clustered")


def load(config, weights, device):
    """Vectors of few bits and few texts, so that equal cosines are frequent."""

    def encode(texts, role):
        draws = [np.random.default_rng([sum(map(ord, t)), len(config.teacher)]) for t in texts]
        made = np.array([draw.standard_normal(4).round() + 0.1 for draw in draws], np.float32)
        return made / np.linalg.norm(made, axis=1, keepdims=True)

    return encode


def prepared(folder):
    """Stage name → settings and plan, one stage for each policy."""
    rows = [
        {"query": f"q{i}", "positive": f"p{i // 2}", "negatives": [f"n{i % 9}", f"p{(i + 5) % 24}"]}
        for i in range(48)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "pairs", "path": str(folder / "rows.jsonl"), "negatives": "negatives"}
    clusters = {"teacher": "a", "batch_pairs": 12, "iterations": 2, "restarts": 1}
    stages = [
        {
            "name": policy,
            "datasets": {"rows": 1},
            "batch": {
                "policy": policy,
                "global_pairs": 12,
                "num_negatives": 2,
                "in_batch_negatives": True,
            },
            "loss": {"kind": kind, "false_negatives": {"by": "teachers", "margin": margin}},
            "teachers": [{"teacher": "a"}, {"teacher": "bb"}],
            "optimizer": {"learning_rate": 1e-3},
            "steps": 3,
        }
        for policy, kind, margin in zip(
            POLICIES, ("infonce", "siglip", "infonce"), (0.0, 0.1, -0.05), strict=True
        )
    ]
    values = {
        "name": "test",
        "model": {"kind": "biencoder", "backbone": {"path": "none"}, "pooling": {"kind": "mean"}},
        "data": {"datasets": [{"name": "rows", "source": source, "clusters": clusters}]},
        "stages": stages,
        "evaluation": {"benchmarks": []},
    }
    run = parse(Run, values)
    loader = TeacherLoader(load, lambda reference: f"weights of {reference}")
    plans = prepare(run, PipelineContext(str(folder / "out"), 0, teacher_loader=loader))
    return {stage.name: (stage, plans[stage.name]) for stage in run.stages}


def masked(rank, world, stages):
    """Policy → losses of the steps, gradients of the last, and the masks' candidates in each."""
    found = {}
    for policy, (stage, folder) in stages.items():
        counts, losses, control = [], [], []
        of_rows = type(stage.loss).of_rows

        def counted(self, queries, candidates, parameters, of_rows=of_rows, counts=counts):
            counts.append(int(candidates.mask_BN.sum()))
            return of_rows(self, queries, candidates, parameters)

        make = CONTRASTIVE.batches(
            BatchPlan.open(folder), SimpleNamespace(tokenizer=ToyTokenizer()), stage, 0
        )
        assert isinstance(make, PairSteps)
        for step in range(3):
            for loss in (stage.loss, stage.loss.model_copy(update={"false_negatives": None})):
                model = ToyModel()
                config = stage.model_copy(update={"loss": loss})
                engine = EngineModule(model, loss)
                type(loss).of_rows = counted
                report = run_step(
                    model,
                    engine,
                    lambda loss, last: loss.backward(),
                    make(step),
                    config,
                    StepSettings(10**6, False, torch.device("cpu")),
                )
                type(loss).of_rows = of_rows
                (losses if loss is stage.loss else control).append(report.loss)
                if loss is stage.loss:
                    grads = [p.grad for p in model.parameters()]
        total = tuple(summed(torch.tensor(one)).tolist() for one in (counts[::2], counts[1::2]))
        for grad in grads:
            dist.all_reduce(grad)
        found[policy] = losses, control, total, [g / world_size() for g in grads]
    return found


def test_masks_are_the_same_for_any_number_of_workers_in_every_policy(tmp_path):
    stages = prepared(tmp_path)
    alone, several = (run_distributed(masked, world, stages)[0] for world in (1, 3))
    for policy in POLICIES:
        losses, control, (masks, all_of_them), grads = alone[policy]
        found, _, (others, _), other_grads = several[policy]
        assert masks == others, (policy, "as many candidates of all rows")
        assert all(some < every for some, every in zip(masks, all_of_them, strict=True))
        assert found == pytest.approx(losses, rel=1e-6)
        assert all(abs(a - b) > 1e-3 for a, b in zip(losses, control, strict=True))
        for grad, other in zip(grads, other_grads, strict=True):
            torch.testing.assert_close(grad, other, atol=1e-6, rtol=1e-4)
