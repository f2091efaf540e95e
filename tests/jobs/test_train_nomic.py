"""Nomic Embed v2 through the training job: both stages, experts on two workers, two widths."""

import json

import mlflow
import numpy as np
import pytest
from data_job import write_rows
from made_up_articles import sample_over, write_articles
from mlflow_uris import mlflow_at
from sentence_transformers import SentenceTransformer
from tiny_job import run_here
from tiny_models import save_encoder

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.registry.metrics_log import MetricsLog

pytestmark = [pytest.mark.job, pytest.mark.ray]


def tiny_run(folder):
    sentences = sample_over(folder / "articles.json").pairs("sentence")
    crossing = {"kind": "pairs", "path": str(folder / "crossing.jsonl")}
    batch = {
        "policy": "homogeneous",
        "global_pairs": 8,
        "num_negatives": 0,
        "in_batch_negatives": True,
    }
    return parse(
        Run,
        {
            "name": "tiny-nomic",
            "model": {
                "kind": "nomic-moe",
                "backbone": {"path": str(folder / "bert"), "dtype": "float32"},
                "experts": {"num_experts": 4},
                "dimensions": [16],
                "query_max_length": 48,
                "document_max_length": 64,
            },
            "data": {
                "datasets": [
                    {"name": "sentences", "source": sentences},
                    {"name": "crossing", "source": crossing},
                ],
            },
            "stages": [
                {
                    "name": "pretrain",
                    "datasets": {"sentences": 1, "crossing": 1},
                    "batch": batch,
                    "optimizer": {"learning_rate": 1e-3},
                    "steps": 3,
                    "query_max_length": 24,
                    "document_max_length": 32,
                },
                {
                    "name": "finetune",
                    "datasets": {"sentences": 1},
                    "batch": batch,
                    "loss": {"dimensions": [16]},
                    "optimizer": {"learning_rate": 1e-3},
                    "steps": 2,
                },
            ],
            "placement": {
                "storage_path": str(folder / "outputs"),
                "workers": 2,
                "cpus_per_worker": 0.5,
                "expert_parallel": 2,
                "zero_stage": 2,
                "micro_batch_tokens": 256,
            },
        },
    )


@pytest.fixture(scope="module")
def trained(cluster, tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    save_encoder(folder / "bert")
    articles = json.loads(write_articles(folder / "articles.json").read_text())
    texts = [article["extract"] for article in articles.values()]
    write_rows(
        folder / "crossing.jsonl",
        [{"query": text, "positive": text.upper().replace("E", "A")} for text in texts],
    )
    (folder / "run.yaml").write_text(tiny_run(folder).to_yaml())
    done = run_here("train_nomic", "--recipe", f"{folder}/run.yaml")
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_the_trained_model_is_the_same_everywhere_at_both_widths(trained):
    model_folder = trained / "outputs" / "runs" / "tiny-nomic" / "models" / "finetune"
    texts = ["The sentence number 3 speaks of own7", "Paris"]
    ours = encode(load_model(model_folder), texts, role="query")
    theirs = SentenceTransformer(str(model_folder), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(theirs.encode_query(texts), ours, atol=1e-5)
    with mlflow_at(f"sqlite:///{trained}/outputs/mlflow.db"):
        served = mlflow.pyfunc.load_model("models:/tiny-nomic/1")
    short = ours[:, :16] / np.linalg.norm(ours[:, :16], axis=1, keepdims=True)
    for fields, expected in (({}, ours), ({"dimensions": 16}, short)):
        answer = served.predict({"input": texts, "role": "query"} | fields)
        found = np.array([item["embedding"] for item in answer["data"]])
        np.testing.assert_allclose(found, expected, atol=1e-5)
    assert "4 experts" in (model_folder / "README.md").read_text()


def test_routers_are_logged_and_stages_have_their_own_lengths(trained):
    log = MetricsLog(trained / "outputs" / "runs" / "tiny-nomic" / "metrics.jsonl")
    records = log.records()
    assert [record["stage"] for record in records] == ["pretrain"] * 3 + ["finetune"] * 2
    for record in records:
        shares = [record[f"experts/layer_1/share_{expert}"] for expert in range(4)]
        assert sum(shares) == pytest.approx(1)
        assert record["experts/largest_share"] == max(shares)
        assert 0 < record["experts/router_entropy"] <= 1 + 1e-6  # a sum in float32
    # Of 8 queries and 8 documents at most.
    assert max(record["tokens"] for record in records[:3]) <= 8 * (24 + 32)
    assert min(record["tokens"] for record in records[3:]) > 8 * (24 + 32)
