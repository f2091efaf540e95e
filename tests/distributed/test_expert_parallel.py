"""Experts shared out among two workers: weights, norms and checkpoints are those of one process.

Two layers of four experts, with a bias of their own, one balance loss, weight decay, clipping. The
workers have micro-batches of other sizes, and one has fewer of them.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from plain_adamw import train_plainly
from run_distributed import run_distributed
from safetensors.torch import load_file
from tiny_models import save_encoder
from told import in_turn
from train_made_up import PLAN, MadeUp, distance, made_up_batch

from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.distributed.expert_group import ExpertGroup
from rayembed.machine.hardware import pass_cost_tokens
from rayembed.models.contract import cost
from rayembed.models.experts import expert_layers
from rayembed.models.loading.build import build_model
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.passes.micro_batches import cut_by_length
from rayembed.training import trainer as trainer_module
from rayembed.training.checkpoints.checkpoint import Checkpoint
from rayembed.training.engine import expert_group
from rayembed.training.expert_parallel import spread_experts
from rayembed.training.trainer import Callback, StageTrainer

pytestmark = pytest.mark.distributed

STEPS, EXPERTS = 3, 4
STAGE = parse(
    StageConfig,
    {
        "name": "s",
        "datasets": {"d": 1},
        "batch": {"global_pairs": 8, "num_negatives": 2, "in_batch_negatives": True},
        "loss": {"temperature": 0.1},
        "optimizer": {
            "learning_rate": 0.002,
            "weight_decay": 0.1,
            "gradient_clipping": 0.5,
            "eps": 1e-4,  # Adam would magnify rounding where a gradient is near zero
        },
        "steps": STEPS,
        "checkpoint_every_steps": 2,
    },
)
IDLE = (2, 3)
"""Experts that get no token in some runs: all of the second worker's."""

TOLERANCE = 5e-6
"""Sums over workers and micro-batches in another order; the weights move by about 3e-3."""


def config(top_k, dtype="float32"):
    return parse(
        NomicMoeConfig,
        {
            "backbone": {"path": "given", "dtype": dtype},
            "experts": {"num_experts": EXPERTS, "top_k": top_k, "every": 1},
            "query_max_length": 32,
            "document_max_length": 32,
        },
    )


def start(folder, top_k=2, *, idle=False, dtype="float32"):
    """A model whose experts differ and whose routers choose clearly, and never `IDLE` if asked."""
    model = build_model(config(top_k, dtype), folder, seed=3)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for layer in model.backbone.encoder.layers:
            for weight in (*layer.mlp.experts.mlp.parameters(), layer.mlp.router.layer.weight):
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(0.3 * noise.to(weight.dtype))
            if idle:
                # A norm's output adds up to the sum of its bias, whatever went into it.
                layer.norm1.weight.fill_(1.0)
                layer.norm1.bias.fill_(0.5)
                layer.mlp.router.layer.weight[list(IDLE)] -= 1.0
    return model


