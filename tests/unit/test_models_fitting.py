"""Memory that runs out while texts are embedded or scored: fewer at a time, the same vectors."""

import logging

import numpy as np
import pytest
import torch
import transformers
from small_device import RAN_OUT, SAYS
from tiny_models import save_cross_encoder, save_encoder
from toy_model import ToyModel

from rayembed.config.mining import CrossEncoder, Teacher
from rayembed.data.mining.rescoring import load_cross_encoder
from rayembed.data.vectors.teacher import load_teacher, weights_of
from rayembed.errors import DeviceMemoryError
from rayembed.machine.hardware import say_once
from rayembed.models.attention import unpadded
from rayembed.models.contract import EmbeddingModel
from rayembed.models.loading.load import load_model
from rayembed.models.passes import passes as passes_module
from rayembed.models.passes.encoding import encode, encode_context
from rayembed.models.passes.fitting import room_for
from rayembed.models.passes.passes import passes

TEXTS = [f"{'a text of ' * (i % 7)}number {i}" for i in range(40)]
FITS = 130
"""Padded tokens that memory has room for; the longest text has 70."""


@pytest.fixture(autouse=True)
def warnings(caplog):
    say_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="rayembed")


def filled(forward, fits=FITS, error=None):
    """The forward pass of a device that has room for so many tokens, and the tokens of all passes
    that were tried.
    """
    tried = []

    def pass_(*given, **named):
        ids = named["input_ids"] if "input_ids" in named else given[0]["input_ids"]
        tried.append(ids.numel())
        if ids.numel() > fits:
            raise error or torch.OutOfMemoryError(SAYS)
        return forward(*given, **named)

    return pass_, tried


def test_passes_shrink_until_they_fit_and_stay_so(caplog):
    model = ToyModel()
    expected = encode(model, TEXTS, role="query", tokens_per_batch=1000)
    counted = []
    model.forward, tried = filled(model.forward)

    def embed():
        return encode(
            model,
            TEXTS,
            role="query",
            tokens_per_batch=1000,
            progress=lambda *numbers: counted.append(numbers),
        )

    np.testing.assert_allclose(embed(), expected, atol=1e-6)
    assert [done for done, _ in counted] == sorted(done for done, _ in counted)
    assert counted[-1] == (40, 40)
    assert [size > FITS for size in tried[:3]] == [True, True, False]
    tried.clear()
    np.testing.assert_allclose(embed(), expected, atol=1e-6)
    assert max(tried) <= FITS, "a budget that was too large is not tried again"
    assert len([line for line in caplog.messages if "memory ran out" in line]) == 2
    assert "tokens; the passes of this process have" in caplog.messages[0]
    assert SAYS in caplog.messages[0]


def test_memory_that_runs_out_later_costs_no_text_and_no_order(monkeypatch):
    """The third pass fails, when the result of the second is still being copied."""
    model = ToyModel()
    expected = encode(model, TEXTS, role="query", tokens_per_batch=400)
    forward, calls = model.forward, []

    def third(batch):
        calls.append(batch)
        if len(calls) == 3:
            raise torch.OutOfMemoryError(SAYS)
        return forward(batch)

    model.forward = third
    found = encode(model, TEXTS, role="query", tokens_per_batch=400)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_text_that_does_not_fit_alone_is_named():
    model = ToyModel().train()
    model.forward, _ = filled(model.forward, 60)
    with pytest.raises(DeviceMemoryError, match=r"^a text of 70 tokens does not fit into memory: "):
        encode(model, TEXTS, role="query")
    assert model.training
    assert len(encode(model, TEXTS[:3], role="query")) == 3


def test_contexts_and_packed_texts_shrink_too(monkeypatch):
    model = ToyModel(context=True).eval()
    whole = model.tokenizer
    model.tokenizer = lambda texts, role, _, allow_empty: whole(texts, role)
    model.tokenizer.collate = whole.collate
    expected = encode_context(model, TEXTS, tokens_per_batch=1000)
    model.embed_context, tried = filled(model.embed_context)
    torch.testing.assert_close(encode_context(model, TEXTS, tokens_per_batch=1000), expected)
    assert max(tried) > FITS
    # Packed, the tokens of a pass are those of its texts.
    monkeypatch.setattr(passes_module, "packs", lambda _: True)

    def pack(tokens):
        return {"input_ids": torch.from_numpy(np.concatenate([t["input_ids"] for t in tokens]))}

    tokens, plain = whole(TEXTS, "query"), ToyModel()
    embed, tried = filled(lambda batch: batch["input_ids"].sum().view(1, 1))
    lengths = [len(one["input_ids"]) for one in tokens]
    made = list(passes(plain, tokens, lengths, 1000, embed, collate=(whole.collate, pack)))
    assert sorted(place for places, _ in made for place in places) == list(range(len(TEXTS)))
    for places, total in made:
        assert total.item() == sum(int(tokens[place]["input_ids"].sum()) for place in places)
    assert tried[0] > FITS >= tried[-1]


