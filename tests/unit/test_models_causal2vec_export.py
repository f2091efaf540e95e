"""Causal2Vec's folder: ours, sentence-transformers and MLflow give the same vectors."""

import json
import shutil

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_models import metaspace_tokenizer, save_decoder, save_encoder

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError
from rayembed.models.causal2vec.config import Causal2VecConfig
from rayembed.models.causal2vec.model import Causal2Vec
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.loading.saved_folder import saved_dimensions
from rayembed.models.passes.encoding import encode
from rayembed.models.sentence_module import as_sentence_transformer

TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris", ""]
TASK = "Given a question, retrieve passages that answer it"
LORA = {"rank": 2, "alpha": 4, "dropout": 0.0}
BERT_LORA = {**LORA, "target_modules": ["query", "value", "dense"]}
TRAINED = {"path": "given", "max_length": 20, "frozen": False, "lora": BERT_LORA}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    llm = save_decoder(folder / "llm", tokenizer=metaspace_tokenizer(add_bos=True))
    return {"backbone": llm, "encoder": save_encoder(folder / "encoder")}


def trained(folders, dtype="float32", **settings):
    """A model whose adapters and head are no longer what they were built as."""
    config = {
        "backbone": {"path": "given", "dtype": dtype},
        "encoder": {"path": "given", "max_length": 20},
        "lora": LORA,
        "query_max_length": 96,
        "document_max_length": 48,
    }
    model = build_model(parse(Causal2VecConfig, config | settings), folders, seed=0)
    g = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    return model.eval()


def vectors(model, role, instruction=""):
    return encode(model, TEXTS, role=role, instruction=instruction, allow_empty=True)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"encoder": TRAINED, "num_contextual_tokens": 2, "position": "before_instruction"},
        {"encoder": TRAINED, "representation": "separate"},
        {"encoder": None, "representation": "eos"},
        {"lora": None, "mask": "bidirectional", "prompt_start": "fox", "prompt_end": "dog"},
    ],
    ids=str,
)
def test_the_same_vectors_everywhere(tmp_path, folders, settings):
    model = trained(folders, **settings)
    folder = tmp_path / "model"
    model.save(folder, instructions={"Questions": TASK})
    query, document = vectors(model, "query", TASK), vectors(model, "document")
    assert saved_dimensions(folder / "rayembed.json") == model.dimensions == (query.shape[1],)

    check_loadable(folder)
    again = load_model(folder)
    assert isinstance(again, Causal2Vec)
    assert not again.training
    np.testing.assert_allclose(vectors(again, "query", TASK), query, atol=1e-5)
    np.testing.assert_allclose(vectors(again, "document"), document, atol=1e-5)
    assert not any("lora" in name for name, _ in again.named_parameters())

    prompt = f"Instruct: {TASK}\nQuery:"
    ours = SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")
    for loaded in (ours, as_sentence_transformer(folder)):
        for found, expected in (
            (loaded.encode(TEXTS, prompt=prompt), query),
            (loaded.encode(TEXTS, prompt_name="Questions"), query),
            (loaded.encode_query(TEXTS, prompt=prompt), query),
            (loaded.encode_document(TEXTS), document),
        ):
            np.testing.assert_allclose(found, expected, atol=1e-5)
        assert loaded.get_embedding_dimension() == model.dimensions[0]
    # The control: without the prompt the vectors are others.
    assert np.abs(ours.encode_query(TEXTS) - query).max() > 1e-3


def test_sentence_transformers_saves_and_loads_again(tmp_path, folders):
    trained(folders).save(tmp_path / "one")
    loaded = as_sentence_transformer(tmp_path / "one")
    loaded.save(str(tmp_path / "two"))
    again = SentenceTransformer(str(tmp_path / "two"), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), loaded.encode(TEXTS), atol=1e-6)


def test_the_folder_is_whole_and_needs_no_other(tmp_path, folders):
    own = {name: shutil.copytree(at, tmp_path / "given" / name) for name, at in folders.items()}
    model = trained(own, dtype="bfloat16", encoder=TRAINED)
    model.save(tmp_path / "model")
    expected = vectors(model, "query", TASK)
    shutil.rmtree(tmp_path / "given")
    again = load_model(tmp_path / "model", dtype="bfloat16")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    # Merged adapters are rounded once more.
    assert (vectors(again, "query", TASK) * expected).sum(axis=1).min() > 0.999
    files = {p.relative_to(tmp_path / "model").as_posix() for p in (tmp_path / "model").rglob("*")}
    assert {"encoder/model.safetensors", "encoder/tokenizer.json", "encoder/config.json"} <= files
    assert {"backbone/model.safetensors", "pooling.safetensors", "modules.json"} <= files
    settings = json.loads((tmp_path / "model" / "rayembed.json").read_text())["model"]
    assert settings["lora"] is None
    assert settings["encoder"]["lora"] is None
    before = weights_fingerprint(tmp_path / "model")
    (tmp_path / "model" / "encoder" / "config.json").write_text("{}")
    assert weights_fingerprint(tmp_path / "model") != before
    with pytest.raises(ArtifactError):
        check_loadable(tmp_path / "model")
    (tmp_path / "model" / "encoder" / "config.json").unlink()
    with pytest.raises(ArtifactError):
        load_model(tmp_path / "model")


def test_training_goes_on_from_a_saved_model_with_its_head_and_encoder(tmp_path, folders, caplog):
    first = trained(folders, encoder=TRAINED)
    first.save(tmp_path / "model")
    both = {"backbone": tmp_path / "model", "encoder": tmp_path / "model"}
    again = build_model(first.config, both, seed=2).eval()
    assert not caplog.records
    check_buildable(first.config, both)
    np.testing.assert_allclose(
        vectors(again, "query", TASK), vectors(first, "query", TASK), atol=1e-5
    )
    # The control: the same parts without the head embed otherwise.
    fresh = build_model(first.config, {**both, "backbone": folders["backbone"]}, seed=2).eval()
    assert np.abs(vectors(fresh, "document") - vectors(first, "document")).max() > 1e-3
    other = first.config.model_copy(update={"num_contextual_tokens": 2})
    build_model(other, both, seed=2)
    assert "head is initialised randomly" in caplog.text


def test_mlflow_serves_the_same_vectors(tmp_path, folders):
    import mlflow

    from rayembed.registry import pyfunc_model

    model = trained(folders, encoder=TRAINED)
    model.save(tmp_path / "model")
    mlflow.pyfunc.save_model(
        str(tmp_path / "served"),
        python_model=pyfunc_model.__file__,
        pip_requirements=[],  # else MLflow loads the model in a process to see what it imports
        artifacts={"model": str(tmp_path / "model")},
        model_config={
            "name": "tiny",
            "dimensions": list(model.dimensions),
            "instruction_template": model.config.instruction_template,
        },
    )
    served = mlflow.pyfunc.load_model(str(tmp_path / "served"))
    texts = TEXTS[:3]
    answer = served.predict({"input": texts, "role": "query", "instruction": TASK})
    found = np.array([item["embedding"] for item in answer["data"]])
    expected = encode(model, texts, role="query", instruction=TASK)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    read = model.tokenizer(texts, "query", [TASK] * 3)
    assert answer["usage"]["total_tokens"] == sum(len(one["input_ids"]) for one in read)
