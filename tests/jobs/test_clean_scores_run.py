"""A training run, an evaluation of its model and a comparison report clean scores."""

import io
import json

import mlflow
import pytest
from beir_set import write_beir
from own_pairs import own_run

from rayembed.config.evaluation import EvaluationRun
from rayembed.config.settings import parse
from rayembed.pipeline.evaluate.evaluate import evaluate, with_findings
from rayembed.pipeline.evaluate.report import print_evaluated
from rayembed.pipeline.run.train import train
from rayembed_extras.comparison.job import run_compare_job

pytestmark = pytest.mark.job


def planted_set(folder, pairs):
    """A search whose first five of 25 queries are training queries."""
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    queries = {f"q{n:02}": row["query"].upper() for n, row in enumerate(rows[1:6])}
    queries |= {f"q{n:02}": f"which river of stone {n} is in no pair" for n in range(5, 25)}
    documents = {f"d{n:02}": f"{n} the river {n} of an old bridge" for n in range(25)}
    judged = {f"q{n:02}": {f"d{n:02}": 1} for n in range(25)}
    return write_beir(folder, documents, queries, judged)


def test_a_run_an_evaluation_and_a_comparison_have_clean_scores(tmp_path, capsys):
    own_run(tmp_path)  # writes the pairs
    path = planted_set(tmp_path / "search", tmp_path / "pairs.jsonl")
    sets = [{"name": "search", "path": str(path)}]
    run = own_run(
        tmp_path,
        "data.datasets.pairs.held_out=null",
        "stages.finetune.steps=32",  # every pair is trained
        f"evaluation.own_sets={json.dumps(sets)}",
        "placement.findings=[clean_scores]",
    )
    outcome = train(run)
    printed = capsys.readouterr().out
    (finding,) = outcome.findings
    assert finding.metrics["seen_share"] == {"search": 0.2}
    assert "1 of 1 tasks have queries or texts in the batch plan" in printed
    assert (outcome.trained.local / "seen_texts.csv").read_text().count("search,test") == 5

    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (experiment,) = client.search_experiments(filter_string="name = 'rayembed'")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.data.metrics["seen_share/search"] == 0.2
    assert "clean/search" in tracked.data.metrics
    sent = {item.path for item in client.list_artifacts(tracked.info.run_id, "findings")}
    assert {"findings/clean_scores.csv", "findings/seen_texts.csv"} <= sent
    model = tmp_path / "outputs/runs/own/models/finetune"
    card = (model / "README.md").read_text()
    assert "### Clean scores" in card
    assert "| search | 25 | 20.0 % |" in card
    meta = json.loads((outcome.trained.local / "model_meta.json").read_text())
    assert meta["training_datasets"] == [], "of own pairs and a base without a name"

    values = {
        "model": {"reference": str(model), "dtype": "float32"},
        "own_sets": sets,
        "placement": {"storage_path": str(tmp_path / "outputs"), "runtime": "local"},
    }
    evaluated = with_findings(evaluate(parse(EvaluationRun, values)))
    told = {one.title: one for one in evaluated.findings}["Clean scores"]
    assert told.metrics == finding.metrics
    out = io.StringIO()
    print_evaluated(evaluated, out, tracking_uri="sqlite:///m.db")
    assert "20.0 %" in out.getvalue()

    values["model"] = {"reference": outcome.version.uri, "dtype": "float32"}
    registered = with_findings(evaluate(parse(EvaluationRun, values)))
    told = {one.title: one for one in registered.findings}["Clean scores"]
    assert told.metrics == finding.metrics, "the MLflow run of the version names its plans"

    folders = ["--results", str(tmp_path / "outputs/evaluation"), "--output", str(tmp_path / "out")]
    assert run_compare_job([*folders, "--findings", "clean_scores"]) == 0
    assert "20.0 %" in capsys.readouterr().out
