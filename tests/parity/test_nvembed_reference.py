"""NV-Embed's tokens and forward pass against plain ones, on random weights in published names.

The reference uses neither transformers nor a module of rayembed: tokenizer.json as it is written,
own RMSNorm, rotary embedding, grouped-query attention, SwiGLU, layer norm, latent attention, masked
mean.
"""

import json
import math

import mteb
import pytest
import safetensors.torch
import torch
from mteb.types import PromptType
from tiny_models import save_mistral_tokenizer
from tokenizers import Tokenizer

from rayembed.config.backbone import BackboneConfig, LatentAttentionPooling
from rayembed.config.evaluation import ModelUnderTest
from rayembed.errors import ArtifactError
from rayembed.evaluation.run_scores import make_spec
from rayembed.models.loading.load import load_model
from rayembed.models.nvembed.checkpoint import empty_nvembed, load_nvidia_checkpoint
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.nvembed.model import NVEmbed
from rayembed.models.nvembed.pooling import PaperLatentAttention
from rayembed.models.nvembed.tokens import make_tokenizer
from rayembed.models.passes.encoding import encode
from rayembed.models.sentence_module import as_sentence_transformer

HIDDEN, LAYERS, HEADS, KV_HEADS, INNER, VOCABULARY = 32, 3, 4, 2, 56, 512
LATENTS, CROSS_HEADS, CROSS_DIM, MULT = 6, 3, 20, 2
TASK = "Given a question, retrieve passages that answer it"
HEAD = f"Instruct: {TASK}\nQuery: "

ORDINARY = ("are cats larger than dogs", "Paris")
AFTER_A_LONE_SPACE = (
    "7 wonders",
    "ñandú",
    "日本",
    "한국",
    "مصر",
    "🙂 cats",
    "\ncats",
    " cats",
    "(cats)",
    "",
)
"""Texts whose first word does not take the template's trailing space into its token."""


