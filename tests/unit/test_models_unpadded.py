"""Packed micro-batches give the vectors and gradients of padded ones."""

from contextlib import nullcontext

import architecture_contract as contract
import numpy as np
import pytest
import torch
from made_up_records import made_up_records
from tiny_folders import TINY, tiny_parts, tiny_settings
from tiny_models import (
    DECODERS,
    LINES,
    save_cde_stages,
    save_decoder,
    save_encoder,
    save_modern_encoder,
    save_nomic_encoder,
)
from torch import nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention.varlen import varlen_attn

from rayembed.config.backbone import BackboneConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.vectors.teacher import narrow_linear_layers
from rayembed.errors import ConfigError
from rayembed.models.attention import unpadded, varlen
from rayembed.models.attention.packed import Packed, pack
from rayembed.models.attention.unpadded import packs, why_part_padded
from rayembed.models.biencoder.architecture import BiEncoder
from rayembed.models.experts import ExpertMlps
from rayembed.models.loading.backbones import load_backbone
from rayembed.models.loading.build import build_model
from rayembed.models.passes.encoding import encode
from rayembed.models.passes.micro_batches import collate, cut_by_length
from rayembed.training.contrastive.engine_module import EngineModule
from rayembed.training.contrastive.step import run_step
from rayembed.training.objective import StepSettings

TEXTS = [*LINES[1:], "Paris", "cats " * 30]


def whole(kind, **changes):
    """Settings that train the whole model, with more of what the architecture has."""
    lora = {} if kind == "nomic-moe" else {"lora": None}
    return tiny_settings(kind, **lora, **changes)


VARIANTS = {
    **{kind: (kind, {}) for kind in TINY},
    "nvembed with adapters": ("nvembed", {"lora": {"rank": 2, "alpha": 4, "dropout": 0.0}}),
    "nvembed, causal": ("nvembed", {"mask": "causal", "pooling": {"kind": "eos"}}),
    "nvembed, self-attention": ("nvembed", {"pooling": {"kind": "self_attention", "num_heads": 4}}),
    "nvembed, paper": (
        "nvembed",
        {"pooling": {"kind": "latent_attention", "form": "paper", "num_heads": 4}},
    ),
    **{
        f"biencoder, {kind}": ("biencoder", {"pooling": {"kind": kind}})
        for kind in ("cls", "eos", "max", "weighted_mean")
    },
    **{
        f"causal2vec, {kind}": ("causal2vec", {"representation": kind})
        for kind in ("eos", "average", "concat_encoder", "separate")
    },
    "causal2vec, queries": ("causal2vec", {"num_contextual_tokens": 3}),
    "cde, more": (
        "cde",
        {"num_soft_prompts": 2, "pool_context": True, "context_positions": "counted"},
    ),
}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    home = tmp_path_factory.mktemp("parts")
    return {kind: tiny_parts(kind, home / kind) for kind in TINY}


def built(name, parts, setting):
    kind, changes = VARIANTS[name]
    config = whole(kind, **changes) if "lora" not in changes else tiny_settings(kind, **changes)
    model = contract.moved(build_model(config, parts[kind], seed=1))
    model.unpadded = setting
    return contract.of_corpus(model)


def gradients(model, budget, *, cache, checkpointing=False, device="cpu"):
    """Report and gradients of one step with prompts, in training mode."""
    model = model.train()
    if checkpointing:
        model.recompute_layers()
    batch = make_step_batch(0, made_up_records(8), 2, model.tokenizer)
    model.zero_grad()
    torch.manual_seed(1)
    settings = StepSettings(budget, cache, torch.device(device))
    back = lambda loss, last: loss.backward()  # noqa: E731
    report = run_step(model, EngineModule(model), back, batch, contract.STAGE, settings)
    return report, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(left, right):
    assert left.keys() == right.keys()
    size = max(gradient.abs().max() for gradient in right.values())
    assert size > 1e-3
    for name, gradient in right.items():
        assert (left[name] - gradient).abs().max() <= 1e-5 * size, name


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_vectors_and_gradients_are_the_padded_ones(name, parts):
    padded, packed = (built(name, parts, setting) for setting in ("never", "always"))
    assert packs(packed)
    assert not packs(padded)
    for instruction in ("", contract.TASK):
        mine, other = (
            encode(one, TEXTS, role="query", instruction=instruction, tokens_per_batch=90)
            for one in (packed, padded)
        )
        np.testing.assert_allclose(mine, other, atol=2e-6)
    for cache in (False, True) if name in TINY else (True,):
        report, found = gradients(packed, 60, cache=cache)
        reference, expected = gradients(padded, 60, cache=cache)
        same_gradients(found, expected)
        assert report.loss == pytest.approx(reference.loss, rel=1e-5)
        assert report.tokens == report.padded_tokens == reference.tokens < reference.padded_tokens
        assert 1 < report.micro_batches <= reference.micro_batches


