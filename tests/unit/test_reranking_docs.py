"""The Python of docs/rerankers.md runs as it stands."""

import re
from pathlib import Path

import pytest
from own_pairs import write_pairs
from tiny_folders import save_biencoder
from tiny_scorers import save_scorer

import rayembed

PAGE = (Path(__file__).parents[2] / "docs" / "rerankers.md").read_text(encoding="utf-8")
FEWER = {
    "model.document_max_length": 48,
    "data.datasets.pairs.mining.rule": {"kind": "top_k"},
    "stages.rerank.steps": 2,
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pairs(tmp_path / "pairs.jsonl")
    save_scorer(tmp_path / "scorer")
    save_biencoder(tmp_path / "embedder")
    whole = rayembed.train_reranker

    def train_reranker(model, *args, embedder, **given):
        assert model == embedder == "all-MiniLM-L6-v2"
        return whole("scorer", *args, embedder="embedder", settings=FEWER, **given)

    monkeypatch.setattr(rayembed, "train_reranker", train_reranker, raising=False)


def test_a_reranker_of_the_page_is_trained_and_ranks(folder):
    names = {}
    trains, ranks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    exec(trains, names)
    made = Path.cwd() / "outputs/runs/support-reranker/models/rerank"
    assert Path(names["trained"].folder) == made
    exec(ranks, names)
    assert len(names["reranker"].rank("cats", ["cats dogs", "a river"])) == 2
