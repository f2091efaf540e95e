"""CDE through the training job: clustered batches, both stages trained, one export for all."""

import mlflow
import numpy as np
import pytest
from mlflow_uris import mlflow_at
from sentence_transformers import SentenceTransformer
from tiny_job import run_here, sentence_run
from tiny_models import save_cde_stages
from word_articles import write_word_articles

from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import corpus_context, encode

pytestmark = pytest.mark.job


def tiny_run(folder):
    clusters = {"teacher": str(folder / "second"), "max_length": 32, "batch_pairs": 8}
    model = {
        "kind": "cde",
        "backbone": {"path": str(folder / "second"), "dtype": "float32"},
        "encoder": {"path": str(folder / "first")},
        "num_context": 4,
        "sequence_dropout": 0.1,
        "output": "residual",
        "query_max_length": 48,
        "document_max_length": 48,
    }
    return sentence_run(
        folder,
        "tiny-cde",
        model,
        dataset={"clusters": clusters},
        policy="clustered",
        optimizer={"learning_rate": 1e-2},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    save_cde_stages(folder)
    write_word_articles(folder / "articles.json")
    (folder / "run.yaml").write_text(tiny_run(folder).to_yaml())
    done = run_here("train_cde", "--recipe", f"{folder}/run.yaml")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_both_stages_are_trained_and_the_export_is_the_same_everywhere(trained, tmp_path):
    model_folder = trained / "outputs" / "runs" / "tiny-cde" / "models" / "retrieval"
    model = load_model(model_folder)
    folders = {"backbone": trained / "second", "encoder": trained / "first"}
    start = build_model(tiny_run(trained).model, folders, seed=0).state_dict()
    for part in ("backbone.", "encoder.", "layers.first."):
        moved = [
            (start[name] - weight).abs().max().item()
            for name, weight in model.state_dict().items()
            if name.startswith(part) and weight.ndim > 1
        ]
        assert max(moved) > 5e-3, part

    texts, corpus = ["The sentence number 3 speaks of own7", "Paris"], ["A sentence", "own7", "x"]
    model.set_corpus(corpus_context(model, corpus))
    ours = encode(model, texts, role="query")
    theirs = SentenceTransformer(str(model_folder), trust_remote_code=True, device="cpu")
    theirs[0].set_corpus(corpus)
    np.testing.assert_allclose(theirs.encode_query(texts), ours, atol=1e-5)

    with mlflow_at(f"sqlite:///{trained}/outputs/mlflow.db"):
        served = mlflow.pyfunc.load_model("models:/tiny-cde/1")
    model.set_corpus(None)
    answer = served.predict({"input": texts, "role": "query"})
    found = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(found, encode(model, texts, role="query"), atol=1e-5)
    card = (model_folder / "README.md").read_text()
    assert "model[0].set_corpus(corpus)" in card
    assert "contextual document embeddings" in card
