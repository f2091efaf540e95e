"""`jobs/trace_batch.py`: from a step of training back to the rows of its sources."""

import json
from pathlib import Path

import pytest

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.artifacts import PipelineContext
from rayembed.data.prepare import prepare
from rayembed.pipeline.batch_trace import run_trace


@pytest.fixture
def plan(tmp_path: Path) -> str:
    rows = [{"query": f"query {i}", "positive": f"positive {i}"} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = parse(
        Run,
        {
            "name": "traced",
            "model": {
                "kind": "biencoder",
                "backbone": {"path": "none"},
                "pooling": {"kind": "mean"},
            },
            "data": {
                "datasets": [
                    {"name": "own", "source": {"path": f"{tmp_path}/pairs.jsonl", "kind": "pairs"}}
                ],
                "held_out": {"num_titles": 0},
            },
            "stages": [
                {
                    "name": "only",
                    "datasets": {"own": 1},
                    "batch": {"global_pairs": 4, "num_negatives": 0, "in_batch_negatives": True},
                    "optimizer": {"learning_rate": 1e-3},
                    "steps": 5,
                }
            ],
        },
    )
    return prepare(run, PipelineContext(str(tmp_path / "out"), run.seed))["only"]


def test_every_row_leads_to_its_line(plan: str, tmp_path: Path, capsys) -> None:
    assert run_trace([plan, "3"], about="") == 0
    printed = capsys.readouterr().out
    content = (tmp_path / "pairs.jsonl").read_bytes()
    lines = [line for line in printed.splitlines() if "pairs.jsonl@" in line]
    assert len(lines) == 4
    for line in lines:
        place = int(line.partition("pairs.jsonl@")[2].split()[0])
        row = json.loads(content[place:].partition(b"\n")[0])
        assert f" {row['query']} " in line
    assert "20 → 20 rows" in printed


def test_what_is_not_there_is_told(plan: str, tmp_path: Path, capsys) -> None:
    assert run_trace([plan, "5"], about="") == 1
    assert "has steps 0 to 4" in capsys.readouterr().err
    assert run_trace([str(tmp_path / "none"), "0"], about="") == 1
    assert "there is no finished batch plan" in capsys.readouterr().err
