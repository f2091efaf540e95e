"""Whole training steps, encoding and search by the code that a GPU runs, without one."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_trainings import LOSSES
from fake_cuda import CAPABILITIES, GPU, Operations, fake_gpu, faked, to_gpu
from made_up_records import made_up_records
from tiny_folders import TINY, tiny_parts, tiny_settings
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    unset_fake_temporarily,
)

from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.models.loading.build import build_model
from rayembed.models.passes.passes import passes
from rayembed.search import tiles
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive import step as step_module
from rayembed.training.contrastive.collated import collated_step
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

CHANGES = {
    "nvembed": {"lora": {"rank": 2, "alpha": 4, "dropout": 0.1}},
    "nomic-moe": {},
}
"""Settings of an architecture that differ from its tiny ones; others train all weights."""


class OnHost(StepSettings):
    """Settings of a GPU whose batches are not pinned, which asks a driver."""

    pins = False


def stage_of(loss: dict | None = None, pairs: int = 8) -> StageConfig:
    graded = loss is not None and loss["kind"] == "cosent"
    teachers = [{"teacher": "five"}, {"teacher": "eight"}]
    distils = loss is not None and loss["kind"].endswith("_distillation")
    return parse(
        StageConfig,
        {
            "name": "s",
            "datasets": {"d": 1},
            "batch": {
                "global_pairs": pairs,
                "num_negatives": 0 if graded else 2,
                "in_batch_negatives": not graded,
            },
            "loss": loss or {"temperature": 0.1},
            "optimizer": {"learning_rate": 0.1},
            "steps": 1,
            **({"teachers": teachers} if distils else {}),
        },
    )


def stepped(
    kind: str,
    folder: Path,
    capability: tuple[int, int],
    grad_cache: bool,
    stage: StageConfig | None = None,
    free: int = 60 << 30,
) -> Operations:
    """Run a step on a fake GPU; every trained weight has a gradient there, and one read is made."""
    stage = stage or stage_of()
    packs = capability >= (8, 0)
    dtype = torch.bfloat16 if packs else torch.float32
    made = tiny_settings(kind, **CHANGES.get(kind, {"lora": None}))
    model = build_model(made, tiny_parts(kind, folder), seed=1).to(dtype).train()
    model.unpadded = "always" if packs else "never"
    negatives = stage.batch.num_negatives
    records = made_up_records(stage.batch.global_pairs)
    if stage.loss.kind == "cosent":
        records = [replace(record, similarity=0.5) for record in records]
    widths = (5, 8) if stage.teachers else ()
    teachers = [partial(_vectors, width=width) for width in widths]
    batch = make_step_batch(0, records, negatives, model.tokenizer, teachers)
    engine = EngineModule(model, stage.loss, widths)
    settings = OnHost(90, grad_cache, GPU, pass_cost_tokens=1)
    operations, reads = Operations(), []

    def read(*tensors):
        reads.append(len(tensors))
        return [np.ones(one.shape) for one in tensors]

    with ExitStack() as stack:
        mode = stack.enter_context(fake_gpu(capability, free))
        with unset_fake_temporarily():
            ready = collated_step(model, batch, stage, settings)
        ready = faked(mode, ready)
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(step_module, "read_together", read)
        patch.setattr(step_module, "statistics_metrics", lambda *_: {})  # of what was read
        to_gpu(engine)
        stack.enter_context(operations)
        run_step(model, engine, lambda loss, last: loss.backward(), ready, stage, settings)
    trained = [p for p in engine.parameters() if p.requires_grad]
    assert {p.grad.device for p in trained if p.grad is not None} == {GPU}
    without = sum(p.grad is None for p in trained)
    assert without == 0, f"{without} of {len(trained)} weights have no gradient"
    assert len(reads) == 1, "of all values of a step, at its end"
    assert operations.to_host == 0
    return operations


def _vectors(places, width):
    return np.full((len(places), width), width**-0.5, dtype=np.float16)


@pytest.mark.parametrize("grad_cache", [True, False], ids=["GradCache", "graphs"])
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", [kind for kind in TINY if kind != "nomic-moe"])
def test_a_step_of_each_architecture(kind, capability, grad_cache, tmp_path) -> None:
    operations = stepped(kind, tmp_path, capability, grad_cache)
    packed = capability >= (8, 0)
    assert bool(operations.names["_varlen_attn"]) == packed
    assert bool(operations.names["_varlen_attn_backward"]) == packed


@pytest.mark.parametrize("grad_cache", [True, False], ids=["GradCache", "graphs"])
def test_experts_take_the_grouped_kernel_where_it_is_fused(grad_cache, tmp_path) -> None:
    operations = stepped("nomic-moe", tmp_path, (9, 0), grad_cache)
    assert operations.names["_grouped_mm"] >= 12


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_a_step_of_each_loss(loss, tmp_path) -> None:
    stepped("biencoder", tmp_path, (9, 0), True, stage_of(loss))


def test_a_loss_in_blocks_of_rows(tmp_path, monkeypatch) -> None:
    asked = []

    def fit(total, free):
        asked.append((total, free))
        return 64

    monkeypatch.setattr(batch_loss, "_BLOCK", 16)
    monkeypatch.setattr(batch_loss, "pairs_that_fit", fit)
    stepped("biencoder", tmp_path, (9, 0), False, free=7 << 30)
    assert set(asked) == {(80 << 30, 7 << 30)}


def test_a_copy_to_the_host_or_a_value_within_a_step_is_seen(tmp_path, monkeypatch) -> None:
    real = step_module.contrastive_loss

    def copies(embeddings, *others):
        embeddings.cpu()
        return real(embeddings, *others)

    def reads(embeddings, *others):
        assert embeddings.isfinite().all()
        return real(embeddings, *others)

    def mixes(embeddings, *others):
        return real(embeddings + torch.ones(embeddings.shape), *others)

    for fault, error in (
        (copies, AssertionError),
        (reads, DataDependentOutputException),
        (mixes, RuntimeError),
    ):
        monkeypatch.setattr(step_module, "contrastive_loss", fault)
        with pytest.raises(error):
            stepped("biencoder", tmp_path, (9, 0), False)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("kind", [kind for kind in TINY if kind != "nomic-moe"])
def test_texts_are_encoded(kind, capability, tmp_path, monkeypatch) -> None:
    made = tiny_settings(kind, **CHANGES.get(kind, {"lora": None}))
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float32
    model = build_model(made, tiny_parts(kind, tmp_path), seed=1).to(dtype).eval()
    tokens = model.tokenizer(["Paris", "the red fox jumps", "a river"] * 5, "document")
    tokens = model.first_pass(tokens, 40)
    lengths = [len(one["input_ids"]) for one in tokens]
    with fake_gpu(capability) as mode, torch.inference_mode(), Operations() as operations:
        to_gpu(model)
        monkeypatch.setattr("rayembed.models.passes.passes.pinned", partial(faked, mode))
        context = None
        if model.uses_context:
            context = torch.empty(4, model.dimensions[0], device=GPU)
        embed = partial(_embedded, model, context)
        found = list(passes(model, tokens, lengths, 40, embed))
    assert sorted(place for places, _ in found for place in places) == [*range(15)]
    assert {tuple(made.shape[1:]) for _, made in found} == {(model.dimensions[0],)}
    assert {(made.device.type, made.dtype) for _, made in found} == {("cpu", torch.float32)}
    assert operations.to_host == len(found), "vectors alone are copied to the host"


def _embedded(model, context, batch):
    return (model(batch) if context is None else model(batch, context)).embeddings


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_tiles_of_a_search_fit_the_memory(capability) -> None:
    with fake_gpu(capability, free=8 << 30):
        large = tiles.tiles_of(GPU, 768)
    with fake_gpu(capability, free=1 << 30):
        small = tiles.tiles_of(GPU, 768)
    assert large != small
