"""Own pairs through the training job: it ends with scores of their held-out part."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from own_pairs import own_run
from tiny_job import ROOT

from rayembed.config.override import override
from rayembed.data.engine.artifacts import open_artifact
from rayembed.data.engine.parts import read_records

pytestmark = pytest.mark.job

OUR_LINE = r"\d\d:\d\d:\d\d  \S"


def test_base_trained_and_bm25_stand_side_by_side(tmp_path: Path) -> None:
    while_training = "{data: {kind: held_out}, keep: last, every_steps: 1}"
    run = override(own_run(tmp_path), [f"evaluation.validation={while_training}"])
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    job = (sys.executable, ROOT / "jobs" / "train_biencoder.py", "--recipe", tmp_path / "run.yaml")
    done = subprocess.run(job, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    # Whatever a library prints would stand between our lines.
    foreign = [line for line in done.stderr.splitlines() if not re.match(OUR_LINE, line)]
    assert not foreign, foreign
    folder = tmp_path / "outputs" / "runs" / "own"
    with (folder / "scores.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["model", "pairs-held-out"]
    scores = {name: float(score) for name, score in rows}
    hybrid = {f"hybrid: BM25 and {name}" for name in ("untrained", "stage 1: finetune")}
    assert scores.keys() == {"untrained", "stage 1: finetune", "BM25", *hybrid}
    assert scores["untrained"] != scores["stage 1: finetune"]
    lines = (folder / "validation.jsonl").read_text().splitlines()
    assert len(lines) == run.total_steps
    assert json.loads(lines[-1])["scores"] == pytest.approx(
        {"pairs-held-out": scores["stage 1: finetune"]}, abs=1e-4
    )
    assert "Held out   pairs-held-out: " in done.stdout
    assert "queries over 20 documents that no training row has" in done.stdout
    card = (folder / "models" / "finetune" / "README.md").read_text()
    assert "pairs-held-out" in card
    assert "queries over 20 documents" in card
    assert str(tmp_path / "outputs" / "data") not in card  # where it lies is nobody else's business

    (part,) = (tmp_path / "outputs" / "data" / "held_out").iterdir()
    (records,) = (tmp_path / "outputs" / "data" / "records").iterdir()
    lines = (part / "beir" / "corpus.jsonl").read_text().splitlines()
    held_out = {json.loads(line)["text"] for line in lines}
    trained = [r for p in open_artifact(str(records)).parts for r in read_records(p.path)]
    assert len(held_out) == 20
    assert held_out.isdisjoint(text for record in trained for text in record.positives)

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (version,) = client.search_model_versions("name='own'")
    measured = client.get_run(version.run_id).data.metrics
    assert any("pairs-held-out" in name for name in measured), measured
