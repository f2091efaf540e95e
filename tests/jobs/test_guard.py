"""A guarded run ends with the model that gains most at little loss, and says so."""

import json
import re
import shutil
from pathlib import Path

import mlflow
import numpy as np
import pytest
from own_pairs import own_run
from safetensors.torch import load_file

import rayembed
from rayembed.api.training import Trained
from rayembed.config.override import override
from rayembed.evaluation.tables import UNTRAINED
from rayembed.models.loading.load import load_model
from rayembed.models.saving.merge import MERGE_FILE
from rayembed.pipeline.run.train import train
from rayembed.training.checkpoints.checkpoint import Checkpoint, read_position

pytestmark = pytest.mark.job


def candidates(folder):
    client = mlflow.MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    return client.get_registered_model("own").aliases


def guarded(folder, guard):
    """A run with a guard, whose general task is a set of other words."""
    general = folder / "general"
    (general / "qrels").mkdir(parents=True, exist_ok=True)
    for name, text in (("corpus", "all about {}"), ("queries", "what of {}")):
        rows = [{"_id": f"{i}", "text": text.format(i)} for i in range(30)]
        (general / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "".join(f"{i}\t{i}\t1\n" for i in range(30))
    (general / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return own_run(
        folder,
        f"evaluation.own_sets=[{{name: general, path: {general}}}]",
        f"evaluation.guard={guard}",
        "evaluation.guard.own_sets=[]",
        "evaluation.baselines=[]",
    )


def models(folder):
    return sorted(path.name for path in (folder / "outputs" / "runs" / "own" / "models").iterdir())


def test_the_kept_model_is_the_registered_one_and_another_share_is_taken_without_training(
    tmp_path, capsys
):
    run = guarded(tmp_path, "{most_loss: 1.0}")
    outcome = train(run)
    told = capsys.readouterr().out
    verdict = outcome.verdict
    last = told.splitlines()[-1]
    assert re.match(
        r"Guard +trained: own [+-]\d+\.\d, general [+-]\d+\.\d.*; 75 %: .* ← kept", last
    )
    assert "without training again: the same command with --set evaluation.guard.take=0.5" in last
    mixed = [f"merged, {share}% trained" for share in (75, 50, 25)]
    assert list(outcome.table.rows) == ["untrained", "stage 1: finetune", *mixed]
    assert set(outcome.table.rows["untrained"]) == {"general", "pairs-held-out"}
    assert all(f"│ {name}" in told for name in ["stage 1: finetune", *mixed])
    assert re.search(r"Own\s*\W\s*General", told)
    best = max(verdict.judged, key=lambda one: one.own.mean)
    assert best.own.mean > 0, "otherwise nothing below is tested"
    share = "" if verdict.kept.share is None else f"-merged-{verdict.kept.share:g}"
    assert outcome.model_folder.endswith(f"/finetune{share}")
    assert candidates(tmp_path) == {"candidate": 1}
    assert all(one.own.interval is not None for one in verdict.judged)
    card = (tmp_path / "outputs" / "runs" / "own" / "scores.md").read_text()
    assert "Guard: " in card
    assert models(tmp_path) == sorted({"untrained", "finetune", f"finetune{share}"})

    other = 0.25 if verdict.kept.share == 0.5 else 0.5
    steps = (tmp_path / "outputs" / "runs" / "own" / "metrics.jsonl").read_text()
    taken = Trained(outcome).take(other)
    assert (tmp_path / "outputs" / "runs" / "own" / "metrics.jsonl").read_text() == steps
    assert "← kept" in taken.verdict
    assert taken.folder.endswith(f"/finetune-merged-{other:g}")
    assert json.loads((Path(taken.folder) / MERGE_FILE).read_text())["shares"] == [1 - other, other]
    folders = [Path(taken.folder).parent / name for name in ("untrained", "finetune")]
    base, trained, mixture = (
        load_model(f, dtype="float32").state_dict() for f in [*folders, taken.folder]
    )
    for name, value in mixture.items():
        if value.is_floating_point():
            expected = (1 - other) * base[name] + other * trained[name]
            np.testing.assert_allclose(value, expected, atol=1e-6)
    assert candidates(tmp_path) == {"candidate": 2}
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    registered = client.get_model_version("own", "2")
    score = outcome.table.rows[f"merged, {other:.0%} trained"]["pairs-held-out"]
    assert float(registered.tags["score.pairs-held-out"]) == pytest.approx(score, abs=1e-5)
    whole = train(override(run, ["evaluation.guard.take=1"]))
    assert whole.model_folder.endswith("/finetune")
    assert whole.verdict.summary.startswith("trained: own ")


def test_ties_and_the_mean_of_the_last_checkpoints_are_candidates(tmp_path):
    guard = "{most_loss: 1.0, shares: [0.5], method: ties, density: 0.5, last_checkpoints: 2}"
    changes = ["stages.finetune.checkpoint_every_steps=2", "placement.keep_states=true"]
    run = override(guarded(tmp_path, guard), changes)
    outcome = train(run)
    mean = "mean of the last checkpoints"
    assert list(outcome.table.rows)[2:] == ["merged, 50% trained", mean]
    assert [one.name for one in outcome.verdict.judged] == ["trained", "50 %", "checkpoints"]
    folder = tmp_path / "outputs" / "runs" / "own" / "finetune"
    places = sorted(path for path in (folder / "train").glob("step-*") if path.is_dir())
    assert len(places) == 2
    weights = [Checkpoint(at, read_position(str(at))).weights() for at in places]
    made = load_file(folder / "mean-of-2.safetensors")
    assert set(made) == set(weights[0])
    for name, value in made.items():
        np.testing.assert_allclose(value, (weights[0][name] + weights[1][name]) / 2, atol=1e-6)
    moved = max((weights[0][name] - weights[1][name]).abs().max() for name in made)
    assert moved > 1e-4
    for place in places:
        shutil.rmtree(place)  # as a finished run removes them
    again = train(run)
    assert again.verdict.summary == outcome.verdict.summary
    assert again.table.rows[mean] == outcome.table.rows[mean]


def test_of_a_model_that_is_no_better_the_start_is_kept(tmp_path, capsys):
    run = guarded(tmp_path, "{shares: [0.5]}")
    worse = override(run, ["stages.finetune.optimizer.learning_rate=1.0"])
    outcome = train(worse)
    assert outcome.verdict.kept == UNTRAINED
    assert candidates(tmp_path) == {}
    told = capsys.readouterr().out
    trained = Trained(outcome)
    assert trained.verdict == outcome.verdict.summary
    assert f"Guard: {trained.verdict}" in trained._repr_markdown_()
    last = told.splitlines()[-1]
    assert last.startswith("Guard      trained: own -")
    assert "; start ← kept: no candidate gains on own data beyond chance" in last
    assert "the start, no candidate: the guard found no better model" in told
    assert trained.folder.endswith("/untrained")
    start = rayembed.load(run.model.backbone.path)
    texts = ["red fox", "a blue bird"]
    np.testing.assert_allclose(trained.model.encode(texts), start.encode(texts), atol=1e-6)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    registered = client.get_model_version("own", "1")
    score = outcome.table.rows["untrained"]["pairs-held-out"]
    assert float(registered.tags["score.pairs-held-out"]) == pytest.approx(score, abs=1e-5)
    assert Trained(outcome).take(1).folder.endswith("/finetune")