def faked(model, batch):
    """The model and its batch without values, on which asking for a value raises an error."""
    mode = FakeTensorMode()
    for module in model.modules():
        for name, value in module.named_parameters(recurse=False):
            fake = nn.Parameter(mode.from_tensor(value.detach()), requires_grad=value.requires_grad)
            module._parameters[name] = fake
        for name, value in module.named_buffers(recurse=False):
            module._buffers[name] = mode.from_tensor(value)
    return mode, {name: mode.from_tensor(value) for name, value in batch.items()}


@pytest.mark.parametrize("kind", TINY)
def test_a_packed_pass_goes_to_torchs_kernel_and_asks_the_device_for_nothing(
    kind, parts, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(varlen, "reference", varlen._kernel)
    calls = []

    def kernel(*given, **settings):
        calls.append((given[0].shape[1], given[1].shape[1], settings))
        return varlen_attn(*given, **settings)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    model = contract.of_corpus(build_model(whole(kind), parts[kind], seed=1)).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, ExpertMlps):
            module.products = "grouped"  # as on this GPU; one after the other they ask for sizes
    tokens = model.tokenizer(TEXTS, "document")
    mode, batch = faked(model, model.tokenizer.pack(tokens))
    with mode:
        embeddings = model(batch).embeddings
        embeddings.sum().backward()
    assert embeddings.shape == (len(TEXTS), model.dimensions[0])
    assert len(calls) == (4 if kind == "causal2vec" else 2)
    grouped = {(queries, keys) for queries, keys, _ in calls if queries != keys}
    assert grouped == ({(4, 2)} if kind in ("nvembed", "causal2vec") else set())
    for queries, keys, settings in calls:
        assert settings["enable_gqa"] == (queries != keys)
        causal = kind == "causal2vec" and queries != keys
        assert settings["window_size"] == (-1, 0 if causal else -1)


def test_a_padded_pass_asks_where_padding_stands_if_experts_must_know_it(parts):
    for experts in ({"num_experts": 3, "top_k": 2}, None):
        model = build_model(whole("nomic-moe", experts=experts), parts["nomic-moe"], seed=1)
        mode, batch = faked(model, model.tokenizer.collate(model.tokenizer(TEXTS, "document")))
        asks = pytest.raises(DynamicOutputShapeException) if experts else nullcontext()
        with mode, asks:
            model(batch)


