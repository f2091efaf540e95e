"""A corpus as an object: which documents stand for it, and the same vectors wherever it goes."""

import json
import random

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from tiny_folders import tiny_settings
from tiny_models import save_cde_stages, save_encoder

from rayembed.config.settings import parse
from rayembed.errors import DataError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.files import weights_fingerprint
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.models.loading.saved_prompts import saved_instructions
from rayembed.models.passes.encoding import corpus_context, encode, encode_context, random_documents
from rayembed.models.sentence_module import as_sentence_transformer

TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris"]
CORPUS = ["dogs live in ancient places", "paris is the capital", "7 foxes", "the world of cats", ""]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": 3,
        "num_soft_prompts": 2,
        "output": "residual",
        "query_max_length": 32,
        "document_max_length": 32,
    }
    stages = save_cde_stages(tmp_path_factory.mktemp("stages"))
    return build_model(parse(CDEConfig, config), stages, seed=5).eval()


def test_a_random_draw_depends_on_what_the_corpus_holds_alone():
    corpus = [f"document {i}" for i in range(200)]
    found = random_documents(corpus, 20, seed=1)
    assert len(set(found)) == 20
    shuffled = random.Random(3).sample(corpus, 200) + corpus[:50] + ["", " \n"]
    assert random_documents(iter(shuffled), 20, seed=1) == found
    assert random_documents(corpus, 20, seed=2) != found
    assert random_documents(corpus, 10, seed=1) == found[:10]
    assert sorted(random_documents(corpus, 999, seed=1)) == sorted(corpus)


def test_no_documents_are_drawn_where_none_are_asked_for():
    assert random_documents(["a", "b"], 0, seed=0) == []


def test_each_document_is_drawn_as_often():
    corpus = [f"document {i}" for i in range(20)]
    counts = dict.fromkeys(corpus, 0)
    for seed in range(1000):
        for text in random_documents(corpus, 5, seed=seed):
            counts[text] += 1
    assert all(180 < count < 320 for count in counts.values()), counts


def test_the_context_of_a_corpus_is_of_its_documents(model):
    every = encode_context(model, CORPUS[:4])
    context = corpus_context(model, CORPUS)
    assert context.shape[1] == 32
    assert 1 <= len(context) <= 3
    assert torch.cdist(context, every).min(dim=1).values.max() < 1e-5
    assert corpus_context(model, ["", " "]) is None


def test_encoding_in_a_context(model):
    context = corpus_context(model, CORPUS)
    with_context = encode(model, TEXTS, role="query", context=context, tokens_per_batch=30)
    tokens = model.tokenizer(TEXTS, "query")
    with torch.no_grad():
        one = model(model.tokenizer.collate(tokens), context).embeddings.numpy()
    np.testing.assert_allclose(with_context, one, atol=1e-5)
    assert np.abs(encode(model, TEXTS, role="query") - with_context).max() > 1e-3


def test_a_folder_keeps_its_corpus_and_gives_the_same_vectors_everywhere(model, tmp_path):
    model.save(tmp_path / "without")
    as_saved = load_model(tmp_path / "without")
    as_saved.set_corpus(corpus_context(as_saved, CORPUS))
    as_saved.save(tmp_path / "with")
    check_loadable(tmp_path / "with")
    again = load_model(tmp_path / "with")
    query, document = (encode(as_saved, TEXTS, role=role) for role in ("query", "document"))
    np.testing.assert_allclose(encode(again, TEXTS, role="query"), query, atol=1e-6)
    assert weights_fingerprint(tmp_path / "with") != weights_fingerprint(tmp_path / "without")

    set_by_call = as_sentence_transformer(tmp_path / "without")
    assert np.abs(set_by_call.encode_query(TEXTS) - query).max() > 1e-3, "no corpus yet"
    set_by_call[0].set_corpus(CORPUS)
    set_by_call.save(str(tmp_path / "saved-by-it"))
    set_by_call.save(str(tmp_path / "taken-away"))
    with pytest.raises(DataError, match="a sequence of texts"):
        set_by_call[0].set_corpus("corpus.jsonl")
    another = as_sentence_transformer(tmp_path / "taken-away")
    another[0].set_corpus([])
    another.save(str(tmp_path / "taken-away"))
    assert load_model(tmp_path / "taken-away").corpus is None
    for loaded in (
        set_by_call,
        SentenceTransformer(str(tmp_path / "with"), trust_remote_code=True, device="cpu"),
        SentenceTransformer(str(tmp_path / "saved-by-it"), trust_remote_code=True, device="cpu"),
    ):
        np.testing.assert_allclose(loaded.encode_query(TEXTS), query, atol=1e-5)
        np.testing.assert_allclose(loaded.encode_document(TEXTS), document, atol=1e-5)
        instructed = encode(as_saved, TEXTS, role="query", instruction="classification: ")
        found = loaded.encode_query(TEXTS, prompt="classification: ")
        np.testing.assert_allclose(found, instructed, atol=1e-5)


def test_mlflow_serves_the_same_vectors_with_a_saved_corpus(model, tmp_path):
    import mlflow

    from rayembed.registry import pyfunc_model

    model.save(tmp_path / "plain")
    own = load_model(tmp_path / "plain")
    own.set_corpus(corpus_context(own, CORPUS))
    own.save(tmp_path / "model")
    mlflow.pyfunc.save_model(
        str(tmp_path / "served"),
        python_model=pyfunc_model.__file__,
        pip_requirements=[],  # else MLflow loads the model in a process to see what it imports
        artifacts={"model": str(tmp_path / "model")},
        model_config={
            "name": "tiny",
            "dimensions": list(own.dimensions),
            "instruction_template": own.config.instruction_template,
        },
    )
    served = mlflow.pyfunc.load_model(str(tmp_path / "served"))
    for request in ({"role": "query"}, {"role": "query", "instruction": "clustering: "}, {}):
        answer = served.predict({"input": TEXTS, **request})
        found = np.array([item["embedding"] for item in answer["data"]])
        role, instruction = request.get("role", "document"), request.get("instruction", "")
        expected = encode(own, TEXTS, role=role, instruction=instruction)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_other_models_take_no_corpus(tmp_path):
    from rayembed.models.sentence_module import SentenceModule

    save_encoder(tmp_path / "encoder")
    module = SentenceModule(load_model(tmp_path / "encoder"))
    with pytest.raises(DataError, match="'biencoder' does not use a corpus"):
        module.set_corpus(CORPUS)


def test_instructions_are_read_back_from_their_template(tmp_path):
    """One that was taken away too."""
    prompts = {
        "query": "q: ",
        "document": "",
        "A": "Instruct: tell\nQuery: ",
        "B": "",
        "A-document": "",
    }
    path = tmp_path / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": prompts}))
    config = tiny_settings("nvembed")
    assert saved_instructions(tmp_path, config) == {"A": "tell", "B": ""}
    path.unlink()
    assert saved_instructions(tmp_path, config) == {}


def test_embedding_a_corpus_tells_how_far_it_is(model):
    told = []
    encode_context(
        model, CORPUS, tokens_per_batch=20, progress=lambda done, of: told.append((done, of))
    )
    assert len(told) > 1
    assert told[-1] == (len(CORPUS), len(CORPUS))
    assert [done for done, _ in told] == sorted({done for done, _ in told})
