"""Settings files of well-known published models, around a tiny encoder: none is refused, and the
vectors are those of sentence-transformers.

The files are those of the models on the Hub, with smaller widths.
"""

import json
import shutil

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from sentence_transformers import SentenceTransformer
from tiny_models import metaspace_tokenizer, save_decoder, save_encoder
from tokenizers import normalizers

from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.passes.encoding import encode
from rayembed.models.tokens import pretrained_tokenizer, save_tokenizer

TOLERANCE = 2e-6
"""Of unit vectors in fp32: sums run over other numbers of padded tokens."""
TEXTS = ["Paris", "PARIS is the Capital of FRANCE", "7 wonders", "The quick brown Fox"]
POOLING = {
    "word_embedding_dimension": 32,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
}
NEWER = {"pooling_mode_weightedmean_tokens": False, "pooling_mode_lasttoken": False}
VERSION = {"__version__": {"sentence_transformers": "2.2.2", "transformers": "4.28.1"}}
SEARCH = "Represent this sentence for searching relevant passages: "


def _bert(length, lower=False):
    return {"max_seq_length": length, "do_lower_case": lower}


def _prompts(similarity="cosine", default=None, **prompts):
    return {
        **VERSION,
        "prompts": prompts,
        "default_prompt_name": default,
        "similarity_fn_name": similarity,
    }


def _dense(outputs, activation, bias):
    return {
        "in_features": 32,
        "out_features": outputs,
        "bias": bias,
        "activation_function": f"torch.nn.modules.{activation}",
    }


TANH = _dense(32, "activation.Tanh", bias=True)
IDENTITY = _dense(32, "linear.Identity", bias=False)
QWEN3 = {"query": "Instruct: Given a web search query, retrieve relevant passages\nQuery:"}
PASSAGES = {"query": "search_query: ", "passage": "search_document: ", "STS": "classification: "}
GEMMA = {"query": "task: search result | query: ", "document": "title: none | text: "}

# Transformer module, config_sentence_transformers.json, pooling, Dense modules, Normalize.
MODELS = {
    "BAAI/bge-small-en-v1.5": (_bert(512, lower=True), VERSION, "cls", (), True),
    "BAAI/bge-base-zh": (_bert(512, lower=True), VERSION, "cls", (), True),
    "BAAI/bge-m3": (_bert(8192), VERSION, "cls", (), True),
    "intfloat/e5-base-v2": (_bert(512), None, "mean", (), True),
    "intfloat/multilingual-e5-large": (_bert(512), None, "mean", (), True),
    "intfloat/multilingual-e5-large-instruct": (_bert(512), _prompts(), "mean", (), True),
    "sentence-transformers/all-MiniLM-L6-v2": (_bert(256), VERSION, "mean", (), True),
    "sentence-transformers/all-mpnet-base-v2": (_bert(384), VERSION, "mean", (), True),
    "sentence-transformers/paraphrase-MiniLM": (_bert(128), VERSION, "mean", (), False),
    "sentence-transformers/multi-qa-MiniLM": (_bert(512), VERSION, "mean", (), True),
    "sentence-transformers/msmarco-tas-b": ({"max_seq_length": 512}, None, "cls", (), False),
    "sentence-transformers/LaBSE": (_bert(256), None, "cls", (TANH,), True),
    "sentence-transformers/distiluse": (_bert(128), VERSION, "mean", (TANH,), False),
    "sentence-transformers/gtr-t5-base": (_bert(512), VERSION, "mean", (IDENTITY,), True),
    "thenlper/gte-base": (_bert(512), None, "mean", (), True),
    "Alibaba-NLP/gte-modernbert-base": (_bert(8192), _prompts(), "cls", (), False),
    "Alibaba-NLP/gte-Qwen2-1.5B": (_bert(8192), _prompts(None, **QWEN3), "lasttoken", (), True),
    "mixedbread-ai/mxbai-large-v1": (_bert(512), _prompts(query=SEARCH), "cls", (), False),
    "Snowflake/arctic-embed-m-v1.5": (_bert(512), _prompts(None, query=SEARCH), "cls", (), True),
    "Snowflake/arctic-embed-l-v2.0": (_bert(8192), _prompts(query="query: "), "cls", (), True),
    "nomic-ai/nomic-embed-text-v1.5": (_bert(8192), VERSION, "mean", (), True),
    "nomic-ai/nomic-embed-text-v2": (_bert(512), _prompts(**PASSAGES), "mean", (), True),
    "google/embeddinggemma-300m": (
        _bert(2048),
        {"model_type": "SentenceTransformer", **_prompts(**GEMMA)},
        "mean",
        (IDENTITY, IDENTITY),
        True,
    ),
    "Qwen/Qwen3-Embedding-0.6B": (None, _prompts(**QWEN3, document=""), "lasttoken", (), True),
}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = save_encoder(tmp_path_factory.mktemp("encoder"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 60}))
    return folder


