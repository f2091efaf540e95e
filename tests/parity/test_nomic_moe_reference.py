"""Nomic Embed v2's forward pass against plain loops, on random weights in the published layout.

The reference uses no module of rayembed or transformers: texts one by one, tokens one by one,
experts one by one, from the tensors of the file.
"""

import dataclasses
import math

import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from tiny_models import nomic_settings, save_nomic

from rayembed.config.backbone import BackboneConfig
from rayembed.errors import ArtifactError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.nomic_moe.encoder import NomicEncoder
from rayembed.models.nomic_moe.model import NomicMoe
from rayembed.models.nomic_moe.shape import shape_of
from rayembed.models.passes.encoding import encode

TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris"]
PREFIXES = {"query": "search_query: ", "document": "search_document: "}
TOLERANCE = 1e-5


def layer_norm(x, w, name):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return w[f"{name}.weight"] * centred / torch.sqrt(variance + 1e-5) + w[f"{name}.bias"]


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def rotate(x, base):
    """Rotary positions of one head's vectors (T, E): component j is paired with j + E/2."""
    half, turned = x.shape[1] // 2, x.clone()
    for j in range(half):
        angles = torch.arange(x.shape[0]) / base ** (j / half)
        a, b = x[:, j], x[:, j + half]
        turned[:, j] = a * torch.cos(angles) - b * torch.sin(angles)
        turned[:, j + half] = b * torch.cos(angles) + a * torch.sin(angles)
    return turned


def attend(x, w, name, heads, base):
    width = x.shape[1]
    size, joined = width // heads, []
    for h in range(heads):
        parts = []
        for block in range(3):
            rows = slice(block * width + h * size, block * width + (h + 1) * size)
            parts.append(x @ w[f"{name}.Wqkv.weight"][rows].T + w[f"{name}.Wqkv.bias"][rows])
        q, k, v = rotate(parts[0], base), rotate(parts[1], base), parts[2]
        joined.append(torch.softmax(q @ k.T / math.sqrt(size), dim=-1) @ v)
    return torch.cat(joined, -1) @ w[f"{name}.out_proj.weight"].T + w[f"{name}.out_proj.bias"]


def mixture(x, w, name, settings, wrong):
    """One token after the other through its experts."""
    experts, inner, k = settings["num_experts"], settings["n_inner"], settings["moe_top_k"]
    w1, w2 = w[f"{name}.experts.mlp.w1"], w[f"{name}.experts.mlp.w2"]
    bias = w[f"{name}.experts.bias"]
    outputs = []
    for token in x:
        p = torch.softmax(w[f"{name}.router.layer.weight"] @ token, dim=0)
        chosen = sorted(range(experts), key=lambda e: -p[e].item())[:k]
        weights = {e: p[e] for e in chosen}
        if wrong == "renormalised":
            weights = {e: p[e] / sum(weights.values()) for e in chosen}
        total = torch.zeros_like(token)
        for e in chosen:
            rows = slice(e * inner, (e + 1) * inner)
            second = w2[rows]
            if wrong == "transposed w2":
                second = w2.reshape(experts, -1, inner)[e].T
            made = gelu(w1[rows] @ token) @ second
            if wrong == "bias of each expert":
                made = made + bias
            total = total + weights[e] * made
        outputs.append(total if wrong == "bias of each expert" else total + bias)
    return torch.stack(outputs)


def reference(folder, settings, role, text, wrong=None):
    w = safetensors.torch.load_file(folder / "model.safetensors")
    read = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = read.encode(PREFIXES[role] + text, add_special_tokens=True).ids
    types = w["embeddings.token_type_embeddings.weight"][0]
    x = layer_norm(w["embeddings.word_embeddings.weight"][ids] + types, w, "emb_ln")
    for i in range(settings["n_layer"]):
        name = f"encoder.layers.{i}"
        heads, base = settings["n_head"], settings["rotary_emb_base"]
        x = layer_norm(attend(x, w, f"{name}.attn", heads, base) + x, w, f"{name}.norm1")
        if i % 2 == 1:
            made = mixture(x, w, f"{name}.mlp", settings, wrong)
        else:
            inner = gelu(x @ w[f"{name}.mlp.fc1.weight"].T + w[f"{name}.mlp.fc1.bias"])
            made = inner @ w[f"{name}.mlp.fc2.weight"].T + w[f"{name}.mlp.fc2.bias"]
        x = layer_norm(made + x, w, f"{name}.norm2")
    mean = x.mean(0)
    return (mean / mean.norm()).numpy()


