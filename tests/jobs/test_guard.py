"""A guarded run ends with the model that gains most at little loss, and says so."""

import json
import re

import mlflow
import numpy as np
import pytest
from own_pairs import own_run

from rayembed.api.training import Trained
from rayembed.config.override import override
from rayembed.evaluation.tables import UNTRAINED
from rayembed.models.load import load_model
from rayembed.pipeline.merge import MERGE_FILE
from rayembed.pipeline.train import train

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


def test_the_kept_model_is_the_registered_one_and_a_harmful_one_is_no_candidate(tmp_path, capsys):
    outcome = train(guarded(tmp_path, "{most_loss: 1.0}"))
    told = capsys.readouterr().out
    verdict = outcome.verdict
    assert re.match(r"Guard +\S.* is kept: own data \+", told.splitlines()[-1])
    mixed = [f"merged, {share}% trained" for share in (75, 50, 25)]
    assert list(outcome.table.rows) == ["untrained", "stage 1: finetune", *mixed]
    assert set(outcome.table.rows["untrained"]) == {"general", "pairs-held-out"}
    assert all(f"│ {name}" in told for name in ["stage 1: finetune", *mixed])
    mixture = tmp_path / "outputs" / "runs" / "own" / "models" / "finetune-merged-0.5"
    assert json.loads((mixture / MERGE_FILE).read_text())["shares"] == [0.5, 0.5]
    folders = [mixture.parent / name for name in ("untrained", "finetune")]
    base, trained, mixed = (
        load_model(f, dtype="float32").state_dict() for f in [*folders, mixture]
    )
    for name, value in mixed.items():
        if value.is_floating_point():
            np.testing.assert_allclose(value, (base[name] + trained[name]) / 2, atol=1e-6)
    best = max(verdict.judged, key=lambda one: one.own.mean)
    assert best.own.mean > 0, "otherwise nothing below is tested"
    assert verdict.kept == best.key
    share = "" if best.key.share is None else f"-merged-{best.key.share:g}"
    assert outcome.model_folder.endswith(f"/finetune{share}")
    assert candidates(tmp_path) == {"candidate": 1}
    assert all(one.own.interval is not None for one in verdict.judged)
    card = (tmp_path / "outputs" / "runs" / "own" / "scores.md").read_text()
    assert "Guard: " in card


def test_a_model_that_is_no_better_than_its_base_is_no_candidate(tmp_path, capsys):
    run = guarded(tmp_path, "{shares: [0.5], most_loss: 0.0}")
    worse = override(run, ["stages.finetune.optimizer.learning_rate=1.0"])
    outcome = train(worse)
    assert outcome.verdict.kept == UNTRAINED
    assert candidates(tmp_path) == {}
    told = capsys.readouterr().out
    trained = Trained(outcome)
    assert trained.verdict == outcome.verdict.summary
    assert f"Guard: {trained.verdict}" in trained._repr_markdown_()
    last = told.splitlines()[-1]
    assert last.startswith("Guard      training gives no better model than its base: own data ")
    assert "no candidate: no better than its base" in told