def _put(folder, bare, bert, stated, mode, dense=(), normalized=True):
    shutil.copytree(bare, folder)
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalized]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": "" if i == 0 else f"{i}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    pooling = {**POOLING, **(NEWER if mode == "lasttoken" else {})}
    key = "lasttoken" if mode == "lasttoken" else f"{mode}_token" + "s" * (mode == "mean")
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {**pooling, f"pooling_mode_{key}": True},
    }
    for i, settings in enumerate(dense, start=2):
        files[f"{i}_Dense/config.json"] = settings
    if bert is not None:
        files["sentence_bert_config.json"] = bert
    if stated is not None:
        files["config_sentence_transformers.json"] = stated
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))
    for i, settings in enumerate(dense, start=2):
        draw = torch.Generator().manual_seed(i)
        shapes = {"linear.weight": (settings["out_features"], 32)}
        shapes |= {"linear.bias": (settings["out_features"],)} if settings["bias"] else {}
        weights = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
        safetensors.torch.save_file(weights, folder / f"{i}_Dense" / "model.safetensors")
    return folder


def _check_equal(folder, model):
    reference = SentenceTransformer(str(folder), device="cpu")
    # Version 6 of sentence-transformers has an empty `document` beside a stated `passage`.
    name = "passage" if "passage" in reference.prompts else "document"
    for role, prompt in (("query", "query"), ("document", name)):
        expected = reference.encode(TEXTS, prompt_name=prompt)
        expected /= np.linalg.norm(expected, axis=1, keepdims=True)
        found = encode(model, TEXTS, role=role)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_settings_of_published_models_are_taken(tmp_path, encoder, name):
    folder = _put(tmp_path / "theirs", encoder, *MODELS[name])
    check_loadable(folder)
    _check_equal(folder, load_model(folder))


def _cased_bert(folder):
    """A folder of an encoder whose `BertTokenizer` knows capitals."""
    save_encoder(folder)
    vocabulary = dict(transformers.AutoTokenizer.from_pretrained(folder).vocab)
    for word in ("paris", "Paris", "PARIS"):
        vocabulary.setdefault(word, len(vocabulary))  # the model has 200 rows, the file 164 words
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, do_lower_case=False)
    tokenizer.model_max_length = 60
    tokenizer.save_pretrained(folder)
    return folder


def _decoder(folder, normalizer):
    tokenizer = metaspace_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizer
    tokenizer.pad_token, tokenizer.model_max_length = "</s>", 60
    return save_decoder(folder, "mistral", tokenizer=tokenizer)


@pytest.mark.parametrize("kind", ["BertTokenizer", "no rules", "rules", "lower-casing last"])
def test_a_tokenizer_with_capitals_is_lower_cased_where_the_folder_says_so(tmp_path, kind):
    rules = {
        "no rules": None,
        "rules": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("Fox", "dog")]),
        "lower-casing last": normalizers.Sequence(
            [normalizers.Replace("Fox", "dog"), normalizers.Lowercase()]
        ),
    }
    bare = tmp_path / "bare"
    bare = _cased_bert(bare) if kind == "BertTokenizer" else _decoder(bare, rules[kind])
    cased = load_model(_put(tmp_path / "cased", bare, _bert(60), None, "mean"))
    folder = _put(tmp_path / "theirs", bare, _bert(60, lower=True), None, "mean")
    model = load_model(folder)
    _check_equal(folder, model)
    if kind != "lower-casing last":
        texts = ["PARIS", "paris"]
        upper, lower = encode(model, texts, role="document")
        np.testing.assert_allclose(upper, lower, atol=TOLERANCE)
        upper, lower = encode(cased, texts, role="document")
        assert np.abs(upper - lower).max() > 1e-2
    model.save(tmp_path / "ours")
    _check_equal(tmp_path / "ours", model)
    again = load_model(tmp_path / "ours")
    for role in ("query", "document"):
        expected = encode(model, TEXTS, role=role)
        np.testing.assert_allclose(encode(again, TEXTS, role=role), expected, atol=TOLERANCE)


def test_a_saved_part_keeps_lower_casing(tmp_path):
    """In the layout of models that need rayembed, whose parts lie in folders of their own."""
    bare = _cased_bert(tmp_path / "bare")
    folder = _put(tmp_path / "theirs", bare, _bert(60, lower=True), None, "mean")
    part = tmp_path / "ours" / "backbone"
    part.mkdir(parents=True)
    (part.parent / "modules.json").write_text("[]")
    save_tokenizer(pretrained_tokenizer(folder), part)
    tokens = [pretrained_tokenizer(place).tokenize("PARIS") for place in (folder, part)]
    assert tokens == [["paris"], ["paris"]]
    assert pretrained_tokenizer(bare).tokenize("PARIS") == ["PARIS"]