def published_weights(seed=0):
    """Random weights under the names of nvidia/NV-Embed-v2."""
    g = torch.Generator().manual_seed(seed)

    def matrix(*shape):
        return torch.randn(*shape, generator=g) / math.sqrt(shape[-1])

    def vector(size, centre):
        return centre + 0.1 * torch.randn(size, generator=g)

    head = HIDDEN // HEADS
    w = {"embedding_model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN, generator=g)}
    for i in range(LAYERS):
        p = f"embedding_model.layers.{i}."
        w[p + "self_attn.q_proj.weight"] = matrix(HEADS * head, HIDDEN)
        w[p + "self_attn.k_proj.weight"] = matrix(KV_HEADS * head, HIDDEN)
        w[p + "self_attn.v_proj.weight"] = matrix(KV_HEADS * head, HIDDEN)
        w[p + "self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * head)
        w[p + "mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
        w[p + "mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
        w[p + "mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
        w[p + "input_layernorm.weight"] = vector(HIDDEN, 1)
        w[p + "post_attention_layernorm.weight"] = vector(HIDDEN, 1)
    w["embedding_model.norm.weight"] = vector(HIDDEN, 1)
    p = "latent_attention_model."
    w[p + "latents"] = torch.randn(LATENTS, HIDDEN, generator=g)
    p += "cross_attend_blocks."
    for name in ("0.norm", "0.norm_context", "1.norm"):
        w[p + name + ".weight"], w[p + name + ".bias"] = vector(HIDDEN, 1), vector(HIDDEN, 0)
    cross = CROSS_HEADS * CROSS_DIM
    w[p + "0.fn.to_q.weight"] = matrix(cross, HIDDEN)
    w[p + "0.fn.to_kv.weight"] = matrix(2 * cross, HIDDEN)
    w[p + "0.fn.to_out.weight"] = matrix(HIDDEN, cross)
    w[p + "1.fn.net.0.weight"] = matrix(2 * MULT * HIDDEN, HIDDEN)
    w[p + "1.fn.net.0.bias"] = vector(2 * MULT * HIDDEN, 0)
    w[p + "1.fn.net.2.weight"] = matrix(HIDDEN, MULT * HIDDEN)
    w[p + "1.fn.net.2.bias"] = vector(HIDDEN, 0)
    return w


def rms_norm(x, weight):
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred * centred).mean(-1, keepdim=True)
    return weight * centred / torch.sqrt(variance + 1e-5) + bias


def rotate(x):
    """Rotary positions of one head's vectors (T, E), halves paired, base 10000."""
    tokens, size = x.shape
    rates = 10000.0 ** (-2 * torch.arange(size // 2, dtype=torch.float64) / size)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x[:, : size // 2], x[:, size // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def trunk(w, ids):
    """Hidden states (T, H) of one text without padding; every token sees every other."""
    x = w["embedding_model.embed_tokens.weight"][ids]
    size = HIDDEN // HEADS
    for i in range(LAYERS):
        p = f"embedding_model.layers.{i}."
        y = rms_norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (y @ w[p + f"self_attn.{n}_proj.weight"].T for n in "qkv")
        outputs = []
        for h in range(HEADS):
            shared = h // (HEADS // KV_HEADS)
            qh = rotate(q[:, h * size : (h + 1) * size])
            kh = rotate(k[:, shared * size : (shared + 1) * size])
            vh = v[:, shared * size : (shared + 1) * size]
            outputs.append(torch.softmax(qh @ kh.T / math.sqrt(size), dim=-1) @ vh)
        x = x + torch.cat(outputs, dim=-1) @ w[p + "self_attn.o_proj.weight"].T
        y = rms_norm(x, w[p + "post_attention_layernorm.weight"])
        gate, up = y @ w[p + "mlp.gate_proj.weight"].T, y @ w[p + "mlp.up_proj.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return rms_norm(x, w["embedding_model.norm.weight"])


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def released_latent_attention(w, x):
    p = "latent_attention_model.cross_attend_blocks."

    def norm(name, value):
        return layer_norm(value, w[f"{p}{name}.weight"], w[f"{p}{name}.bias"])

    context = norm("0.norm_context", w["latent_attention_model.latents"])
    q = norm("0.norm", x) @ w[p + "0.fn.to_q.weight"].T
    kv = context @ w[p + "0.fn.to_kv.weight"].T
    k, v = kv[:, : kv.shape[1] // 2], kv[:, kv.shape[1] // 2 :]
    outputs = []
    for h in range(CROSS_HEADS):
        part = slice(h * CROSS_DIM, (h + 1) * CROSS_DIM)
        weights = torch.softmax(q[:, part] @ k[:, part].T / math.sqrt(CROSS_DIM), dim=-1)
        outputs.append(weights @ v[:, part])
    x = x + torch.cat(outputs, dim=-1) @ w[p + "0.fn.to_out.weight"].T
    inner = norm("1.norm", x) @ w[p + "1.fn.net.0.weight"].T + w[p + "1.fn.net.0.bias"]
    a, g = inner[:, : MULT * HIDDEN], inner[:, MULT * HIDDEN :]
    return x + (a * gelu(g)) @ w[p + "1.fn.net.2.weight"].T + w[p + "1.fn.net.2.bias"]


def paper_latent_attention(w, x, heads):
    latents, size, outputs = w["latents"], HIDDEN // heads, []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        outputs.append(torch.softmax(x[:, part] @ latents[:, part].T, dim=-1) @ latents[:, part])
    inner = torch.cat(outputs, dim=-1) @ w["mlp.0.weight"].T + w["mlp.0.bias"]
    return gelu(inner) @ w["mlp.2.weight"].T + w["mlp.2.bias"]


def pooled(x, kept):
    mean = x[kept].sum(0) / sum(kept)
    return mean / mean.norm()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A copy of the repository as NVIDIA published it, at tiny sizes and in two shards."""
    folder = tmp_path_factory.mktemp("published")
    w = published_weights()
    names = sorted(w)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for file, members in shards.items():
        safetensors.torch.save_file({n: w[n] for n in members}, folder / file)
    index = {
        "metadata": {"total_size": sum(v.numel() * 4 for v in w.values())},
        "weight_map": {n: file for file, members in shards.items() for n in members},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    text = {
        "model_type": "bidir_mistral",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "vocab_size": VOCABULARY,
        "sliding_window": 4,
    }
    latent = {
        "model_type": "latent_attention",
        "num_latents_value": LATENTS,
        "num_cross_heads": CROSS_HEADS,
        "cross_dim_head": CROSS_DIM,
        "hidden_dim": HIDDEN,
        "latent_dim": HIDDEN,
        "mult": MULT,
    }
    config = {"model_type": "nvembed", "text_config": text, "latent_attention_config": latent}
    (folder / "config.json").write_text(json.dumps(config))
    save_mistral_tokenizer(folder)
    return folder, w


def released_tokens(folder, text, head="", max_length=512):
    """Ids and which are pooled, by the released code's way.

    The text with EOS in letters behind it, cut at the end; then as many positions from the first
    one, which is BOS, are left out as the head by itself has tokens without BOS.
    """
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = own.encode(f"{head}{text}</s>").ids[:max_length]
    left_out = len(own.encode(head, add_special_tokens=False).ids)
    return ids, [place >= left_out for place in range(len(ids))]


def paper_tokens(folder, text, head="", max_length=512):
    """Ids and which are pooled, by the paper's words: no token of the head is, EOS always is."""
    own = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(
        head + text, add_special_tokens=False
    )
    ids, ends = own.ids[: max_length - 2], [end for _, end in own.offsets[: max_length - 2]]
    return [1, *ids, 2], [not head, *(end > len(head) for end in ends), True]


def reference_tokens(folder):
    """Of a query with instruction and a document, for which paper and released code agree."""
    found = [
        released_tokens(folder, "are cats larger than dogs", HEAD),
        released_tokens(folder, "the quick brown fox"),
    ]
    assert found[0] == paper_tokens(folder, "are cats larger than dogs", HEAD)
    assert found[1] == paper_tokens(folder, "the quick brown fox")
    return found


def check_against(folder, model, embed):
    """Embeddings of a query with instruction and of a document, in one padded micro-batch."""
    queries = model.tokenizer(["are cats larger than dogs"], "query", [TASK])
    documents = model.tokenizer(["the quick brown fox"], "document")
    reference = reference_tokens(folder)
    for tokens, (ids, kept) in zip(queries + documents, reference, strict=True):
        assert tokens["input_ids"].tolist() == ids
        assert tokens["pool_mask"].tolist() == kept
    with torch.no_grad():
        found = model(model.tokenizer.collate(queries + documents)).embeddings
    for row, (ids, kept) in enumerate(reference):
        assert (found[row] - embed(ids, kept)).abs().max() < 1e-5  # fp32 rounding, unit vectors


def test_released_form_equals_reference(published):
    folder, w = published
    model = load_nvidia_checkpoint(folder, dtype="float32")
    check_against(
        folder, model, lambda i, kept: pooled(released_latent_attention(w, trunk(w, i)), kept)
    )


def test_the_reference_has_teeth(published):
    """The same comparison fails where the instruction is pooled, or the gate is the other half."""
    folder, w = published
    model = load_nvidia_checkpoint(folder, dtype="float32")

    def all_pooled(ids, kept):
        return pooled(released_latent_attention(w, trunk(w, ids)), [True] * len(kept))

    with pytest.raises(AssertionError):
        check_against(folder, model, all_pooled)
    swapped = dict(w)
    for name in ("weight", "bias"):
        key = f"latent_attention_model.cross_attend_blocks.1.fn.net.0.{name}"
        swapped[key] = torch.cat([w[key][MULT * HIDDEN :], w[key][: MULT * HIDDEN]])
    with pytest.raises(AssertionError):
        check_against(
            folder,
            model,
            lambda i, k: pooled(released_latent_attention(swapped, trunk(swapped, i)), k),
        )


def test_paper_form_equals_reference(published):
    folder, w = published
    released = load_nvidia_checkpoint(folder, dtype="float32")
    pooling = PaperLatentAttention(HIDDEN, num_latents=5, num_heads=4, mlp_ratio=3)
    config = NVEmbedConfig(
        backbone=BackboneConfig(path="unused", dtype="float32"),
        pooling=LatentAttentionPooling(form="paper"),
    )
    model = NVEmbed(config, released.backbone, pooling, released.tokenizer).eval()
    own = {name: value.detach() for name, value in pooling.state_dict().items()}
    check_against(
        folder, model, lambda i, k: pooled(paper_latent_attention(own, trunk(w, i), 4), k)
    )


def paper_layout(folder, released, **lengths):
    """The same weights with the paper's tokens."""
    config = released.config.model_copy(update={"token_layout": "paper", **lengths})
    tokenizer = make_tokenizer(config, folder)
    return NVEmbed(config, released.backbone, released.pooling, tokenizer).eval()


def embedded(model, text, role="query", instruction=TASK):
    return torch.from_numpy(
        encode(model, [text], role=role, instruction=instruction, allow_empty=True)[0]
    )


def published_vector(w, ids, kept):
    return pooled(released_latent_attention(w, trunk(w, ids)), kept)


@pytest.mark.parametrize("text", [*ORDINARY, *AFTER_A_LONE_SPACE])
def test_queries_are_pooled_as_published(published, text):
    folder, w = published
    model = load_nvidia_checkpoint(folder, dtype="float32")
    ids, kept = released_tokens(folder, text, HEAD)
    found = embedded(model, text)
    assert (found - published_vector(w, ids, kept)).abs().max() < 1e-5  # fp32 rounding
    ids, kept = paper_tokens(folder, text, HEAD)
    paper = embedded(paper_layout(folder, model), text)
    assert (paper - published_vector(w, ids, kept)).abs().max() < 1e-5
    # The control: they are the same where the space is in the first word's token, and only there.
    assert (found @ paper > 1 - 1e-6) == (text in ORDINARY)
    assert (found @ paper < 0.9999) == (text in AFTER_A_LONE_SPACE)


@pytest.mark.parametrize("role", ["query", "document"])
def test_texts_over_the_length_lose_their_eos_as_published(published, role):
    folder, w = published
    model = load_nvidia_checkpoint(folder, dtype="float32", max_length=28)
    instruction, head = (TASK, HEAD) if role == "query" else ("", "")
    paper = paper_layout(folder, model)
    room = 28 - len(released_tokens(folder, "", head)[0])
    for words in (room, room + 1, room + 9):
        text = " ".join(["fox"] * words)
        ids, kept = released_tokens(folder, text, head, 28)
        assert (ids[-1] == 2) == (words <= room + bool(head))
        found = embedded(model, text, role, instruction)
        assert (found - published_vector(w, ids, kept)).abs().max() < 1e-5  # fp32 rounding
        ids, kept = paper_tokens(folder, text, head, 28)
        assert ids[-1] == 2
        other = embedded(paper, text, role, instruction)
        assert (other - published_vector(w, ids, kept)).abs().max() < 1e-5
        # The control: they differ where EOS is lost, and only there.
        assert (found @ other < 0.9999) == (words > room + bool(head))


@pytest.mark.parametrize("text", [" cats", "  cats", "cats </s> dogs", "日本", ""])
def test_documents_are_read_as_tokenizer_json_says(published, text):
    folder, w = published
    model = load_nvidia_checkpoint(folder, dtype="float32")
    ids, kept = released_tokens(folder, text)
    (tokens,) = model.tokenizer([text], "document", allow_empty=True)
    assert tokens["input_ids"].tolist() == ids
    found = embedded(model, text, "document", "")
    assert (found - published_vector(w, ids, kept)).abs().max() < 1e-5  # fp32 rounding
    # The control: transformers' own class has rules of its own for spaces and special tokens.
    (other,) = paper_layout(folder, model).tokenizer([text], "document", allow_empty=True)
    assert (other["input_ids"].tolist() != ids) == (" " in text)


def test_the_published_layout_is_saved_with_the_model(published, tmp_path):
    folder, w = published
    load_model(folder, dtype="float32").save(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    assert again.config.token_layout == "released"
    sentences = as_sentence_transformer(tmp_path / "saved", device="cpu")
    for text, head in (("7 wonders", HEAD), (" cats", "")):
        expected = published_vector(w, *released_tokens(folder, text, head))
        role = "query" if head else "document"
        found = embedded(again, text, role, TASK if head else "")
        assert (found - expected).abs().max() < 1e-5  # fp32 rounding, unit vectors
        found = torch.from_numpy(sentences.encode(text, prompt=head or None))
        assert (found - expected).abs().max() < 1e-5


def test_load_model_knows_the_published_folder(published, tmp_path):
    folder, w = published
    model = load_model(folder, dtype="float32")
    assert isinstance(model, NVEmbed)
    model.save(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    check_against(
        folder, again, lambda i, kept: pooled(released_latent_attention(w, trunk(w, i)), kept)
    )


def test_a_published_copy_under_evaluation_equals_reference(published):
    """As mteb's tasks have it: an instruction before queries, none before documents."""
    folder, w = published
    settings = {"dtype": "float32", "prompts": {"instructions": {"NQ": TASK}}}
    spec = make_spec(ModelUnderTest(reference=str(folder), **settings))
    assert (spec.prompts.table, spec.dimensions) == ("nvembed", HIDDEN)
    assert dict(spec.max_lengths) == {"query": 512, "document": 512}
    assert spec.num_parameters == sum(value.numel() for value in w.values())
    task, embed = mteb.get_task("NQ").metadata, spec.load("cpu")
    texts = (
        (PromptType.query, "are cats larger than dogs", HEAD),
        (PromptType.query, "7 wonders", HEAD),
        (PromptType.document, "the quick brown fox", ""),
        (PromptType.document, " cats", ""),
    )
    for side, text, head in texts:
        ids, kept = released_tokens(folder, text, head)
        found = torch.from_numpy(embed([text], spec.encode_spec(task, side))[0])
        expected = pooled(released_latent_attention(w, trunk(w, ids)), kept)
        assert (found - expected).abs().max() < 1e-5  # fp32 rounding, unit vectors


def test_other_names_are_refused_with_both_lists(published, tmp_path):
    folder, w = published
    for file in folder.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    w = dict(w)
    w["extra.weight"] = w.pop("embedding_model.norm.weight")
    safetensors.torch.save_file(w, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError) as caught:
        load_nvidia_checkpoint(tmp_path)
    assert "missing 1 ['embedding_model.norm.weight']" in str(caught.value)
    assert "unexpected 1 ['extra.weight']" in str(caught.value)
    w["embedding_model.norm.weight"] = torch.ones(HIDDEN + 1)
    del w["extra.weight"]
    safetensors.torch.save_file(w, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="do not fit"):
        load_nvidia_checkpoint(tmp_path)


def test_real_sizes_have_the_published_number_of_bytes():
    backbone, pooling, _ = empty_nvembed({}, {})
    trunk_size = sum(p.numel() for p in backbone.parameters())
    latent_size = sum(p.numel() for p in pooling.parameters())
    assert trunk_size == 7_110_660_096
    assert latent_size == 740_356_096
    assert (trunk_size + latent_size) * 2 == 15_702_032_384
    assert {p.device.type for p in backbone.parameters()} == {"meta"}
