"""A small grid of trials on Ray, from the job's arguments to its tables."""

import json
import os
import sys
from pathlib import Path

import pytest
import ray
from made_up_benchmarks import GLUE, glue_files, write_copies
from tiny_models import save_encoder

from rayembed.config.settings import parse
from rayembed_papers.backbone.evaluation import evaluate_backbone
from rayembed_papers.backbone.job import run_backbone_job
from rayembed_papers.backbone.on_ray import attempt
from rayembed_papers.backbone.settings import BackboneRun

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def dies_once(threads, trial, **options):
    """The first trial of all takes its process with it."""
    marker = Path(trial.folder).parents[1] / "died"
    if not marker.exists():
        marker.touch()
        os._exit(1)
    return attempt(trial, **options)


def test_a_grid_with_a_start_is_done_once_and_survives_a_death(
    cluster, tmp_path, monkeypatch, capsys
):
    settings = {
        "backbone": str(save_encoder(tmp_path / "tiny")),
        "tasks": ["RTE"],
        "data_root": str(write_copies(tmp_path / "copies", {GLUE: glue_files()})),
        "precision": "float32",
        "protocol": {
            **{"epochs": 1, "max_length": 24, "learning_rates": [1e-3], "batch_sizes": [4]},
            "seeds": [0, 1],
        },
        "placement": {"storage_path": str(tmp_path / "storage")},
    }
    run = parse(BackboneRun, settings)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(run.to_yaml())
    folder = tmp_path / "storage/backbones/results/tiny"
    folder.mkdir(parents=True)
    monkeypatch.setattr("rayembed_papers.backbone.on_ray._run", dies_once)
    code = run_backbone_job(["--recipe", str(recipe)], about="")
    told = capsys.readouterr()
    assert code == 0, told.out + told.err
    (weights,) = folder.iterdir()
    assert (folder.parent / "died").exists()
    trials = {path: path.stat().st_mtime_ns for path in weights.glob("trials/*/*.json")}
    assert sorted(path.parent.name for path in trials) == ["MNLI", "MNLI", "RTE", "RTE"]
    assert len(list(weights.glob("models/MNLI/*"))) == 1, "of the better of the two"
    results = {path: json.loads(path.read_text()) for path in trials}
    (start,) = {found["start"] for path, found in results.items() if path.parent.name == "RTE"}
    accuracy = {
        found["seed"]: found["scores"]["MNLI"]["validation_matched"]["accuracy"]
        for path, found in results.items()
        if path.parent.name == "MNLI"
    }
    best = {seed for seed, found in accuracy.items() if found == max(accuracy.values())}
    assert any(f"seed{seed}" in start for seed in best), "two that score the same are both best"
    assert "tiny, best setting" in told.out
    assert "| Model | RTE | Mean of these |" in told.out, "MNLI was not asked for"
    scores = evaluate_backbone(run)
    assert {path: path.stat().st_mtime_ns for path in weights.glob("trials/*/*.json")} == trials
    assert scores.failed == {}
