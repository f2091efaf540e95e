"""`--trace-batch`: from a step of training back to the rows of its sources."""

import json
from pathlib import Path

import pytest

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.prepare import prepare
from rayembed.pipeline.run.folders import locked_folders
from rayembed.pipeline.run.training_job import training_job


@pytest.fixture
def run(tmp_path: Path) -> Run:
    rows = [{"query": f"query {i}", "positive": f"positive {i}"} for i in range(20)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return parse(
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
            "placement": {"storage_path": str(tmp_path / "out")},
        },
    )


@pytest.fixture
def prepared(run: Run) -> Run:
    """The run as a training has it when its data are prepared."""
    with locked_folders(run) as folders:
        folders.keep_plans(prepare(run, PipelineContext(run.placement.storage_path, run.seed)))
    return run


def trace(run: Run, tmp_path: Path, batch: str) -> int:
    file = tmp_path / "run.yaml"
    file.write_text(run.to_yaml())
    argv = ["--recipe", str(file), "--trace-batch", batch]
    return training_job("biencoder")(argv)


def test_every_row_leads_to_its_line(prepared: Run, tmp_path: Path, capsys) -> None:
    assert trace(prepared, tmp_path, "only:3") == 0
    printed = capsys.readouterr().out
    content = (tmp_path / "pairs.jsonl").read_bytes()
    lines = [line for line in printed.splitlines() if "pairs.jsonl@" in line]
    assert len(lines) == 4
    for line in lines:
        place = int(line.partition("pairs.jsonl@")[2].split()[0])
        row = json.loads(content[place:].partition(b"\n")[0])
        assert f" {row['query']} " in line
    assert "20 → 20 rows" in printed


def test_what_is_not_there_is_told(prepared: Run, tmp_path: Path, capsys) -> None:
    assert trace(prepared, tmp_path, "only:5") == 1
    assert "has steps 0 to 4" in capsys.readouterr().err
    assert trace(prepared, tmp_path, "onnly:0") == 2
    assert "did you mean 'only'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        trace(prepared, tmp_path, "only")
    assert "'only' is not STAGE:STEP" in capsys.readouterr().err
    (plans,) = (tmp_path / "out" / "runs").glob("*/plans.json")
    whole = plans.read_text()
    plans.write_text(whole[:-4])
    assert trace(prepared, tmp_path, "only:0") == 1
    assert "the list of batch plans" in capsys.readouterr().err
    plans.write_text(whole)
    (tmp_path / "out" / "plans").rename(tmp_path / "gone")
    assert trace(prepared, tmp_path, "only:0") == 1
    assert "there is no finished batch plan" in capsys.readouterr().err


def test_a_run_without_a_plan_is_told(run: Run, tmp_path: Path, capsys) -> None:
    assert trace(run, tmp_path, "only:0") == 1
    assert "no training with this run name has prepared a plan" in capsys.readouterr().err
