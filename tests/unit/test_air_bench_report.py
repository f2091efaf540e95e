"""AIR-Bench in an evaluation: what is printed, what is written, and the command for the rest."""

import csv
import io
import shlex
import zipfile
from pathlib import Path

import mlflow
import pytest

from rayembed.config.evaluation import EvaluationRun
from rayembed.errors import DataError
from rayembed.pipeline.evaluate.evaluate import evaluate
from rayembed.pipeline.evaluate.job import run_evaluation_job, track
from rayembed.pipeline.evaluate.report import print_evaluated
from rayembed.registry.tracking import Tracker
from rayembed_extras.air_bench.catalogue import air_bench_datasets
from rayembed_extras.air_bench.job import AIR_BENCH_RESULT, AirBenchJob
from rayembed_extras.air_bench.results import open_results

VERSION = "AIR-Bench_24.05"


def made_up(job, model):
    """As the job itself, but with results and scores that nothing was embedded for."""
    results = open_results(job.folder, job.dataset.version, model.mteb_model_meta)
    for split in job.dataset.splits:
        results.save(
            job.dataset, split, {"q": {"d": 1.0}}, instruction="", dataset_revision="c",
            num_documents=1, scores={"ndcg_at_10": 0.5} if split == "dev" else {},
        )  # fmt: skip
    return {AIR_BENCH_RESULT: {"retriever": results.retriever}}


def without_law(job, model):
    if job.dataset.domain == "law":
        raise DataError("no law today")
    return made_up(job, model)


def evaluated(storage, monkeypatch, run_job=made_up):
    """An evaluation whose results lie in the storage."""
    monkeypatch.setattr(AirBenchJob, "run", run_job)
    placement = {} if storage is None else {"storage_path": str(storage)}
    return evaluate(
        EvaluationRun.model_validate(
            {"model": {"reference": "bm25"}, "benchmarks": [VERSION], "placement": placement}
        )
    )


def report(storage, monkeypatch, run_job=made_up):
    """What is printed of it."""
    out = io.StringIO()
    print_evaluated(evaluated(storage, monkeypatch, run_job), out, tracking_uri="sqlite:///x")
    return out.getvalue()


def test_dev_scores_are_in_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert track(evaluated(tmp_path / "kept", monkeypatch, without_law), uri)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    found = {name: value for name, value in run.data.metrics.items() if name.startswith("dev/")}
    made = [d for d in air_bench_datasets(VERSION, splits=["dev"]) if d.domain != "law"]
    qa = {f"dev/{VERSION}/{d.label}" for d in made if d.task == "qa"}
    assert qa
    assert found == dict.fromkeys(qa, 0.5), "the made-up scores have nDCG alone"


def test_an_evaluation_that_is_interrupted_is_no_finished_run(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Tracker, "log_artifact", interrupted)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with pytest.raises(KeyboardInterrupt):
        track(evaluated(tmp_path / "kept", monkeypatch, without_law), uri)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "KILLED"


def test_dev_scores_are_a_file_beside_the_results(tmp_path, monkeypatch):
    said = report(tmp_path / "kept", monkeypatch, without_law)
    assert "no law today" in said
    assert "| qa | arxiv | en | default | ndcg_at_10 | 50.00 |" in said
    (line,) = [line for line in said.splitlines() if line.startswith("Dev scores ")]
    path = Path(line.removeprefix("Dev scores "))
    assert path.parent.parent == tmp_path / "kept" / "air-bench" / VERSION
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == len(air_bench_datasets(VERSION, splits=["dev"]))
    (arxiv,) = [row for row in rows if (row["task"], row["domain"]) == ("qa", "arxiv")]
    assert arxiv[path.parent.name] == "0.5"
    assert {row[path.parent.name] for row in rows if row["domain"] == "law"} == {""}, "not made"


@pytest.mark.parametrize("storage", [None, "the results"])
def test_the_command_for_a_submission_finds_the_results(storage, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = report(storage and tmp_path / storage, monkeypatch)
    (line,) = [line for line in said.splitlines() if "--submission" in line]
    assert ("--set" in line) == (storage is not None)
    command = shlex.split(line.partition("rayembed evaluate")[2])
    assert run_evaluation_job(command, about=None) == 0, capsys.readouterr().err
    (path,) = (tmp_path / (storage or "outputs") / "air-bench" / "submissions").iterdir()
    with zipfile.ZipFile(path) as packed:
        expected = air_bench_datasets(VERSION, splits=["test"])
        assert len(packed.namelist()) == len(expected)


def test_a_submission_is_written_where_the_settings_say(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["--submission", VERSION, "--retriever", "made__up"]
    assert run_evaluation_job(asked, about=None) == 1
    assert f"in '{tmp_path}/outputs/air-bench'" in capsys.readouterr().err
    run = {"model": {"reference": "bm25"}, "benchmarks": [VERSION]}
    placement = {"storage_path": "elsewhere"}
    recipe = tmp_path / "evaluation.yaml"
    recipe.write_text(EvaluationRun.model_validate({**run, "placement": placement}).to_yaml())
    assert run_evaluation_job([*asked, "--recipe", str(recipe)], about=None) == 1
    assert f"in '{tmp_path}/elsewhere/air-bench'" in capsys.readouterr().err
    assert run_evaluation_job([*asked, "--set", "placement.storage=x"], about=None) == 2
    assert "did you mean 'storage_path'?" in capsys.readouterr().err
