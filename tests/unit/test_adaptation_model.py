"""Rotary conversion and masked-language modelling against transformers and plain torch."""

from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from host_waits import COPY_TO_HOST, META, host_waits
from operators import Operators, has_cuda_kernel
from tiny_adaptation import masked_model, save_masked
from tiny_models import save_encoder, save_nomic, wordpiece_tokenizer
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotated

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.build import build_model
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.nomic_moe.shape import read_shape
from rayembed.training.objective import StepSettings
from rayembed_extras.adaptation.batch import MaskedBatch
from rayembed_extras.adaptation.encoder import (
    HEAD_FILE,
    load_masked_language_model,
    save_adapted,
    vocabulary,
)
from rayembed_extras.adaptation.masked import MaskedLanguage
from rayembed_extras.adaptation.masked_language import collate_masked
from rayembed_extras.adaptation.settings import MaskedTraining, RotaryEncoderConfig

FAMILIES = ("bert", "xlm-roberta")
LENGTHS = (40, 23, 9)
BASE = 10_000.0


def config(path="given", **settings):
    values = {"backbone": {"path": str(path), "dtype": "float32"}} | settings
    return parse(RotaryEncoderConfig, values)


def load(folder, **settings):
    return load_masked_language_model(folder, config(**settings), max_length=96, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    return {family: save_masked(folder / family, family) for family in FAMILIES}


def reference_logits(family, ids, base=BASE, *, absolute=False):
    """What transformers' own modules say of one sequence, with Llama's rotary positions.

    Word vectors, projections, norms, MLPs and the head are those of the model of transformers;
    attention between them is written out here.
    """
    model = masked_model(family)
    body = model.bert if family == "bert" else model.roberta
    embeddings, hidden, heads = body.embeddings, body.config.hidden_size, 4
    types = embeddings.token_type_embeddings.weight[0]
    x = embeddings.word_embeddings(ids) + types
    if absolute:
        x = x + embeddings.position_embeddings.weight[: len(ids)]
    x = embeddings.LayerNorm(x)
    sizes = {"hidden_size": hidden, "num_attention_heads": heads}
    rotary = LlamaRotaryEmbedding(
        LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": base})
    )
    cos, sin = rotary(x[None], torch.arange(len(ids))[None])
    for layer in body.encoder.layer:
        own = layer.attention.self
        query, key, value = (
            part(x).view(len(ids), heads, -1).transpose(0, 1)[None]
            for part in (own.query, own.key, own.value)
        )
        if not absolute:
            query, key = rotated(query, key, cos, sin)
        scores = query @ key.transpose(2, 3) / (hidden / heads) ** 0.5
        attended = (scores.softmax(dim=-1) @ value)[0].transpose(0, 1).reshape(len(ids), -1)
        x = layer.attention.output(attended, x)
        x = layer.output(layer.intermediate(x), x)
    return (model.cls if family == "bert" else model.lm_head)(x)


@torch.no_grad()
def our_logits(model, ids):
    batch = {"input_ids": ids[None], "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    states = model.head(model.encoder(**batch).last_hidden_state[0])
    words = model.encoder.embeddings.word_embeddings.weight[: len(model.head.bias)]
    return functional.linear(states, words, model.head.bias)


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_models_say_what_transformers_modules_say_with_rotary_positions(family, folders):
    ids = torch.from_numpy(np.random.default_rng(0).integers(5, 190, size=50))
    model = load(folders[family])
    found = our_logits(model, ids)
    with torch.no_grad():
        expected = reference_logits(family, ids)[:, : found.shape[1]]
        # What float32 sums to in another order; other positions are far off.
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
        for wrong in ({"absolute": True}, {"base": 100_000.0}):
            other = reference_logits(family, ids, **wrong)[:, : found.shape[1]]
            assert (found - other).abs().max() > 1e-2
    assert not any("position" in name for name in model.state_dict())
    assert model.encoder.config.vocab_size == 256  # 200 words, up to a multiple of 64


def made_up_batch(seed=0):
    numbers = np.random.default_rng(seed)
    ids = [numbers.integers(5, 150, size=n).astype(np.int32) for n in LENGTHS]
    places = [np.flatnonzero(numbers.random(n) < 0.3) for n in LENGTHS]
    words = [one[at] for one, at in zip(ids, places, strict=True)]
    for one, at in zip(ids, places, strict=True):
        one[at] = 4
    return MaskedBatch(0, ids, places, words, np.array([0, 1, 0]))


def plain_loss(model, batch):
    """The mean over all masked tokens, sequences one by one."""
    losses = []
    for ids, places, words in zip(batch.input_ids, batch.places, batch.words, strict=True):
        sequence = torch.from_numpy(ids.astype(np.int64))[None]
        hidden = model.encoder(sequence, torch.ones_like(sequence)).last_hidden_state[0]
        states = model.head.layer_norm(functional.gelu(model.head.dense(hidden)))
        table = model.encoder.embeddings.word_embeddings.weight[: len(model.head.bias)]
        logits = states @ table.T + model.head.bias
        labels = torch.full((len(ids),), -100)
        labels[places] = torch.from_numpy(words.astype(np.int64))
        losses.append(functional.cross_entropy(logits, labels, reduction="sum"))
    return torch.stack(losses).sum() / sum(map(len, batch.words))


TRAINING = parse(
    MaskedTraining,
    {"global_sequences": 3, "optimizer": {"learning_rate": 0.01}, "steps": 2},
)


def stepped(folder, micro_batch_tokens):
    model = load(folder)
    settings = StepSettings(micro_batch_tokens, False, torch.device("cpu"))
    step = MaskedLanguage(["en", "fr"], None, SimpleNamespace(pad_id=0)).run_step
    report = step(
        model, model, lambda loss, _: loss.backward(), made_up_batch(), TRAINING, settings
    )
    return report, {name: p.grad for name, p in model.named_parameters()}


def test_loss_and_gradients_are_those_of_plain_torch_for_any_micro_batches(folders):
    folder = folders["bert"]
    model = load(folder)
    expected = plain_loss(model, made_up_batch())
    expected.backward()
    passes = set()
    for budget in (10_000, 60, 10):
        report, grads = stepped(folder, budget)
        passes.add(report.micro_batches)
        assert report.loss == pytest.approx(expected.item(), rel=1e-5)
        assert report.metrics["perplexity"] == pytest.approx(expected.exp().item(), rel=1e-4)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, atol=1e-6, rtol=1e-4)
    assert passes == {1, 2, 3}


def test_a_step_has_kernels_on_cuda(folders):
    with Operators() as operators:
        stepped(folders["bert"], 60)
    names = {name for name in operators.names if "flash_attention_for_cpu" not in name}
    assert len(names) > 40
    assert all(map(has_cuda_kernel, names))


def test_a_step_reads_from_its_device_once(folders, monkeypatch):
    model, objective = (
        load(folders["bert"]).to(META),
        MaskedLanguage(["en", "fr"], None, SimpleNamespace(pad_id=0)),
    )
    settings = StepSettings(10, False, META)
    with host_waits(monkeypatch) as waits:
        ready = objective.ahead(model, made_up_batch(), TRAINING, settings)
        back = lambda loss, _: loss.backward()  # noqa: E731  as short as it is
        report = objective.run_step(model, model, back, ready, TRAINING, settings)
    assert report.micro_batches == 3
    assert waits.kinds == {COPY_TO_HOST: 1}, waits.places
    assert waits.copies == 1 + 3 * 5, "counts, and the micro-batches' entries"


def test_metrics_by_language_add_up_to_those_of_all(folders):
    report, _ = stepped(folders["bert"], 60)
    batch, metrics = made_up_batch(), report.metrics
    counts = {"en": len(batch.words[0]) + len(batch.words[2]), "fr": len(batch.words[1])}
    total = sum(counts.values())
    assert metrics["masked_tokens"] == total
    logs = sum(np.log(metrics[f"perplexity/{code}"]) * n for code, n in counts.items())
    assert np.exp(logs / total) == pytest.approx(metrics["perplexity"], rel=1e-5)
    right = sum(metrics[f"masked_accuracy/{code}"] * n for code, n in counts.items())
    assert right / total == pytest.approx(metrics["masked_accuracy"])
    assert report.tokens == sum(LENGTHS)
    alone = MaskedBatch(0, batch.input_ids[:1], batch.places[:1], batch.words[:1], np.array([1]))
    settings = StepSettings(100, False, torch.device("cpu"))
    one = MaskedLanguage(["en", "fr"], None, SimpleNamespace(pad_id=0)).run_step
    model = load(folders["bert"])
    found = one(model, model, lambda *_: None, alone, TRAINING, settings).metrics
    assert "perplexity/en" not in found
    assert found["perplexity/fr"] == found["perplexity"]


def test_padding_does_not_show_in_what_is_said(folders):
    model, batch = load(folders["xlm-roberta"]), made_up_batch()
    together = model(collate_masked(batch.input_ids, batch.places, batch.words, 0)).losses
    for row in range(len(LENGTHS)):
        before = sum(map(len, batch.words[:row]))
        one = model(
            collate_masked(
                *([part[row]] for part in (batch.input_ids, batch.places, batch.words)), 0
            )
        )
        torch.testing.assert_close(together[before : before + len(one.losses)], one.losses)


def test_a_start_without_a_head_gets_a_fresh_one_by_the_seed(tmp_path):
    folder = save_encoder(tmp_path / "bert")
    first, again = load(folder), load(folder)
    other = load_masked_language_model(folder, config(), max_length=96, seed=4)
    torch.testing.assert_close(first.head.dense.weight, again.head.dense.weight, rtol=0, atol=0)
    assert (first.head.dense.weight != other.head.dense.weight).any()
    assert first.head.dense.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_the_head_of_a_published_nomic_bert_is_taken(folders, tmp_path):
    """By the names of its own class for masked language."""
    adapted = tmp_path / "adapted"
    model = load(folders["xlm-roberta"])
    save_adapted(model, adapted, folders["xlm-roberta"], config())
    head = safetensors.torch.load_file(adapted / HEAD_FILE)
    (adapted / HEAD_FILE).unlink()
    encoder = safetensors.torch.load_file(adapted / "model.safetensors")
    names = {"dense": "transform.dense", "layer_norm": "transform.layer_norm", "bias": "decoder"}
    as_published = {f"bert.{name}": value for name, value in encoder.items()} | {
        f"cls.predictions.{'.'.join([names[part], *rest]) if rest else 'decoder.bias'}": value
        for (part, *rest), value in ((name.split("."), value) for name, value in head.items())
    }
    safetensors.torch.save_file(
        as_published, adapted / "model.safetensors", metadata={"format": "pt"}
    )
    again = load(adapted)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    del as_published["cls.predictions.transform.layer_norm.weight"]
    safetensors.torch.save_file(
        as_published, adapted / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ArtifactError, match=r"lacks the weight .*layer_norm\.weight"):
        load(adapted)


def test_what_is_saved_is_the_start_of_upcycling_and_of_a_further_adaptation(folders, tmp_path):
    model = load(folders["xlm-roberta"])
    with torch.no_grad():
        model.encoder.emb_ln.bias += 0.25
        model.head.bias += torch.linspace(-1, 1, len(model.head.bias))
    adapted = tmp_path / "adapted"
    save_adapted(model, adapted, folders["xlm-roberta"], config())
    assert read_shape(adapted).max_length == 96
    again = load(adapted)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=0)
    for start in ("preserving", "released", "random"):
        settings = {
            "backbone": {"path": str(adapted), "dtype": "float32"},
            "experts": {"num_experts": 4, "start": start},
            "query_max_length": 96,
            "document_max_length": 96,
        }
        mixture = build_model(parse(NomicMoeConfig, settings), adapted, seed=0)
        assert mixture.backbone.config.moe_layers == [1]
        torch.testing.assert_close(
            mixture.backbone.emb_ln.bias, model.encoder.emb_ln.bias, rtol=0, atol=0
        )
        ids = torch.arange(5, 60)[None]
        found = mixture.backbone(ids, torch.ones_like(ids)).last_hidden_state
        dense = model.encoder(ids, torch.ones_like(ids)).last_hidden_state
        # Up to the routers' 1e-7; the released start drops biases and scale, the random one all.
        assert ((found - dense).abs().max() < 1e-5) == (start == "preserving")