def test_a_model_that_does_not_fit_is_named(tmp_path, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError(SAYS)

    folder = save_encoder(tmp_path)
    monkeypatch.setattr(EmbeddingModel, "to", full)
    with pytest.raises(DeviceMemoryError, match=r"^the model '.*' does not fit into memory: .*79"):
        load_model(folder)
    moves = iter([lambda model: model, full])  # first where it is loaded, then to its device
    monkeypatch.setattr(EmbeddingModel, "to", lambda model, _: next(moves)(model))
    config = Teacher(teacher=str(folder), dtype="float32")
    with pytest.raises(DeviceMemoryError, match=r"^the teacher '.*' does not fit into memory: "):
        load_teacher(config, weights_of(str(folder)))


def test_a_reranker_that_does_not_fit_is_named(tmp_path, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError(SAYS)

    reranker = CrossEncoder(model=str(save_cross_encoder(tmp_path / "reranker")))
    monkeypatch.setattr(torch.nn.Module, "to", full)
    with pytest.raises(DeviceMemoryError, match=r"^the reranker '.*' does not fit into memory: "):
        load_cross_encoder(reranker, "does not fit")


@pytest.mark.parametrize("error", RAN_OUT, ids=str)
def test_memory_runs_out_in_libraries_too(error):
    model, other = ToyModel(), RuntimeError("CUDA error: an illegal memory access was encountered")
    expected = encode(model, TEXTS, role="query", tokens_per_batch=1000)
    forward = model.forward
    model.forward, tried = filled(forward, error=error)
    found = encode(model, TEXTS, role="query", tokens_per_batch=1000)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert tried[0] > FITS >= tried[-1]
    with pytest.raises(DeviceMemoryError, match=r"^the model does not fit"), room_for("the model"):
        raise error
    with pytest.raises(RuntimeError, match="illegal"), room_for("the model"):
        raise other
    model.forward, _ = filled(forward, 0, other)
    with pytest.raises(RuntimeError, match="illegal"):
        encode(model, TEXTS, role="query")


@pytest.mark.parametrize("error", RAN_OUT, ids=str)
def test_memory_that_runs_out_in_a_trial_of_packed_texts_is_not_taken_for_its_result(error):
    """Else texts would be padded for as long as the process lives."""

    def full(*_, **__):
        raise error

    part = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1)).eval()
    with pytest.raises(type(error)):
        unpadded.why_not_alike("part", part, full, full, 9)
    assert not unpadded._trials[part]


def test_a_reranker_goes_on_with_fewer_pairs(tmp_path, monkeypatch, caplog):
    config = CrossEncoder(model=str(save_cross_encoder(tmp_path)), dtype="float32")
    score = load_cross_encoder(config, "rerank")
    pairs = [(f"query {i}", text) for i, text in enumerate(TEXTS)]
    expected = score(pairs)
    kind = transformers.BertForSequenceClassification
    shape, tried = filled(kind.forward, 200)
    monkeypatch.setattr(kind, "forward", shape)
    np.testing.assert_allclose(score(pairs), expected, atol=1e-6)
    assert any(size > 200 for size in tried)
    tried.clear()
    np.testing.assert_allclose(score(pairs), expected, atol=1e-6)
    assert max(tried) <= 200
    assert any("memory ran out in a pass of" in line for line in caplog.messages)
    score([("q", "a")] * 16)
    assert tried[-1] > 8 * 5, "short pairs go as many at a time as before"
    monkeypatch.setattr(kind, "forward", filled(kind.forward, 3)[0])
    with pytest.raises(DeviceMemoryError, match="tokens does not fit into memory"):
        score(pairs)
