"""`--dry-run` of a paper's run, as the README shows it."""

import pytest
from script_loads import run_script

from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe

pytestmark = pytest.mark.job


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