def expected(folder, settings, role, wrong=None):
    return np.stack([reference(folder, settings, role, text, wrong) for text in TEXTS])


@pytest.mark.parametrize(("top_k", "role"), [(1, "query"), (2, "document")])
def test_published_layout_gives_the_vectors_of_the_reference(tmp_path, top_k, role):
    settings = nomic_settings(moe_top_k=top_k)
    folder = save_nomic(tmp_path / "nomic", moe_top_k=top_k)
    check_loadable(folder)
    model = load_model(folder)
    assert isinstance(model, NomicMoe)
    found = encode(model, TEXTS, role=role)
    np.testing.assert_allclose(found, expected(folder, settings, role), atol=TOLERANCE)
    for wrong in ("renormalised", "bias of each expert", "transposed w2"):
        other = expected(folder, settings, role, wrong)
        assert np.abs(found - other).max() > 100 * TOLERANCE, wrong


def test_both_ways_to_multiply_give_the_vectors_and_gradients_of_each_other(tmp_path):
    folder, gradients = save_nomic(tmp_path / "nomic"), {}
    for products in ("loop", "grouped"):
        model = load_model(folder)
        for layer in (1, 3):
            model.backbone.encoder.layers[layer].mlp.experts.mlp.products = products
        batch = model.tokenizer.collate(model.tokenizer(TEXTS, "query"))
        vectors = model(batch).embeddings
        (vectors * torch.linspace(-1, 1, vectors.numel()).view_as(vectors)).sum().backward()
        gradients[products] = {n: p.grad for n, p in model.named_parameters()}
        gradients[products]["vectors"] = vectors.detach()
    for name, gradient in gradients["loop"].items():
        torch.testing.assert_close(gradients["grouped"][name], gradient, atol=1e-5, rtol=1e-4)


REAL = {
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "num_experts": 8,
    "vocab_size": 250048,
}


def test_the_real_model_has_475_million_parameters_of_which_305_are_active():
    shape = shape_of(nomic_settings(**REAL), "real")

    def parameters(shape):
        with torch.device("meta"):
            return sum(p.numel() for p in NomicEncoder(shape).parameters())

    assert parameters(shape) == pytest.approx(475.3e6, abs=5e4)
    # A token sees two experts of eight; the router sees all tokens.
    two = parameters(dataclasses.replace(shape, num_experts=2))
    assert two + 6 * 6 * 768 == pytest.approx(305.4e6, abs=5e4)


def test_settings_that_change_the_forward_pass_are_refused(tmp_path):
    for name, value in (
        ("moe_normalize_expert_weights", True),
        ("num_shared_experts", 1),
        ("rotary_emb_fraction", 0.5),
        ("prenorm", True),
        ("causal", True),
        ("expert_choice_router", True),
    ):
        folder = save_nomic(tmp_path / name, **{name: value})
        with pytest.raises(ArtifactError, match=name):
            load_model(folder)


def test_weights_of_other_shapes_or_names_are_refused(tmp_path):
    folder = save_nomic(tmp_path / "nomic")
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    name = "encoder.layers.1.mlp.experts.mlp.w2"
    transposed = weights | {name: weights[name].reshape(4, 48, 32).transpose(1, 2).contiguous()}
    save_nomic(folder, weights=transposed)
    with pytest.raises(ArtifactError, match="of other shapes 1"):
        load_model(folder)
    del weights[name]
    save_nomic(folder, weights=weights)
    with pytest.raises(ArtifactError, match="missing 1"):
        load_model(folder)


def test_transformers_own_class_takes_the_layout_silently_and_so_is_refused(tmp_path):
    folder = save_nomic(tmp_path / "nomic")
    silent = transformers.AutoConfig.from_pretrained(str(folder))
    assert (silent.hidden_act, silent.layer_norm_eps) == ("silu", 1e-12)
    config = BiEncoderConfig(backbone=BackboneConfig(path=str(folder), dtype="float32"))
    with pytest.raises(ArtifactError, match=r"model\.kind=nomic-moe"):
        build_model(config, folder, seed=0)