def run(
    rank,
    world,
    folder,
    *,
    zero=2,
    over=2,
    groups_of=None,
    top_k=2,
    cache=True,
    again=False,
    idle=False,
    dtype="float32",
    save=None,
    resume=None,
    changed=None,
):
    """Whole weights on this worker and, on the first one, what each step told.

    Args:
        over: workers that share the experts out.
        groups_of: workers of a group, where others than so many are to form one.
        save: name of the checkpoint that it leaves after two steps.
        resume: name of the one that it goes on from.
        changed: what makes it wrong: called with a `MonkeyPatch` before anything runs.
    """
    records = []

    class Kept(Callback):
        on_step_end = records.append

        def on_checkpoint(self, step, part):
            if save is not None and step == 2:
                (folder / save).mkdir(exist_ok=True)
                for path in part.iterdir():
                    path.rename(folder / save / path.name)
                dist.barrier()

    trainer = StageTrainer(
        STAGE,
        Placement(
            workers=world,
            zero_stage=zero,
            expert_parallel=over,
            micro_batch_tokens=budget(rank),
            grad_cache=cache,
            gradient_checkpointing=again,
        ),
        start(folder, top_k, idle=idle, dtype=dtype),
        MadeUp(),
        PLAN,
        seed=5,
        dtype=dtype,
        run_fingerprint="run",
        callbacks=[Kept()],
        stream=in_turn,
    )
    with pytest.MonkeyPatch.context() as patch:
        if groups_of is not None:
            patch.setattr(trainer_module, "expert_group", lambda size: expert_group(groups_of))
        if changed is not None:
            changed(patch)
        engine = trainer.fit(resume and Checkpoint(folder / resume, trainer.position))
    own_rows = {len(layer.mlp.w1) for layer in expert_layers(engine.model)}
    assert own_rows == {EXPERTS // (groups_of or over) * 48}
    weights = {name: weight.clone() for name, weight in engine.trainable_weights()}
    told = ("loss", "grad_norm", "experts/")
    return weights, [{k: v for k, v in r.items() if k.startswith(told)} for r in records]


def averaging_over_those_who_share(patch):
    """Gradients of experts divided by the workers of the same experts, which is not by all."""

    def spread(model, group):
        spread_experts(model, group)
        for layer in expert_layers(model):
            for parameter in layer.mlp.parameters():
                parameter.register_hook(lambda grad: grad * group.size)

    patch.setattr(trainer_module, "spread_experts", spread)


def taking_states_of_others(patch):
    """States of the experts of another worker of the group."""
    patch.setattr(ExpertGroup, "share_of", lambda self, whole: whole.chunk(self.size)[~self.place])


def budget(rank):
    """Tokens of a micro-batch, by which workers have other numbers of them."""
    return 60 + 60 * rank


WAYS = {
    "zero 0, top 1": {"zero": 0, "top_k": 1},
    "zero 0, top 2, one graph, recomputed": {"zero": 0, "cache": False, "again": True},
    "zero 0, idle": {"zero": 0, "idle": True, "cache": False},
    "zero 1, top 1, recomputed": {"zero": 1, "top_k": 1, "again": True},
    "zero 1, top 2": {"zero": 1},
    "zero 2, top 1, one graph": {"zero": 2, "top_k": 1, "cache": False},
    "zero 2, top 2": {"zero": 2, "save": "shared"},
    "zero 2, idle": {"zero": 2, "idle": True},
    # Each worker holds all experts, which are reduced and partitioned over the workers that do.
    "zero 0, groups of one": {"zero": 0, "groups_of": 1},
    "zero 2, groups of one": {"zero": 2, "groups_of": 1},
    "not shared out": {"zero": 1, "over": 1, "save": "whole"},
}
"""How experts are shared out between two workers, and once not."""


def trained_ways(rank, world, folder):
    found = {way: run(rank, world, folder, **options) for way, options in WAYS.items()}
    found["wrong factor"] = run(rank, world, folder, changed=averaging_over_those_who_share)
    found["shared, then whole"] = run(rank, world, folder, over=1, zero=1, resume="shared")
    found["whole, then shared"] = run(rank, world, folder, zero=0, resume="whole")
    found["foreign states"] = run(
        rank, world, folder, zero=0, resume="whole", changed=taking_states_of_others
    )
    found["bf16"] = run(rank, world, folder, dtype="bfloat16")
    found["bf16, not shared out"] = run(rank, world, folder, dtype="bfloat16", over=1)
    found["bf16, wrong factor"] = run(
        rank, world, folder, dtype="bfloat16", changed=averaging_over_those_who_share
    )
    batch = made_up_batch(start(folder), STAGE, 0)
    costs = [cost(t) for t in batch.tokens]
    a_pass = pass_cost_tokens("cpu", start(folder))
    found["micro-batches"] = len(cut_by_length(costs, budget(rank), a_pass))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return Path(save_encoder(tmp_path_factory.mktemp("nomic") / "bert"))


@pytest.fixture(scope="module")
def trained(folder):
    return run_distributed(trained_ways, 2, folder)


@pytest.fixture(scope="module")
def expected(folder):
    """Weights and reports of torch's AdamW in one process, by top k and whether experts idle."""
    return {
        (top_k, idle): train_plainly(start(folder, top_k, idle=idle), STAGE)
        for top_k, idle in ((1, False), (2, False), (2, True))
    }


def reference(expected, way):
    return expected[WAYS[way].get("top_k", 2), WAYS[way].get("idle", False)]


@pytest.mark.parametrize("way", WAYS)
def test_weights_losses_and_norms_are_those_of_one_process(trained, expected, way):
    weights, records = reference(expected, way)
    for worker in trained:
        assert distance(worker[way][0], weights) < TOLERANCE
    told = trained[0][way][1]
    assert len(told) == STEPS
    for one, other in zip(told, records, strict=True):
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)


