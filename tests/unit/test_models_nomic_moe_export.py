"""A nomic-moe's folder: ours, sentence-transformers, MLflow and the published layout agree."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
from sentence_transformers import SentenceTransformer
from tiny_models import nomic_settings, nomic_weights, save_encoder, save_nomic

from rayembed.config.settings import parse
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.loading.saved_folder import saved_dimensions
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.nomic_moe.model import NomicMoe
from rayembed.models.passes.encoding import encode
from rayembed.models.sentence_module import as_sentence_transformer
from rayembed.registry.pyfunc_model import OpenAIEmbeddings

TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris", ""]
EXPERTS = {"num_experts": 4, "top_k": 2}


def trained(folder, **settings):
    """A model whose weights are no longer what they were built as."""
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "experts": EXPERTS,
        "dimensions": [8],
        "query_max_length": 40,
        "document_max_length": 48,
    }
    model = build_model(parse(NomicMoeConfig, config | settings), folder, seed=0)
    g = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    return model.eval()


def vectors(model, role, instruction=""):
    return encode(model, TEXTS, role=role, instruction=instruction, allow_empty=True)


def cut(found, width):
    return found[:, :width] / np.linalg.norm(found[:, :width], axis=1, keepdims=True)


@pytest.mark.parametrize("start", ["dense", "preserving", "released", "random", "published"])
def test_the_same_vectors_everywhere(tmp_path, start):
    if start == "published":
        source, settings = save_nomic(tmp_path / "start"), {}
    else:
        source = save_encoder(tmp_path / "start")
        settings = {"experts": None if start == "dense" else EXPERTS | {"start": start}}
    model = trained(source, **settings)
    folder = tmp_path / "model"
    model.save(folder, instructions={"Clusters": "clustering: "})
    query, document = vectors(model, "query"), vectors(model, "document")
    clusters = vectors(model, "query", "clustering: ")
    assert np.abs(query - document).max() > 1e-3
    assert saved_dimensions(folder / "rayembed.json") == model.dimensions == (32, 8)

    check_loadable(folder)
    again = load_model(folder)
    assert isinstance(again, NomicMoe)
    assert not again.training
    np.testing.assert_allclose(vectors(again, "query"), query, atol=1e-6)
    ours = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    short = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu", truncate_dim=8)
    for loaded in (ours, as_sentence_transformer(folder)):
        for found, expected in (
            (loaded.encode_query(TEXTS), query),
            (loaded.encode_document(TEXTS), document),
            (loaded.encode(TEXTS, prompt_name="Clusters"), clusters),
        ):
            np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(
        short.encode_query(TEXTS, normalize_embeddings=True), cut(query, 8), atol=1e-5
    )


def test_mlflow_serves_both_widths_and_instructions(tmp_path):
    model = trained(save_nomic(tmp_path / "start"))
    model.save(tmp_path / "model")
    settings = {"instruction_template": "{instruction}", "dimensions": [32, 8]}
    context = SimpleNamespace(artifacts={"model": tmp_path / "model"}, model_config=settings)
    served = OpenAIEmbeddings()
    served.load_context(context)
    texts = TEXTS[:3]
    for fields, expected in (
        ({}, vectors(model, "query")[:3]),
        ({"dimensions": 8}, cut(vectors(model, "query")[:3], 8)),
        ({"instruction": "clustering: "}, vectors(model, "query", "clustering: ")[:3]),
    ):
        answer = served.predict(None, {"input": texts, "role": "query"} | fields)
        found = np.array([item["embedding"] for item in answer["data"]])
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_saved_encoder_is_in_the_published_layout(tmp_path):
    model = trained(save_nomic(tmp_path / "start"))
    model.save(tmp_path / "model")
    weights = safetensors.torch.load_file(tmp_path / "model/backbone/model.safetensors")
    expected = nomic_weights(nomic_settings())
    assert {n: w.shape for n, w in weights.items()} == {n: w.shape for n, w in expected.items()}
    saved = json.loads((tmp_path / "model/backbone/config.json").read_text())
    wanted = nomic_settings()
    del wanted["router_aux_loss_coef"]
    assert {name: saved[name] for name in wanted} == wanted


def test_a_trained_model_is_the_start_of_another(tmp_path):
    model = trained(save_encoder(tmp_path / "bert"))
    model.save(tmp_path / "model")
    config = model.config.model_copy(update={"dimensions": ()})
    again = build_model(config, tmp_path / "model", seed=9).eval()
    np.testing.assert_allclose(vectors(again, "query"), vectors(model, "query"), atol=1e-6)


def test_wrapped_checkpoints_of_the_training_code_load_too(tmp_path):
    """A bi-encoder's checkpoint has `trunk.` before every name."""
    plain = save_nomic(tmp_path / "plain")
    weights = safetensors.torch.load_file(plain / "model.safetensors")
    folder = save_nomic(tmp_path / "trunk")
    wrapped = {f"trunk.{name}": value for name, value in weights.items()}
    safetensors.torch.save_file(wrapped, folder / "model.safetensors")
    (folder / "tokenizer.json").write_bytes((plain / "tokenizer.json").read_bytes())
    found = [vectors(load_model(one), "query") for one in (plain, folder)]
    np.testing.assert_allclose(*found, atol=1e-6)