@pytest.mark.parametrize("setting", ["always", "never"])
@pytest.mark.parametrize("kind", ["nomic-moe", "causal2vec"])
def test_what_is_known_ahead_of_a_pass_changes_nothing_of_it(kind, setting, parts):
    model = built(kind, parts, setting).train()
    tokens = model.tokenizer(TEXTS, "document")
    batch = collate(model, tokens, range(len(tokens)))
    more = model.known_ahead(batch)
    assert bool(more) == (kind == "causal2vec" or setting == "never")
    found = []
    for given in (batch, batch | more):
        model.zero_grad()
        output = model(given)
        output.embeddings[:, 0].sum().backward()
        found.append([output.embeddings, *(p.grad for p in model.parameters())])
    assert all((a is b is None) or torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", TINY)
def test_recomputed_layers_attend_within_texts_too(kind, parts):
    packed, padded = (built(kind, parts, setting) for setting in ("always", "never"))
    _, found = gradients(packed, 60, cache=True, checkpointing=True)
    same_gradients(found, gradients(padded, 60, cache=True)[1])


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("broken", ["borders", "positions"])
def test_what_does_not_keep_texts_apart_gives_other_vectors(kind, broken, parts, monkeypatch):
    model = built(kind, parts, "always")
    tokens = model.tokenizer(TEXTS, "document")
    batch = collate(model, tokens, range(len(tokens)))
    right = model(batch).embeddings
    if broken == "borders":
        let_attention_cross_borders(model)
    else:
        for name, value in batch.items():
            if name.endswith("position_ids"):
                batch[name] = halved(len(value))
        monkeypatch.setattr(Packed, "positions", lambda _, number: halved(number))
    wrong = model(batch).embeddings
    assert (right - wrong).abs().amax(dim=1).min() > 1e-3  # equal vectors are within 2e-6


def halved(number):
    """Positions that run on over all texts, two by two, as far as tiny models have learnt some."""
    return (torch.arange(number) // 2).clamp(max=45)


def let_attention_cross_borders(model):
    """Let the model's attention take all packed texts for one."""
    for module in model.modules():
        if hasattr(module, "num_heads") or hasattr(module, "is_causal"):
            module.register_forward_pre_hook(_one_text, with_kwargs=True)


def _one_text(_, args, kwargs):
    def joined(packed):
        return Packed(packed.cu_seqlens[[0, -1]], int(packed.cu_seqlens[-1]))

    if kwargs.get("cu_seq_lens_q") is not None:
        ends = kwargs["cu_seq_lens_q"]
        kwargs = kwargs | joined(Packed(ends, 0)).for_attention()
    if len(args) == 3 and isinstance(args[1], Packed):
        args = (args[0], joined(args[1]), args[2])
    return args, kwargs


CONFIG = BackboneConfig(path="unused", dtype="float32")
PRECISIONS = ("float32", "bfloat16", "a teacher's")


def reason(model, precision):
    """Why it is padded; of a teacher the linear layers and their inputs alone are in bfloat16."""
    if precision in ("float32", "bfloat16"):
        return why_part_padded("backbone", model.to(getattr(torch, precision)))
    narrow_linear_layers(model)
    with torch.autocast("cpu", torch.bfloat16):
        return why_part_padded("backbone", model)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mask", ["bidirectional", "causal"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_read_packed_texts(family, mask, precision, tmp_path):
    save_decoder(tmp_path, family)
    assert reason(load_backbone(tmp_path, CONFIG, mask=mask), precision) is None


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("save", [save_encoder, save_modern_encoder, save_nomic_encoder])
def test_encoders_read_packed_texts(save, precision, tmp_path):
    save(tmp_path)
    assert reason(load_backbone(tmp_path, CONFIG, mask="own"), precision) is None


def test_a_trial_is_of_the_number_type_that_computes(tmp_path):
    save_decoder(tmp_path, "mistral", num_hidden_layers=12)
    model = load_backbone(tmp_path, CONFIG, mask="causal")
    assert reason(model, "float32") is None
    with torch.autocast("cpu", torch.bfloat16):
        assert why_part_padded("backbone", model) is None
    assert len(unpadded._trials[model]) == 2
    assert reason(model, "a teacher's") is None
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "place",
    ["causal window", "window", "positions", "borders", "faint borders", "arguments", "any error"],
)
def test_a_model_that_reads_packed_texts_in_another_way_is_found(
    place, precision, tmp_path, monkeypatch
):
    save = {"window": save_modern_encoder, "positions": save_encoder}.get(place)
    if save is None:
        save_decoder(tmp_path, "mistral")
    else:
        save(tmp_path)
    model = load_backbone(tmp_path, CONFIG, mask="own" if save else "causal")
    if place == "faint borders":  # as at random weights: other texts change little
        for weight in (p for n, p in model.named_parameters() if n.endswith("o_proj.weight")):
            weight.data.mul_(0.01)
    assert reason(model, precision) is None
    unpadded._trials.clear()  # another trial would not be made
    if place == "any error":
        monkeypatch.setattr(unpadded, "packed_states", lambda *_, **__: {}["states"])
    elif place == "positions":
        monkeypatch.setattr(unpadded, "first_position", lambda _: 1)
    elif "window" in place:
        wrong_window(monkeypatch)
    elif "borders" in place:
        let_attention_cross_borders(model)
    else:

        def without(_, args, kwargs):
            return args, {name: value for name, value in kwargs.items() if "cu_seq" not in name}

        for module in model.modules():
            if hasattr(module, "is_causal"):
                module.register_forward_pre_hook(without, with_kwargs=True)
    assert "backbone" in reason(model, precision)


def wrong_window(monkeypatch):
    from rayembed.models.attention import short_texts as attention

    right = attention.varlen_attention
    monkeypatch.setattr(
        attention,
        "varlen_attention",
        lambda *given, window, **more: right(*given, window=window and window + 1, **more),
    )


def test_a_model_is_padded_where_it_must_be(parts, tmp_path):
    config = whole(
        "biencoder", backbone={"path": "given", "dtype": "float32", "attention_dropout": 0.1}
    )
    model = build_model(config, parts["biencoder"], seed=1)
    assert not packs(model)
    model.unpadded = "always"
    with pytest.raises(ConfigError, match="no dropout, and the backbone trains with some"):
        packs(model.train())
    assert packs(model.eval())
    experts = {"num_experts": 3, "top_k": 2, "balance": {"count_padding": True}}
    moe = build_model(whole("nomic-moe", experts=experts), parts["nomic-moe"], seed=1)
    moe.unpadded = "always"
    with pytest.raises(ConfigError, match="padding counts"):
        packs(moe.train())
    assert packs(moe.eval())
    stages = save_cde_stages(tmp_path, save_modern_encoder)
    cde = build_model(whole("cde"), stages, seed=1)
    cde.unpadded = "always"
    with pytest.raises(ConfigError, match="attention window"):
        packs(cde)


def test_a_forward_pass_for_padded_texts_alone_gets_no_others(parts):
    class Padded(BiEncoder):
        takes_packed = False

    found = build_model(whole("biencoder"), parts["biencoder"], seed=1)
    model = Padded(found.config, found.backbone, found.pooling, found.tokenizer)
    model.unpadded = "always"
    with pytest.raises(ConfigError, match="Padded takes no packed ones"):
        packs(model)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", TINY)
def test_packed_on_a_gpu_where_there_is_a_kernel(kind, parts):
    exact = encode(built(kind, parts, "never"), TEXTS, role="query")
    for setting, dtype, packed in (
        ("never", torch.bfloat16, False),
        ("auto", torch.bfloat16, True),
        ("auto", torch.float32, False),
    ):
        model = built(kind, parts, setting).to("cuda", dtype)
        assert packs(model) is packed
        found = encode(model, TEXTS, role="query")
        assert (found * exact).sum(1).min() > 0.99
        if packed:
            _, gradient = gradients(model, 60, cache=True, device="cuda")
            assert all(torch.isfinite(one).all() for one in gradient.values())


def test_on_a_cpu_texts_are_padded_unless_it_is_asked(parts):
    model = build_model(whole("nvembed"), parts["nvembed"], seed=1)
    assert model.unpadded == "auto"
    batch = collate(model, model.tokenizer(TEXTS, "query"), range(3))
    assert batch["attention_mask"].shape == batch["input_ids"].shape


def test_packed_micro_batches_are_as_full_as_they_can_be():
    lengths = [3, 9, 4, 4, 20, 1]
    cuts = cut_by_length(lengths, 12, 48, packed=True)
    assert cuts == [[4], [1], [2, 3, 0, 5]]
    assert cut_by_length([], 12, 48, packed=True) == []


def test_entries_of_packed_texts():
    batch = pack([np.zeros(2), np.zeros(3), np.zeros(1)], "encoder_")
    assert batch["encoder_cu_seqlens"].tolist() == [0, 2, 5, 6]
    assert batch["encoder_cu_seqlens"].dtype == torch.int32
    assert batch["encoder_position_ids"].tolist() == [0, 1, 0, 1, 2, 0]
    assert Packed.of(batch) is None
    packed = Packed.of(batch, "encoder_")
    assert packed.longest == 3
    assert packed.positions(6).tolist() == [0, 1, 0, 1, 2, 0]
    assert packed.firsts.tolist() == [0, 2, 5]
    assert packed.lasts.tolist() == [1, 4, 5]
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [-6.0]], requires_grad=True)
    assert packed.sums(values).tolist() == [[3.0], [12.0], [-6.0]]
    assert packed.largest(values).tolist() == [[2.0], [5.0], [-6.0]]
    (packed.sums(values) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert values.grad.flatten().tolist() == [1, 1, 2, 2, 2, 3]