def test_models_that_cannot_be_adapted_are_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match="no dropout"):
        config(backbone={"path": "x", "hidden_dropout": 0.1})
    adapted = tmp_path / "adapted"
    save_adapted(load(folders["bert"]), adapted, folders["bert"], config())
    mixture = save_nomic(tmp_path / "mixture")
    with pytest.raises(ConfigError, match="is a mixture of experts"):
        load(mixture)
    with pytest.raises(ConfigError, match="was trained with 10000"):
        load(adapted, rotary_base=5000)
    stored = safetensors.torch.load_file(adapted / HEAD_FILE)
    safetensors.torch.save_file({**stored, "bias": stored["bias"][:9]}, adapted / HEAD_FILE)
    with pytest.raises(ArtifactError, match="does not fit its encoder"):
        load(adapted)
    (adapted / HEAD_FILE).write_bytes(b"broken")
    with pytest.raises(ArtifactError, match="cannot read the head"):
        load(adapted)
    untied = masked_model("bert")
    untied.config.tie_word_embeddings = False
    words = untied.bert.embeddings.word_embeddings.weight
    untied.cls.predictions.decoder.weight = torch.nn.Parameter(words.detach() + 1)
    untied.save_pretrained(tmp_path / "untied")
    wordpiece_tokenizer().save_pretrained(tmp_path / "untied")
    with pytest.raises(ArtifactError, match="does not share the encoder's word vectors"):
        load(tmp_path / "untied")
    tokenizer = wordpiece_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(folders["bert"].parent / "no-mask")
    with pytest.raises(ArtifactError, match="no mask token"):
        vocabulary(folders["bert"].parent / "no-mask", 200)
