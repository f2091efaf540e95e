"""A training run ends with the page of changed queries and the share of cut texts."""

import json

import mlflow
import pytest
from own_pairs import own_run, write_pairs

from rayembed.pipeline.run.train import train
from rayembed_extras.query_changes.cut_texts import FILE
from rayembed_extras.query_changes.findings import PAGE

pytestmark = pytest.mark.job


def test_a_run_reports_changed_queries_and_cut_texts(tmp_path, capsys):
    run = own_run(tmp_path)  # writes pairs, of which a tenth is held out
    rows = write_pairs(tmp_path / "pairs.jsonl")
    long = [{**row, "positive": f"{row['positive']} {'fox ' * 40}"} for row in rows[::2]]
    kept = [*long, *rows[1::2]]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))
    outcome = train(run)
    printed = " ".join(capsys.readouterr().out.split())
    findings = {finding.title: finding for finding in outcome.findings}
    assert {"Cut texts", "Changed queries"} <= findings.keys()
    for finding in findings.values():
        assert "failed" not in " ".join(finding.lines)

    names = [row[0] for row in findings["Cut texts"].table.rows]
    assert names == ["pairs-held-out", "pairs (training, finetune)"]
    assert "set model.document_max_length=" in printed
    assert "pairs-held-out:" in " ".join(findings["Changed queries"].lines)
    results = outcome.trained.local
    assert "<h2" in (results / PAGE).read_text()
    assert json.loads((results / FILE).read_text())["pairs-held-out"]

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'rayembed'")
    (tracked,) = client.search_runs([experiment.experiment_id])
    sent = {item.path for item in client.list_artifacts(tracked.info.run_id, "findings")}
    assert {f"findings/{PAGE}", f"findings/{FILE}"} <= sent
    assert tracked.data.metrics["cut_documents/pairs-held-out"] > 0.01

    card = (tmp_path / "outputs/runs/own/models/finetune/README.md").read_text()
    assert "### Changed queries" in card
    assert "### Cut texts" in card
    assert str(tmp_path) not in card
