"""Causal2Vec through the training job, with both parts trained and in-context examples."""

import mlflow
import numpy as np
import pytest
from made_up_articles import write_articles
from mlflow_uris import mlflow_at
from sentence_transformers import SentenceTransformer
from tiny_job import TASK, run_here, sentence_run
from tiny_models import metaspace_tokenizer, save_decoder, save_encoder

from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.stream import PairSteps
from rayembed.models.causal2vec.architecture import CAUSAL2VEC
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.registry.metrics_log import MetricsLog

pytestmark = pytest.mark.job


def tiny_run(folder):
    lora = {"rank": 2, "alpha": 4, "dropout": 0.0}
    on_encoder = {**lora, "target_modules": ["query", "value"]}
    model = {
        "kind": "causal2vec",
        "backbone": {"path": str(folder / "llm"), "dtype": "float32"},
        "encoder": {
            "path": str(folder / "encoder"),
            "max_length": 40,
            "frozen": False,
            "lora": on_encoder,
        },
        "lora": lora,
        "examples": {
            "max_examples": 2,
            "query_tokens": 8,
            "response_tokens": 40,
            "max_tokens": 220,
        },
        "query_max_length": 256,
        "document_max_length": 64,
    }
    return sentence_run(
        folder,
        "tiny-causal2vec",
        model,
        dataset={"query_instruction": TASK},
        policy="homogeneous",
        optimizer={"learning_rate": 1e-2, "decay_steps": 6},
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    save_decoder(folder / "llm", tokenizer=metaspace_tokenizer(add_bos=True))
    save_encoder(folder / "encoder")
    write_articles(folder / "articles.json")
    (folder / "run.yaml").write_text(tiny_run(folder).to_yaml())
    done = run_here("train_causal2vec", "--recipe", f"{folder}/run.yaml")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, done.stdout


def test_the_trained_model_is_the_same_for_ours_sentence_transformers_and_mlflow(trained):
    folder, printed = trained
    model_folder = folder / "outputs" / "runs" / "tiny-causal2vec" / "models" / "retrieval"
    assert f".as_sentence_transformer('{model_folder}')" in printed
    assert "version 1 (models:/tiny-causal2vec/1)\n           without scores, so no" in printed
    texts = ["The sentence number 3 speaks of own7", "Paris"]
    model = load_model(model_folder)
    ours = encode(model, texts, role="query", instruction=TASK)
    assert ours.shape == (2, 64)
    prompt = f"Instruct: {TASK}\nQuery:"
    theirs = SentenceTransformer(str(model_folder), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(theirs.encode_query(texts, prompt=prompt), ours, atol=1e-5)
    with mlflow_at(f"sqlite:///{folder}/outputs/mlflow.db"):
        served = mlflow.pyfunc.load_model("models:/tiny-causal2vec/1")
    answer = served.predict({"input": texts, "role": "query", "instruction": TASK})
    found = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(found, ours, atol=1e-5)


def test_it_was_trained_on_queries_with_examples(trained):
    folder = trained[0]
    (manifest,) = (folder / "outputs" / "plans").glob("*/manifest.json")
    plan = BatchPlan.open(str(manifest.parent))
    config = tiny_run(folder).model
    told, plain = (
        CAUSAL2VEC.tokenizer(
            config.model_copy(update=change),
            {"backbone": folder / "llm", "encoder": folder / "encoder"},
        )
        for change in ({}, {"examples": None})
    )

    def tokens(tokenizer):
        batches = list(map(PairSteps(plan, tokenizer), range(plan.num_steps)))
        return [sum(len(one["input_ids"]) for one in batch.tokens) for batch in batches]

    log = MetricsLog(folder / "outputs" / "runs" / "tiny-causal2vec" / "metrics.jsonl")
    seen = [record["tokens"] for record in log.records()]
    assert seen == tokens(told)
    assert sum(seen) > sum(tokens(plain)) + 100
