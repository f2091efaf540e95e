"""`--dry-run` of every recipe, and of the scripts themselves."""

import pytest
from script_loads import run_script

from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe, recipe_names

pytestmark = pytest.mark.job


@pytest.mark.parametrize("name", recipe_names())
def test_what_a_dry_run_prints_is_the_run(name, tmp_path, capsys):
    assert training_job(name)(["--dry-run"]) == 0
    captured = capsys.readouterr()
    file = tmp_path / "run.yaml"
    file.write_text(captured.out)
    again, _ = training_job(name).resolve(["--recipe", str(file)])
    run = with_named_benchmarks(get_recipe(name))
    assert again == run
    assert run.fingerprint in captured.out.splitlines()[0]
    assert f"{name}, fingerprint {run.fingerprint}" in captured.err
    for dataset in run.data.datasets:
        assert f" {dataset.name} " in captured.err
    for stage in run.stages:
        assert f" {stage.name} " in captured.err


def test_a_wrong_setting_ends_the_script_with_a_message():
    shown = run_script("jobs/train_biencoder.py", "--set", "stages.finetune.step=3", "--dry-run")
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert "error: no setting 'stages.finetune.step'; did you mean 'steps'?" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert "torch" not in shown.stderr