def test_experts_learn_and_the_norm_is_clipped(expected, folder):
    """Otherwise the comparison would show nothing of them."""
    weights, records = expected[2, False]
    before = dict(start(folder).named_parameters())
    for part in ("mlp.w1", "mlp.w2", "mlp.b1", "experts.bias", "router", "Wqkv"):
        moved = max((before[n] - weights[n]).abs().max().item() for n in weights if part in n)
        assert moved > 50 * TOLERANCE, part
    assert min(record["grad_norm"] for record in records) > STAGE.optimizer.gradient_clipping


def test_one_worker_has_fewer_micro_batches_than_the_other(trained):
    first, second = (worker["micro-batches"] for worker in trained)
    assert first > second > 1


def test_idle_experts_are_those_of_one_worker(trained, expected):
    for record in (*expected[2, True][1], *trained[0]["zero 2, idle"][1]):
        shares = {k: v for k, v in record.items() if "/share_" in k}
        assert {name for name, share in shares.items() if share == 0} == {
            f"experts/layer_{layer}/share_{expert}" for layer in (0, 1) for expert in IDLE
        }


def test_with_another_factor_of_the_gradient_the_weights_differ(trained, expected):
    """The control: DeepSpeed's division by all workers is the right one."""
    weights, records = expected[2, False]
    found, told = trained[0]["wrong factor"]
    assert distance(found, weights) > 10 * TOLERANCE
    assert told[0]["grad_norm"] > 1.01 * records[0]["grad_norm"]


def test_workers_hand_out_the_same_whole_weights(trained):
    first, second = trained
    for way in (*WAYS, "bf16"):
        assert distance(first[way][0], second[way][0]) == 0, way


@pytest.mark.parametrize("way", ["shared, then whole", "whole, then shared"])
def test_a_run_goes_on_from_a_checkpoint_of_other_workers_experts(trained, expected, way):
    weights, records = expected[2, False]
    for worker in trained:
        assert distance(worker[way][0], weights) < TOLERANCE
    told = trained[0][way][1]
    assert len(told) == STEPS - 2
    assert told[0] == pytest.approx(records[2], rel=1e-5, abs=1e-5)


def test_with_the_states_of_other_experts_the_weights_differ(trained, expected):
    """The control of the test above."""
    assert distance(trained[0]["foreign states"][0], expected[2, False][0]) > 10 * TOLERANCE


def test_checkpoints_hold_the_same_whole_states(trained, folder):
    def states(name):
        return {
            k: v for file in (folder / name).glob("state-*") for k, v in load_file(file).items()
        }

    shared, whole = states("shared"), states("whole")
    assert {k: v.shape for k, v in shared.items()} == {k: v.shape for k, v in whole.items()}
    assert distance(shared, whole) < TOLERANCE


def test_bfloat16_experts_move_as_those_that_are_not_shared_out(trained):
    """Less apart than rounding puts them, and than a wrong factor of the gradient does."""
    first = trained[0]

    def apart(way, other):
        weights, others = first[way][0], first[other][0]
        experts = [name for name in weights if "experts" in name]
        return sum((weights[n].float() - others[n].float()).abs().sum().item() for n in experts)

    shared_out = apart("bf16", "bf16, not shared out")
    assert shared_out < 0.25 * apart("bf16, not shared out", "not shared out")
    assert shared_out < 0.5 * apart("bf16, wrong factor", "bf16, not shared out")


def four_workers(rank, world, folder):
    return {zero: run(rank, world, folder, zero=zero) for zero in (0, 2)}


@pytest.mark.slow("four processes load their libraries for it; both sides of it stand above")
def test_two_groups_of_two_workers_reduce_the_experts_that_they_share(folder, expected):
    weights, records = expected[2, False]
    workers = run_distributed(four_workers, 4, folder)
    for zero in (0, 2):
        for worker in workers:
            assert distance(worker[zero][0], weights) < TOLERANCE, zero
        for one, other in zip(workers[0][zero][1], records, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-5), zero
