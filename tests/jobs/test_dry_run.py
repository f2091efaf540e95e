"""`--dry-run` of every recipe, and of the scripts themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

import rayembed
from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe, recipe_names

pytestmark = pytest.mark.job

ROOT = Path(rayembed.__file__).parents[2]

WATCHED = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    import multiprocessing
    heavy = {"ray", "deepspeed", "mlflow", "mteb"} & set(sys.modules)
    sys.stderr.write(f"loaded {sorted(heavy)} children {multiprocessing.active_children()}\\n")
"""


def run_script(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WATCHED, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


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


def test_the_full_size_run_of_the_readme_is_shown_without_ray_and_without_the_hub(tmp_path):
    shown = run_script(
        "jobs/train_nvembed.py",
        "--recipe",
        "nvembed-v2",
        "--set",
        "data.root=s3://bucket/data",
        "--dry-run",
    )
    assert shown.returncode == 0, shown.stderr
    assert "loaded [] children []" in shown.stderr
    assert "7,892,959,232" in shown.stderr
    assert "8 workers" in shown.stderr
    (tmp_path / "run.yaml").write_text(shown.stdout)
    again, _ = training_job("nvembed-v2").resolve(["--recipe", str(tmp_path / "run.yaml")])
    assert again.data.root == "s3://bucket/data"
    assert again.fingerprint == get_recipe("nvembed-v2").fingerprint


def test_a_backbone_that_only_the_hub_knows_is_shown_without_its_size():
    shown = run_script(
        "jobs/train_biencoder.py", "--set", "model.backbone.path=hf://org/name@main", "--dry-run"
    )
    assert shown.returncode == 0, shown.stderr
    assert "not known without fetching the model" in shown.stderr


def test_a_wrong_setting_ends_the_script_with_a_message():
    shown = run_script("jobs/train_biencoder.py", "--set", "stages.finetune.step=3", "--dry-run")
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert "error: no setting 'stages.finetune.step'; did you mean 'steps'?" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert "torch" not in shown.stderr
