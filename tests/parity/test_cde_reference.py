"""CDE's forward pass against plain matrix products, on random weights of saved folders.

The reference uses neither transformers nor a module of rayembed: own BERT, NomicBERT and
ModernBERT, both stages' MLPs, sequences laid out vector by vector, texts one by one.
"""

import json
import math
import shutil

import pytest
import safetensors.torch
import tokenizers
import torch
from tiny_models import (
    save_cde_stages,
    save_encoder,
    save_modern_encoder,
    save_nomic_encoder,
)

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import check_loadable, load_model

TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "paris"]
DOCUMENTS = ["paris is the capital of france", "dogs live", "7 wonders", "the fox and the cats"]
CLS, SEP = 2, 3


def gelu(x):
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def silu(x):
    return x / (1 + torch.exp(-x))


def layer_norm(x, weight, bias=0.0, eps=1e-12):
    centred = x - x.mean(-1, keepdim=True)
    return weight * centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps) + bias


def rotate(x, positions, theta):
    """Rotary positions of one head's vectors (L, E), halves paired."""
    half = x.shape[1] // 2
    speeds = torch.tensor([theta ** (-j / half) for j in range(half)])
    angles = torch.tensor(positions, dtype=torch.float32)[:, None] * speeds
    a, b, cos, sin = x[:, :half], x[:, half:], torch.cos(angles), torch.sin(angles)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)


def attend(q, k, v, heads, visible, turn=lambda x: x):
    size, outputs = q.shape[1] // heads, []
    for h in range(heads):
        part = slice(h * size, (h + 1) * size)
        scores = turn(q[:, part]) @ turn(k[:, part]).T / math.sqrt(size)
        outputs.append(torch.softmax(scores.masked_fill(~visible, -math.inf), -1) @ v[:, part])
    return torch.cat(outputs, dim=-1)


class Stage:
    """Weights, sizes and vocabulary of a folder in the format of transformers."""

    def __init__(self, folder):
        self.w = safetensors.torch.load_file(folder / "model.safetensors")
        self.sizes = json.loads((folder / "config.json").read_text())
        self.family = self.sizes["model_type"]
        self._tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids(self, text):
        return [CLS, *self._tokenizer.encode(text, add_special_tokens=False).ids, SEP]

    def words(self, ids, *, normed=False):
        names = {"bert": "word_embeddings", "nomic_bert": "word_embeddings"}
        words = self.w[f"embeddings.{names.get(self.family, 'tok_embeddings')}.weight"][ids]
        return layer_norm(words, self.w["embeddings.norm.weight"], eps=1e-5) if normed else words

    def states(self, x, positions, *, everywhere=0):
        """Last states of a sequence of input vectors, of which the first ones see all."""
        return {"bert": bert, "nomic_bert": nomic_bert, "modernbert": modern_bert}[self.family](
            self.w, self.sizes, x, positions, everywhere
        )


def bert(w, sizes, x, positions, everywhere):
    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    x = x + w["embeddings.position_embeddings.weight"][positions]
    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    visible = torch.ones(len(x), len(x), dtype=torch.bool)
    for i in range(sizes["num_hidden_layers"]):
        p = f"encoder.layer.{i}."
        q, k, v = (linear(x, f"{p}attention.self.{n}") for n in ("query", "key", "value"))
        attended = attend(q, k, v, sizes["num_attention_heads"], visible)
        x = norm(
            linear(attended, f"{p}attention.output.dense") + x, f"{p}attention.output.LayerNorm"
        )
        inner = gelu(linear(x, f"{p}intermediate.dense"))
        x = norm(linear(inner, f"{p}output.dense") + x, f"{p}output.LayerNorm")
    return x


def nomic_bert(w, sizes, x, positions, everywhere):
    """By the names of the hub: queries, keys and values in one matrix, fc12 the gate."""

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def turn(x):
        return rotate(x, positions, 1000)

    x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    visible = torch.ones(len(x), len(x), dtype=torch.bool)
    for i in range(sizes["num_hidden_layers"]):
        p = f"encoder.layers.{i}."
        q, k, v = (x @ w[f"{p}attn.Wqkv.weight"].T).chunk(3, dim=-1)
        attended = attend(q, k, v, sizes["num_attention_heads"], visible, turn)
        x = norm(attended @ w[f"{p}attn.out_proj.weight"].T + x, f"{p}norm1")
        inner = (x @ w[f"{p}mlp.fc11.weight"].T) * silu(x @ w[f"{p}mlp.fc12.weight"].T)
        x = norm(inner @ w[f"{p}mlp.fc2.weight"].T + x, f"{p}norm2")
    return x


