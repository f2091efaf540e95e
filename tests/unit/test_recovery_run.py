"""A run over a pruned model with the original as its teacher, from its settings to the export."""

from pathlib import Path

import pytest
from own_pairs import own_run
from pruned import moved_zeros, prune_folder

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.models.compressed import read_compression
from rayembed.models.load import load_model
from rayembed.pipeline.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Recovery of a pruned tiny encoder, which is also its teacher."""
    folder = tmp_path_factory.mktemp("recovery")
    run = own_run(folder, "placement.runtime=local", "evaluation.baselines=[]")
    prune_folder(folder / "encoder", folder / "pruned")
    return override(
        run,
        [
            f"model.backbone.path={folder / 'pruned'}",
            "model.keep_zeros=true",
            "stages.finetune.loss={kind: vector_distillation}",
            f"stages.finetune.teachers=[{{teacher: {folder / 'encoder'}, max_length: 32}}]",
        ],
    )


def test_it_ends_with_the_zeros_of_its_start(run):
    outcome = train(run)
    start = run.model.backbone.path
    model = load_model(outcome.model_folder)
    moved, number = moved_zeros(start, model.state_dict())
    assert (moved, number > 1000) == (0, True)
    before = load_model(start).state_dict()
    assert any((value != before[name]).any() for name, value in model.state_dict().items())
    told = read_compression(Path(outcome.model_folder))
    assert told["settings"] == {"kind": "drawn"}
    assert told["matrices"] == read_compression(Path(start))["matrices"]
    assert outcome.table.rows["stage 1: finetune"]


def test_a_start_that_was_not_pruned_is_refused_before_a_worker_starts(run, monkeypatch):
    teacher = run.stages[0].teachers[0].teacher
    wrong = override(run, [f"model.backbone.path={teacher}", "name=wrong"])
    monkeypatch.setattr("rayembed.pipeline.train.prepare", lambda *_: pytest.fail("work began"))
    with pytest.raises(ConfigError, match=r"model\.keep_zeros.*was not pruned"):
        train(wrong)
