"""README's Python on a file with ordinary dirt: a better model comes out."""

import ast
import json
from pathlib import Path

import numpy as np
from own_pairs import UNGUARDED, write_pairs
from tiny_models import save_encoder

from rayembed.config.types import SHORT_NAMES

README = Path(__file__).resolve().parents[2] / "README.md"

TINY = """dict(
    learning_rate=0.01,
    batch_size=16,
    settings={
        "model.query_max_length": 32,
        "model.document_max_length": 32,
        "model.backbone.dtype": "float32",
        **UNGUARDED,
    },
)"""
"""What a tiny encoder of random weights needs beside what README writes."""


def first_block():
    """README's first Python block, with pairs of a file and `TINY` for its training."""
    code = README.read_text().split("```python\n", 1)[1].split("```", 1)[0]
    assert len(code.strip().splitlines()) <= 12
    tree = ast.parse(code)
    (call,) = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "rayembed.train"
    )
    call.args[1] = ast.Name("pairs", ast.Load())
    call.keywords.append(ast.keyword(None, ast.parse(TINY, mode="eval").body))
    return compile(ast.fix_missing_locations(tree), str(README), "exec")


def test_a_dirty_file_becomes_a_better_model(tmp_path, monkeypatch, capsys):
    rows = write_pairs(tmp_path / "clean.jsonl")
    dirt = [{"query": "", "positive": "x"}, {"query": "y", "positive": None}, {"query": "z"}]
    lines = [json.dumps(row) for row in [*rows[:50], *dirt[:2], *rows[50:], rows[0], dirt[2]]]
    (tmp_path / "pairs.jsonl").write_text("\ufeff" + "\n".join(lines))
    monkeypatch.setitem(SHORT_NAMES, "all-MiniLM-L6-v2", str(save_encoder(tmp_path / "encoder")))
    monkeypatch.chdir(tmp_path)
    names = {"UNGUARDED": UNGUARDED, "pairs": str(tmp_path / "pairs.jsonl")}
    exec(first_block(), names)
    scores = {name: row["pairs-held-out"] for name, row in names["trained"].scores.items()}
    assert scores["stage 1: finetune"] > scores["untrained"] + 0.1
    assert "BM25" in scores
    assert np.linalg.norm(names["vectors"]) > 0.99
    assert "stage 1: finetune" in capsys.readouterr().out
