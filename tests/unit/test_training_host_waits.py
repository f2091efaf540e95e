"""Of what a GPU's host waits for in a training step there is the read at its end, and no more."""

import dataclasses
import warnings

import architecture_contract as contract
import pytest
import torch
import torch.distributed as dist
from every_loss import LOSSES, stage_of
from host_waits import COPY_TO_DEVICE, COPY_TO_HOST, META, VALUE, host_waits, packs_on_meta
from made_up_records import made_up_records
from made_up_teachers import TEACHERS
from tiny_folders import TINY, tiny_parts, tiny_settings
from toy_model import ToyModel

from rayembed.config.loss import Widths
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.models.experts import ExpertMlps
from rayembed.models.loading.build import build_model
from rayembed.training.contrastive import batch_loss
from rayembed.training.contrastive import step as step_module
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.hidden_states import StateErrors
from rayembed.training.contrastive.step import CONTRASTIVE, run_step
from rayembed.training.objective import StepSettings

ONE_READ = {COPY_TO_HOST: 1}
"""Loss, counts, statistics and parameters of the loss, together."""

BUDGET = 90
"""Tokens of a micro-batch: two or more of each tiny model."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    home = tmp_path_factory.mktemp("parts")
    return {kind: tiny_parts(kind, home / kind) for kind in TINY}


def tiny(kind, parts):
    """A tiny model that is trained whole."""
    whole = {} if kind == "nomic-moe" else {"lora": None}
    return build_model(tiny_settings(kind, **whole), parts[kind], seed=1).train()


def on_meta(kind, parts, unpadded):
    """A tiny model in bfloat16, as a GPU would train it."""
    model = tiny(kind, parts)
    model.unpadded = unpadded
    for module in model.modules():
        if isinstance(module, ExpertMlps):
            module.products = "grouped"
    return model.to(META, torch.bfloat16)


def step(
    model, monkeypatch, *, cache=True, stage=contract.STAGE, pinned=True, states=None, reads=False
):
    """Waits of one step, and its number of micro-batches."""
    records = [dataclasses.replace(r, similarity=0.5) for r in made_up_records(8)]
    taught = TEACHERS if stage.teachers else ()
    batch = make_step_batch(0, records, stage.batch.num_negatives, model.tokenizer, taught)
    widths = Widths(model.dimensions[0], tuple(teacher.width for teacher in taught))
    engine = EngineModule(model, stage.loss, widths.teachers, states)

    def backward(loss, last):
        loss.backward()
        if reads:
            float(loss)

    with packs_on_meta(monkeypatch), host_waits(monkeypatch) as waits:
        settings = StepSettings(BUDGET, cache, META, pass_cost_tokens=1)
        with monkeypatch.context() as patch:
            if not pinned:
                patch.setattr(StepSettings, "pins", False)
            ready = CONTRASTIVE.ahead(model, batch, stage, settings)
        assert not waits.kinds, waits.places
        report = run_step(model, engine, backward, ready, stage, settings)
    assert report.micro_batches > 1
    return waits, report.micro_batches


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", TINY)
def test_a_step_over_packed_texts_waits_for_its_read_alone(kind, cache, parts, monkeypatch):
    waits, _ = step(on_meta(kind, parts, "always"), monkeypatch, cache=cache)
    assert waits.kinds == ONE_READ, waits.places
    assert waits.copies > 15


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("kind", TINY)
def test_torch_sees_no_other_wait_on_a_gpu(kind, cache, parts):
    model = tiny(kind, parts).to("cuda", torch.bfloat16)
    batch = make_step_batch(0, made_up_records(8), 2, model.tokenizer)
    settings = StepSettings(BUDGET, cache, torch.device("cuda"), pass_cost_tokens=1)
    engine, back = EngineModule(model), lambda loss, last: loss.backward()
    for mode in ("default", "warn"):  # the first step chooses and loads kernels
        ready = CONTRASTIVE.ahead(model, batch, contract.STAGE, settings)
        torch.cuda.set_sync_debug_mode(mode)
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                run_step(model, engine, back, ready, contract.STAGE, settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(one.message) for one in told if "synchronizing" in str(one.message)]
    assert len(waits) == 1, waits


ASKED = {"nvembed": 1, "biencoder": 1, "causal2vec": 3, "nomic-moe": 0}
"""How often transformers asks in a pass whether there is padding, by the architecture."""


@pytest.mark.parametrize("kind", ASKED)
def test_a_step_over_padded_texts_waits_for_what_transformers_asks(kind, parts, monkeypatch):
    waits, passes = step(on_meta(kind, parts, "never"), monkeypatch, cache=False)
    assert waits.kinds.pop(VALUE, 0) == passes * ASKED[kind]
    assert waits.kinds == ONE_READ, waits.places
    assert all("masking_utils" in place for place in waits.places if VALUE in place)


def toy():
    return ToyModel(context=True, experts=3).to(META)


@pytest.mark.parametrize(("name", "in_batch"), [*((n, True) for n in LOSSES), ("infonce", False)])
def test_no_loss_waits(name, in_batch, monkeypatch):
    monkeypatch.setattr(batch_loss, "_BLOCK", 100)  # several blocks of rows
    waits, _ = step(toy(), monkeypatch, stage=stage_of(LOSSES[name], in_batch=in_batch))
    assert waits.kinds == ONE_READ, waits.places


def test_no_loss_of_pairs_waits(monkeypatch):
    stage = stage_of({"kind": "cosent"}, in_batch=False, negatives=0)
    waits, _ = step(toy(), monkeypatch, stage=stage)
    assert waits.kinds == ONE_READ, waits.places


def test_hidden_states_of_a_teacher_are_compared_without_a_wait(parts, monkeypatch):
    model, teacher = (on_meta("biencoder", parts, "always") for _ in range(2))
    stage = contract.STAGE.model_copy(
        update={
            "hidden_states": parse(
                StageConfig,
                contract.STAGE.model_dump() | {"hidden_states": {"teacher": "whole"}},
            ).hidden_states
        }
    )
    waits, _ = step(model, monkeypatch, stage=stage, states=StateErrors(model, teacher))
    assert waits.kinds == ONE_READ, waits.places


def test_several_workers_also_read_once_what_the_largest_of_them_needs(monkeypatch):
    """Numbers of passes, and how many candidates have a text that stands in several."""
    messages = []

    def all_gather(everyone, local):
        messages.append(("gather", tuple(local.shape)))
        for part in everyone.chunk(2):
            part.copy_(local)

    def all_reduce(values, op=None):
        messages.append(("reduce", tuple(values.shape)))

    read = step_module.read_together

    def told(*tensors):
        found = read(*tensors)
        if len(tensors) == 2 and tensors[0].shape == (4,):  # without values there is no largest
            found[0] = torch.tensor([3, 2, 900, 120])
        return found

    for name, answer in (
        ("is_initialized", lambda: True),
        ("get_world_size", lambda: 2),
        ("get_rank", lambda: 0),
        ("all_gather_single", all_gather),
        ("all_reduce", all_reduce),
    ):
        monkeypatch.setattr(dist, name, answer)
    monkeypatch.setattr(step_module, "read_together", told)
    waits, passes = step(toy(), monkeypatch)
    assert passes == 3
    assert waits.kinds == {COPY_TO_HOST: 2}, waits.places
    # Hashes and flags of eight rows with two negatives go in one message.
    assert messages[:2] == [("gather", (8, 6)), ("reduce", (4,))]


def test_the_control_a_step_that_does_wait_is_told(monkeypatch):
    waits, _ = step(toy(), monkeypatch, pinned=False)
    copies = waits.kinds.pop(COPY_TO_DEVICE)
    assert waits.kinds == ONE_READ
    assert waits.copies == 0
    held, _ = step(toy(), monkeypatch)
    assert held.copies == copies
    read, passes = step(toy(), monkeypatch, reads=True)
    assert read.kinds[VALUE] >= passes


@pytest.mark.parametrize(
    ("asks", "kind"),
    [
        (lambda x: x[x > 0], "index by a mask"),
        (lambda x: x.masked_fill_(x > 0, 0).nonzero(), "nonzero"),
        (lambda x: x.masked_select(x > 0), "masked_select"),
        (lambda x: x.unique(), "_unique2"),
        (lambda x: x.bincount(minlength=4), "bincount"),
        (lambda x: x.repeat_interleave(x), "repeat_interleave"),
        (lambda x: x[torch.tensor([1, 0])], COPY_TO_DEVICE),
        (lambda x: x + torch.tensor([1], device=META), COPY_TO_DEVICE),
        (lambda x: x + torch.ones(1).to(META), COPY_TO_DEVICE),
        (lambda x: x.copy_(torch.ones(5)), COPY_TO_DEVICE),
        (lambda x: x.cpu(), COPY_TO_HOST),
        (lambda x: bool((x > 0).all()), VALUE),
        (lambda x: x.tolist(), COPY_TO_HOST),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_each_way_to_wait_is_counted(asks, kind, monkeypatch):
    x = torch.zeros(5, dtype=torch.int64, device=META)
    with host_waits(monkeypatch) as waits:
        asks(x)
    assert waits.kinds == {kind: 1}