def modern_bert(w, sizes, x, positions, everywhere):
    """Every third layer sees all, the others a window; `everywhere` are in each window."""

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], eps=1e-5)

    x = norm(x, "embeddings.norm")
    places = torch.arange(len(x))
    near = (places[:, None] - places[None, :]).abs() <= sizes["local_attention"] // 2
    near = near | (places < everywhere)[:, None] | (places < everywhere)[None, :]
    for i in range(sizes["num_hidden_layers"]):
        p, full = f"layers.{i}.", i % 3 == 0
        theta = 160000.0 if full else 10000.0
        visible = torch.ones_like(near) if full else near
        y = x if i == 0 else norm(x, f"{p}attn_norm")
        q, k, v = (y @ w[f"{p}attn.Wqkv.weight"].T).chunk(3, dim=-1)
        heads = sizes["num_attention_heads"]
        turned = attend(q, k, v, heads, visible, lambda x, t=theta: rotate(x, positions, t))
        x = x + turned @ w[f"{p}attn.Wo.weight"].T
        y = norm(x, f"{p}mlp_norm") @ w[f"{p}mlp.Wi.weight"].T
        inner, gate = y.chunk(2, dim=-1)
        x = x + (gelu(inner) * gate) @ w[f"{p}mlp.Wo.weight"].T
    return norm(x, "final_norm")


def mlp(x, w, name, activation):
    inner = activation(x @ w[f"{name}.0.weight"].T + w[f"{name}.0.bias"])
    return inner @ w[f"{name}.2.weight"].T + w[f"{name}.2.bias"]


def context_vector(stage, layers, document):
    ids = stage.ids(f"search_document: {document}")
    states = stage.states(stage.words(ids), list(range(len(ids))))
    return mlp(states.mean(0), layers, "first", gelu)


def reference(stage, layers, text, context, settings):
    """The embedding of one text behind context vectors, as section 3 and the releases have it."""
    j, s = settings["num_context"], settings.get("num_soft_prompts", 0)
    width = stage.sizes["hidden_size"]
    context = torch.stack([*context, *[layers["null"]] * (j - len(context))])
    prompts = torch.zeros(0, width)
    if s:
        prompts = mlp(torch.ones(width), layers, "prompts", torch.relu).reshape(s, width)
    ids = stage.ids(f"search_query: {text}")
    words = stage.words(ids, normed=settings.get("normalize_twice", False))
    x = torch.cat([context, prompts, words])
    if settings.get("released") and stage.family == "nomic_bert":
        # Released code adds the token type to text alone; nomic_bert() adds it to all.
        x[: j + s] -= stage.w["embeddings.token_type_embeddings.weight"][0]
    if settings.get("context_positions") == "counted":
        positions, everywhere = list(range(len(x))), 0
    elif stage.family == "bert":
        positions, everywhere = [0] * (j + s) + list(range(len(ids))), j
    else:
        positions, everywhere = [0] * j + list(range(j, len(x))), j
    states = stage.states(x, positions, everywhere=everywhere)
    head = len(stage.ids("search_query: ")) - 1
    first = j + s if settings.get("pool_instruction", True) else j + s + head
    mean = states[0 if settings.get("pool_context") else first :].mean(0)
    match settings.get("output", "mean"):
        case "mlp":
            mean = mlp(mean, layers, "output", torch.relu)
        case "residual":
            mean = mlp(mean, layers, "output", torch.relu) + mean
    return mean / mean.norm()


