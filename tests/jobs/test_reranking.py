"""The reranker job and `rayembed.train_reranker`: own pairs to both orders of held-out ones."""

import json
import subprocess
import sys

import numpy as np
import pytest
from own_pairs import write_pairs
from sentence_transformers import CrossEncoder
from tiny_folders import save_biencoder
from tiny_job import ROOT
from tiny_scorers import save_scorer

import rayembed

pytestmark = pytest.mark.job

SETTINGS = {
    "model.document_max_length": 48,
    "model.backbone.dtype": "float32",
    "data.datasets.pairs.mining.max_length": 20,
    "data.datasets.pairs.mining.num_negatives": 3,
    "data.datasets.pairs.mining.rule": {"kind": "top_k"},
    "stages.rerank.batch.num_negatives": 3,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("reranking")
    write_pairs(home / "pairs.jsonl")
    save_biencoder(home / "embedder")
    save_scorer(home / "scorer")
    return home


def test_the_job_ends_with_both_orders_and_what_to_run_next(home):
    values = {
        **SETTINGS,
        "model.backbone.path": str(home / "scorer"),
        "stages.rerank.batch.global_pairs": 8,
        "stages.rerank.steps": 4,
        "placement.storage_path": str(home / "outputs"),
    }
    sets = [f"{path}={json.dumps(v) if isinstance(v, dict) else v}" for path, v in values.items()]
    command = [sys.executable, ROOT / "jobs" / "train_reranker.py", "--name", "own"]
    command += ["--pairs", home / "pairs.jsonl", "--embedder", home / "embedder"]
    command += [word for assignment in sets for word in ("--set", assignment)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    folder = home / "outputs" / "runs" / "own" / "models" / "rerank"
    for part in ("the embedder's", "its best 50 reranked", "hybrid with BM25", "MRR@10", "Gain  "):
        assert part in done.stdout
    assert f"Model      {folder}" in done.stdout
    assert f"--reranker {folder}" in done.stdout.splitlines()[-1]
    scores = CrossEncoder(str(folder), device="cpu").predict([("number 1 cats", "1 cats dogs")])
    assert np.isfinite(scores).all()
    assert not (folder / "proof").exists()
    # Nothing is left to do.
    again = subprocess.run(command, check=False, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr[-4000:]
    assert again.stdout == done.stdout


def test_a_call_trains_learns_and_gives_the_scores(home):
    trained = rayembed.train_reranker(
        home / "scorer",
        home / "pairs.jsonl",
        embedder=home / "embedder",
        loss="pointwise_bce",
        steps=30,
        batch_size=8,
        learning_rate=0.005,
        output=home / "called",
        settings=SETTINGS,
    )
    lines = (home / "called" / "runs" / trained.run.name / "metrics.jsonl").read_text()
    losses = [json.loads(line)["loss"] for line in lines.splitlines()]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])
    assert trained.scores.by_row.keys() == {
        *("embedder", "reranked", "bm25", "hybrid", "hybrid-reranked")
    }
    own, reranked = (trained.scores.mean(row) for row in ("embedder", "reranked"))
    assert trained.gain == pytest.approx(reranked - own, abs=1e-6)


def test_lists_of_one_document_are_refused(home):
    pairs = [{"query": f"query {i}", "positive": "the one document"} for i in range(30)]
    pairs += [{"query": f"other {i}", "positive": f"document {i}"} for i in range(30)]
    refuses_all = {"kind": "top_k_perc_pos", "max_relative_score": 0.01}
    with pytest.raises(rayembed.errors.DataError, match="rows have no hard negatives"):
        rayembed.train_reranker(
            home / "scorer",
            pairs,
            embedder=home / "embedder",
            steps=2,
            output=home / "refused",
            settings=SETTINGS | {"data.datasets.pairs.mining.rule": refuses_all},
        )
