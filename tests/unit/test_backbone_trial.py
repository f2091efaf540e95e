"""Whole trials of every kind on made-up rows: data, finetuning, scores, models to start from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from made_up_benchmarks import GLUE, glue_files, write_copies, xtreme_repositories
from tiny_models import save_encoder, save_nomic

from rayembed.models.loading.files import weights_fingerprint
from rayembed_papers.backbone.catalogue import FINETUNINGS, TASKS, task_named
from rayembed_papers.backbone.finetune import Grid
from rayembed_papers.backbone.rows import prepare
from rayembed_papers.backbone.trial import Backbone, Trial, run_trial

LANGUAGES = {
    "XNLI": ("de",),
    "COPA": ("et",),
    "UD-POS": ("de",),
    "WikiANN": ("de",),
    "SQuAD": ("de",),
    "TyDiQA-GoldP": ("en", "ko"),
    "SQuAD-retrieval": ("de", "deu"),
}
"""Of which there are made-up rows."""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trials")
    write_copies(folder / "copies", {GLUE: glue_files(), **xtreme_repositories()})
    save_encoder(folder / "bert")
    save_nomic(folder / "moe", vocab_size=200)
    return folder


def small(name):
    """A finetuning of one epoch, scored in the languages that there are."""
    one = FINETUNINGS[name]
    protocol = one.protocol.model_copy(update={"epochs": 1, "max_length": 40})
    kept = tuple(
        scored
        for scored in one.scored
        if scored.subset in LANGUAGES.get(name, (scored.subset,)) and scored.task != "MLQA"
    )
    return replace(one, protocol=protocol, scored=kept)


def trial_of(place, backbone, name, **more):
    one = small(name)
    folder = place / backbone
    data = prepare([one], str(place / "data"), str(place / "copies"))
    weights = weights_fingerprint(folder)
    scored = Backbone(str(folder), backbone, weights, "float32", 0.1)
    return Trial(scored, one, Grid(1e-3, 4, 0), data, str(place / "results" / backbone), **more)


def done(trial):
    run_trial(trial, use_gpu=False, predict_batch=8)
    return json.loads(Path(trial.result_path).read_text())


KINDS = ["STS-B", "XNLI", "UD-POS", "WikiANN", "SQuAD", "TyDiQA-GoldP", "SQuAD-retrieval"]


@pytest.mark.parametrize(
    ("backbone", "name"),
    [*(("bert", name) for name in KINDS), ("moe", "WikiANN"), ("moe", "SQuAD-retrieval")],
)
def test_every_kind_of_task_is_learnt_and_scored(place, backbone, name):
    one = small(name)
    found = done(trial_of(place, backbone, name))
    assert {task: sorted(scores) for task, scores in found["scores"].items()} == {
        task: sorted(s.subset for s in one.scored if s.task == task) for task in one.tasks
    }
    for task, scores in found["scores"].items():
        for metrics in scores.values():
            assert TASKS[task].metric in metrics
            assert all(-1 <= value <= 1 for value in metrics.values())
    assert found["training_loss"] > 0
    assert found["protocol"]["epochs"] == 1


@pytest.mark.parametrize("name", ["XNLI", "WikiANN", "SQuAD", "SQuAD-retrieval"])
def test_a_trial_that_diverges_has_neither_scores_nor_a_model(place, name):
    """WikiANN has rows for one step, whose loss is finite: what the model gives then tells."""
    trial = trial_of(place, "bert", name, keeps_model=True)
    wild = replace(trial, grid=Grid(1e30, 4, 0))
    found = done(wild)
    assert (found["training_loss"] is None) == (name != "WikiANN")
    assert found["scores"] == {}
    assert not Path(wild.model_path).exists()
    ordinary = replace(trial, grid=Grid(1e-3, 4, 0))
    assert set(done(ordinary)["scores"]) == set(ordinary.finetuning.tasks)
    assert list(Path(ordinary.model_path).rglob("*.safetensors"))


@pytest.mark.parametrize("backbone", ["bert", "moe"])
def test_a_model_that_others_start_from(place, backbone):
    first = trial_of(place, backbone, "SIQa", keeps_model=True)
    assert task_named("SIQa").metric in done(first)["scores"]["SIQa"]["validation"]
    plain = trial_of(place, backbone, "COPA")
    started = trial_of(place, backbone, "COPA", start=first)
    assert plain.key != started.key
    found = done(started)
    assert found["start"] == first.key
    assert set(found["scores"]["XCOPA"]) == {"et"}
    assert found["training_loss"] != done(plain)["training_loss"]


def test_the_same_trial_gives_the_same_scores_and_loss(place):
    trial = trial_of(place, "bert", "STS-B")
    first, second = done(trial), done(trial)
    assert first["scores"] == second["scores"]
    assert first["training_loss"] == second["training_loss"]