SAVE = {"bert": save_encoder, "nomic_bert": save_nomic_encoder, "modernbert": save_modern_encoder}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each family, two encoders with different weights."""
    folder = tmp_path_factory.mktemp("stages")
    return {family: save_cde_stages(folder / family, save) for family, save in SAVE.items()}


@torch.no_grad()
def largest_difference(folders, family, settings, *, of_reference=None, num_documents=4):
    """Over texts in one padded micro-batch, and over the context vectors."""
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "query_max_length": 48,
        "document_max_length": 48,
        "num_context": 4,
    }
    model = build_model(parse(CDEConfig, config | settings), folders[family], seed=5).eval()
    second, first = Stage(folders[family]["backbone"]), Stage(folders[family]["encoder"])
    layers = model.layers.state_dict()
    documents = DOCUMENTS[:num_documents]
    context = torch.stack([context_vector(first, layers, d) for d in documents])
    tokens = model.tokenizer(documents, "document")
    found = model.embed_context(model.tokenizer.collate(tokens))
    by_hand = {"num_context": 4} | (settings if of_reference is None else of_reference)
    vectors = model(model.tokenizer.collate(model.tokenizer(TEXTS, "query")), found).embeddings
    expected = torch.stack([reference(second, layers, t, context, by_hand) for t in TEXTS])
    assert vectors.shape == expected.shape
    return max((found - context).abs().max().item(), (vectors - expected).abs().max().item())


V1 = {"num_soft_prompts": 8, "output": "mlp"}
V2 = {"num_soft_prompts": 8, "output": "residual", "pool_instruction": False}


@pytest.mark.parametrize("family", SAVE)
@pytest.mark.parametrize("settings", [{}, V1, V2, {"pool_context": True}], ids=str)
def test_both_stages_equal_the_reference(folders, family, settings):
    assert largest_difference(folders, family, settings) < 1e-5


@pytest.mark.parametrize("family", SAVE)
def test_fewer_documents_are_followed_by_the_null_token(folders, family):
    assert largest_difference(folders, family, V1, num_documents=2) < 1e-5


def test_version_2_as_released(folders):
    released = V2 | {"context_positions": "counted", "normalize_twice": True}
    assert largest_difference(folders, "modernbert", released) < 1e-5


@pytest.mark.parametrize(
    ("family", "settings", "other"),
    [
        ("nomic_bert", {}, {"context_positions": "counted"}),
        ("modernbert", {}, {"context_positions": "counted"}),
        ("modernbert", {"normalize_twice": True}, {}),
        ("bert", V1, {"num_soft_prompts": 8, "output": "residual"}),
        ("bert", V2, V2 | {"pool_instruction": True}),
        ("bert", {}, {"pool_context": True}),
    ],
    ids=str,
)
def test_the_reference_has_teeth(folders, family, settings, other):
    assert largest_difference(folders, family, settings, of_reference=other) > 1e-3


def publish(folder, stages, released):
    """A repository as jxm/cde-small-v1 and v2 are laid out; the layers around the stages."""
    torch.manual_seed(3)
    width, layers = 32, {"null": torch.randn(32) * 0.1}
    for name, out in (("first", width), ("prompts", 8 * width), ("output", width)):
        layers |= {f"{name}.0.weight": torch.randn(width, width) * 0.2}
        layers |= {f"{name}.2.weight": torch.randn(out, width) * 0.2}
        layers |= {f"{name}.0.bias": torch.randn(width) * 0.1}
        layers |= {f"{name}.2.bias": torch.randn(out) * 0.1}
    theirs = {
        "first": "first_stage_model.mlp",
        "prompts": "second_stage_model.prompt_projection",
        "output": "second_stage_model.output_projection",
        "null": "second_stage_model.sequence_dropout_null_embedding",
    }
    weights = {
        ".".join([theirs[name.partition(".")[0]], *name.split(".")[1:]]): value
        for name, value in layers.items()
    }
    for prefix, part in (
        ("first_stage_model.embedder", "encoder"),
        ("second_stage_model.backbone", "backbone"),
    ):
        weights |= {f"{prefix}.{n}": v for n, v in Stage(stages[part]).w.items()}
    folder.mkdir()
    safetensors.torch.save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(released))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(stages["backbone"] / name, folder)
    return layers


PUBLISHED = {
    "nomic_bert": {"num_soft_prompts": 8, "output": "mlp", "released": True},
    "modernbert": V2 | {"context_positions": "counted", "normalize_twice": True, "released": True},
}
STATED = {
    "architecture": "transductive",
    "transductive_corpus_size": 4,
    "transductive_sequence_dropout_prob": 0.005,
    "max_seq_length": 48,
    "num_attention_heads": 4,
    "local_attention": 8,
    **{f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")},
}


@torch.no_grad()
@pytest.mark.parametrize("family", PUBLISHED)
def test_published_checkpoints_load_by_their_names(folders, family, tmp_path):
    layers = publish(tmp_path / "repository", folders[family], STATED)
    check_loadable(tmp_path / "repository")
    model = load_model(tmp_path / "repository")
    second, first = Stage(folders[family]["backbone"]), Stage(folders[family]["encoder"])
    context = torch.stack([context_vector(first, layers, d) for d in DOCUMENTS[:3]])
    made = model.embed_context(model.tokenizer.collate(model.tokenizer(DOCUMENTS[:3], "document")))
    found = model(model.tokenizer.collate(model.tokenizer(TEXTS, "query")), made).embeddings
    settings = PUBLISHED[family] | {"num_context": 4}
    expected = torch.stack([reference(second, layers, t, context, settings) for t in TEXTS])
    assert (found - expected).abs().max() < 1e-5
    model.save(tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    same = again(model.tokenizer.collate(model.tokenizer(TEXTS, "query")), made).embeddings
    assert torch.equal(same, found)


def test_a_published_checkpoint_with_a_weight_missing_is_refused(folders, tmp_path):
    publish(tmp_path / "repository", folders["nomic_bert"], STATED)
    path = tmp_path / "repository" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    del weights["second_stage_model.backbone.encoder.layers.1.norm2.bias"]
    safetensors.torch.save_file(weights, path)
    with pytest.raises(ArtifactError, match=r"post_mlp_layernorm\.bias"):
        load_model(tmp_path / "repository")
