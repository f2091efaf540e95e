"""What `--dry-run` says of a model that is not here."""

import pytest
from script_loads import run_script

pytestmark = pytest.mark.job


def test_a_backbone_that_only_the_hub_knows_is_shown_without_its_size():
    shown = run_script(
        "jobs/train_biencoder.py", "--set", "model.backbone.path=hf://org/name@main", "--dry-run"
    )
    assert shown.returncode == 0, shown.stderr
    assert "not known without fetching the model" in shown.stderr
