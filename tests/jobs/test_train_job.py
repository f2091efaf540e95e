"""The training job from its command line to the registry, on a tiny model."""

import json
import re

import mlflow
import mteb
import numpy as np
import pytest
from huggingface_hub import ModelCard
from mlflow_uris import mlflow_at
from sentence_transformers import SentenceTransformer
from tiny_job import run_here, submit, write_inputs

from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.registry.metrics_log import MetricsLog
from rayembed.registry.registered_model import (
    connect,
    get_version,
    parse_reference,
    read_scores,
)
from rayembed.training.checkpoints.weights import read_made_of

pytestmark = [pytest.mark.job, pytest.mark.ray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def trained(folder):
    done = submit(folder)
    assert done.returncode == 0, done.stderr[-4000:]
    (folder / "job.log").write_text(done.stdout + done.stderr)
    return folder / "outputs" / "runs" / "tiny", done.stdout


def test_ends_with_a_table_and_what_to_run_next(trained):
    run_folder, printed = trained
    for text in ("untrained", "stage 1: retrieval", "stage 2: blend", "BM25", "hybrid"):
        assert text in printed
    assert f".as_sentence_transformer('{run_folder}/models/blend')" in printed
    assert "tiny version 1 (models:/tiny@candidate)" in printed
    assert "mlflow ui --backend-store-uri sqlite:///" in printed
    for name in ("loss.png", "scores.png", "scores.md", "scores.csv", "run.yaml"):
        assert (run_folder / name).stat().st_size > 0, name


def test_the_libraries_put_no_progress_into_the_log(trained, folder):
    lines = (folder / "job.log").read_text().splitlines()
    assert any("stage retrieval" in line and "step 4/4" in line for line in lines)
    progress = re.compile(
        r"Requesting resources|training worker group|Setting up process group|"  # Ray Train
        r"Checkpoint successfully created|Reporting training result|"
        r"Dataset dataset_|✔|Progress bars disabled|"  # Ray Data
        r"INFO mlflow|INFO alembic|type hints|"  # MLflow
        r"\d+%\|.*\d+/\d+ \["  # tqdm
    )
    assert [line for line in lines if progress.search(line)] == []


def test_exported_model_is_the_same_for_ours_sentence_transformers_and_mlflow(trained):
    model_folder = trained[0] / "models" / "blend"
    texts = ["The sentence number 3 speaks of own7", "Paris"]
    ours = encode(load_model(model_folder), texts, role="document")
    theirs = SentenceTransformer(str(model_folder), trust_remote_code=True, device="cpu")
    np.testing.assert_allclose(theirs.encode(texts), ours, atol=1e-5)
    with mlflow_at(f"sqlite:///{trained[0].parents[1]}/mlflow.db"):
        served = mlflow.pyfunc.load_model("models:/tiny@candidate")
    answer = served.predict({"input": texts})
    vectors = np.array([item["embedding"] for item in answer["data"]])
    np.testing.assert_allclose(vectors, ours, atol=1e-5)
    untrained = encode(load_model(trained[0] / "models" / "untrained"), texts, role="document")
    assert np.abs(ours - untrained).max() > 1e-3


def test_scores_are_mtebs_result_files_and_one_mlflow_run_has_every_step_once(trained):
    results = list((trained[0] / "evaluation").rglob("WikiSentenceRetrieval.json"))
    assert len(results) == 6  # untrained, two stages, BM25, hybrid of the first and the last
    assert all(mteb.TaskResult.from_disk(path).get_score() >= 0 for path in results)
    client = mlflow.MlflowClient(f"sqlite:///{trained[0].parents[1]}/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "rayembed"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    kept = run.data.tags["placement.use_gpu"]
    assert kept in ("False", "True"), "settled, not auto"
    assert f"use_gpu: {kept.lower()}\n" in (trained[0] / "run.yaml").read_text()
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3, 4, 5, 6]
    logged = [r["global_step"] for r in MetricsLog(trained[0] / "metrics.jsonl").records()]
    assert logged == [1, 2, 3, 4, 5, 6]


def test_version_and_card_have_the_scores_of_its_weights(trained):
    client = connect(f"sqlite:///{trained[0].parents[1]}/mlflow.db")
    version = get_version(client, parse_reference("models:/tiny@candidate"))
    scores = {score.task: score for score in read_scores(client, version)}
    assert len(scores) == 6
    assert scores["WikiTopicClustering"].category == "Clustering"
    assert version.tags["score.WikiTopicClustering"] == (
        f"{scores['WikiTopicClustering'].value:.6g}"
    )
    card = ModelCard.load(trained[0] / "models" / "blend" / "README.md")
    told = {result.dataset_name: result.metric_value for result in card.data.eval_results}
    assert told == {s.task: s.value for s in scores.values()}
    assert "| `sentences` | retrieval | " in card.text
    assert version.description.startswith("# tiny")


def test_weights_are_scored_while_training_goes_on_and_the_best_are_handed_on(trained):
    run_folder, _ = trained
    lines = [json.loads(line) for line in (run_folder / "validation.jsonl").open()]
    places = [(line["stage"], line["step"], line["global_step"]) for line in lines]
    assert places == [("retrieval", 2, 2), ("retrieval", 4, 4), ("blend", 2, 6)]
    for line in lines:
        sentence, description = (line["scores"][name] for name in sorted(line["scores"])[::-1])
        assert line["score"] == pytest.approx((3 * sentence + description) / 4)
    best = max(lines[:2], key=lambda line: line["score"])["step"]
    record = run_folder / "retrieval" / "validation" / f"step-{best:07d}.json"
    handed_on = read_made_of(str(run_folder / "retrieval" / "weights.safetensors"))
    assert handed_on["content"] == json.loads(record.read_text())["content"]
    assert handed_on["step"] == str(best)
    client = mlflow.MlflowClient(f"sqlite:///{run_folder.parents[1]}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.data.tags["rayembed.kept_step.retrieval"] == str(best)
    for name in ("WikiSentenceRetrieval", "WikiDescriptionRetrieval", "score"):
        history = client.get_metric_history(run.info.run_id, f"validation/{name}")
        told = {point.step: point.value for point in history}
        assert len(history) == len(lines), "each score once, also when it is submitted again"
        for line in lines:
            expected = line["score"] if name == "score" else line["scores"][name]
            assert told[line["global_step"]] == pytest.approx(expected)


def test_submitted_again_it_trains_nothing_and_another_identity_is_refused(
    trained, folder, cluster
):
    before = (trained[0] / "metrics.jsonl").read_text()
    weights = (trained[0] / "blend" / "weights.safetensors").stat().st_mtime_ns
    job = ("train_nvembed", "--recipe", f"{folder}/run.yaml")
    again = run_here(*job)
    assert again.returncode == 0, again.stderr[-4000:]
    assert "tiny version 1 (models:/tiny@candidate)" in again.stdout
    assert (trained[0] / "metrics.jsonl").read_text() == before
    assert (trained[0] / "blend" / "weights.safetensors").stat().st_mtime_ns == weights
    other = run_here(*job, "--set", "seed=1")
    assert other.returncode == 1
    assert "another run of that name with fingerprint" in other.stderr
    assert (trained[0] / "metrics.jsonl").read_text() == before
