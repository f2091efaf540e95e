"""Causal2Vec's forward pass against plain matrix products, on random weights of saved folders.

The reference uses neither transformers nor a module of rayembed: an own BERT, an own Llama, the
MLP of equation 1, the sequence of equation 2 laid out token by token, texts one by one.
"""

import json
import math

import pytest
import safetensors.torch
import tokenizers
import torch
from tiny_models import metaspace_tokenizer, save_decoder, save_encoder

from rayembed.config.settings import parse
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.loading.build import build_model

TASK = "Given a question, retrieve passages that answer it"
TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris"]


def normed(x):
    return x / x.norm()


def rms_norm(x, weight, eps):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def layer_norm(x, w, name):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return w[f"{name}.weight"] * centred / torch.sqrt(variance + 1e-12) + w[f"{name}.bias"]


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def rotate(x):
    """Rotary positions of one head's vectors (T, E), halves paired, base 10000."""
    turned = x.clone()
    half = x.shape[1] // 2
    for t in range(x.shape[0]):
        for j in range(half):
            angle = t / 10000 ** (j / half)
            a, b = x[t, j], x[t, j + half]
            turned[t, j] = a * math.cos(angle) - b * math.sin(angle)
            turned[t, j + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


class Weights:
    """Tensors, sizes and vocabulary of a folder in the format of transformers."""

    def __init__(self, folder):
        self.w = safetensors.torch.load_file(folder / "model.safetensors")
        self.sizes = json.loads((folder / "config.json").read_text())
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def bert(of, ids):
    """Last hidden states (S, k) of one text without padding."""
    w, heads = of.w, of.sizes["num_attention_heads"]
    x = w["embeddings.word_embeddings.weight"][ids]
    x = x + w["embeddings.position_embeddings.weight"][: len(ids)]
    x = layer_norm(x + w["embeddings.token_type_embeddings.weight"][0], w, "embeddings.LayerNorm")

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    for i in range(of.sizes["num_hidden_layers"]):
        p = f"encoder.layer.{i}."
        q, k, v = (linear(x, f"{p}attention.self.{n}") for n in ("query", "key", "value"))
        size, outputs = x.shape[1] // heads, []
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            scores = q[:, part] @ k[:, part].T / math.sqrt(size)
            outputs.append(torch.softmax(scores, dim=-1) @ v[:, part])
        attended = linear(torch.cat(outputs, dim=-1), f"{p}attention.output.dense")
        x = layer_norm(attended + x, w, f"{p}attention.output.LayerNorm")
        inner = gelu(linear(x, f"{p}intermediate.dense"))
        x = layer_norm(linear(inner, f"{p}output.dense") + x, w, f"{p}output.LayerNorm")
    return x


def llama(of, x, *, causal):
    """Last hidden states (T, d) of one sequence of input vectors."""
    w, heads = of.w, of.sizes["num_attention_heads"]
    shared = heads // of.sizes["num_key_value_heads"]
    eps, size = of.sizes["rms_norm_eps"], x.shape[1] // heads
    visible = torch.ones(len(x), len(x), dtype=torch.bool)
    visible = visible.tril() if causal else visible
    for i in range(of.sizes["num_hidden_layers"]):
        p = f"layers.{i}."
        y = rms_norm(x, w[p + "input_layernorm.weight"], eps)
        q, k, v = (y @ w[p + f"self_attn.{n}_proj.weight"].T for n in "qkv")
        outputs = []
        for h in range(heads):
            g = h // shared
            qh = rotate(q[:, h * size : (h + 1) * size])
            kh = rotate(k[:, g * size : (g + 1) * size])
            scores = (qh @ kh.T / math.sqrt(size)).masked_fill(~visible, -math.inf)
            outputs.append(torch.softmax(scores, dim=-1) @ v[:, g * size : (g + 1) * size])
        x = x + torch.cat(outputs, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"], eps)
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return rms_norm(x, w["norm.weight"], eps)


def cross_attention(head, states, heads):
    """What learnt queries read of the encoder's states (S, k): (n, k)."""
    q = head["reader.queries"] @ head["reader.to_q.weight"].T
    kv = states @ head["reader.to_kv.weight"].T
    width, outputs = states.shape[1], []
    size = width // heads
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[:, part] @ kv[:, :width][:, part].T / math.sqrt(size)
        outputs.append(torch.softmax(scores, dim=-1) @ kv[:, width:][:, part])
    return torch.cat(outputs, dim=-1) @ head["reader.to_out.weight"].T


def reference(llm, encoder, head, text, instruction, settings):
    """The embedding of one text, as section 3 and the ablations have it."""
    cls, sep = 2, 3
    states = bert(encoder, [cls, *encoder.ids(text), sep])
    if settings.get("num_contextual_tokens", 1) > 1:
        read = cross_attention(head, states, encoder.sizes["num_attention_heads"])
    else:
        read = states.mean(0, keepdim=True)
    representation = settings.get("representation", "concat")
    contextual = torch.zeros(0, llm.sizes["hidden_size"])
    if representation != "separate" and settings.get("encoder", {}) is not None:
        inner = gelu(read @ head["projector.first.weight"].T)
        contextual = inner @ head["projector.second.weight"].T
    words = llm.w["embed_tokens.weight"]
    bos, eos = 1, 2
    instructed = f"Instruct: {instruction}\nQuery:" if instruction else ""
    told = words[llm.ids(instructed)] if instruction else words[:0]
    before, behind = (told, words[:0])
    if settings.get("position") == "before_instruction":
        before, behind = behind, before
    start, end = settings.get("prompt_start", ""), settings.get("prompt_end", "")
    first = torch.cat([words[[bos, *llm.ids(start)]], before])
    last = words[[*llm.ids(text), *llm.ids(end), eos]]
    x = torch.cat([first, contextual, behind, last])
    hidden = llama(llm, x, causal=settings.get("mask") != "bidirectional")
    c, e = hidden[len(first) : len(first) + len(contextual)].mean(0), hidden[-1]
    match representation:
        case "concat":
            return normed(torch.cat([c, e]))
        case "average":
            return normed((c + e) / 2)
        case "eos":
            return normed(e)
        case "concat_encoder":
            return normed(torch.cat([contextual.mean(0), e]))
        case "separate":
            return normed(torch.cat([normed(read[0]), normed(e)]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    llm = save_decoder(folder / "llm", tokenizer=metaspace_tokenizer(add_bos=True))
    return {"backbone": llm, "encoder": save_encoder(folder / "encoder")}


def build(folders, **settings):
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given", "max_length": 32},
        "lora": None,
        "query_max_length": 96,
        "document_max_length": 96,
    }
    return build_model(parse(Causal2VecConfig, config | settings), folders, seed=5).eval()


@torch.no_grad()
def largest_difference(folders, settings, *, of_reference=None):
    """Over texts with and without instruction, in one padded micro-batch."""
    model = build(folders, **settings)
    llm, encoder = Weights(folders["backbone"]), Weights(folders["encoder"])
    head = model.contextual.state_dict()
    instructions = [TASK, "", TASK]
    tokens = model.tokenizer(TEXTS, "query", instructions)
    found = model(model.tokenizer.collate(tokens)).embeddings
    by_hand = settings if of_reference is None else of_reference
    expected = torch.stack(
        [
            reference(llm, encoder, head, text, instruction, by_hand)
            for text, instruction in zip(TEXTS, instructions, strict=True)
        ]
    )
    assert found.shape == expected.shape
    assert model.dimensions == (found.shape[1],)
    return (found - expected).abs().max().item()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prompt_start": "the lazy", "prompt_end": "fox"},
        {"position": "before_instruction"},
        {"representation": "average"},
        {"representation": "eos"},
        {"representation": "concat_encoder"},
        {"representation": "separate"},
        {"encoder": None, "representation": "eos"},
        {"mask": "bidirectional"},
        {"num_contextual_tokens": 4},
        {"num_contextual_tokens": 2, "representation": "concat_encoder"},
    ],
    ids=str,
)
def test_embeddings_equal_the_reference(folders, settings):
    assert largest_difference(folders, settings) < 1e-5  # fp32 rounding, unit vectors


@pytest.mark.parametrize(
    ("settings", "other"),
    [
        ({}, {"position": "before_instruction"}),
        ({}, {"mask": "bidirectional"}),
        ({"prompt_end": "fox"}, {}),
        ({"representation": "concat"}, {"representation": "concat_encoder"}),
        ({"representation": "average"}, {"representation": "eos"}),
        ({"representation": "eos"}, {"encoder": None, "representation": "eos"}),
    ],
    ids=str,
)
def test_the_reference_has_teeth(folders, settings, other):
    assert largest_difference(folders, settings, of_reference=other) > 1e-3


def test_the_default_is_twice_as_wide_as_the_llm(folders):
    assert build(folders).dimensions == (64,)
