"""The pretrained parts are had on the nodes before workers start."""

import json
from pathlib import Path

import pytest

from rayembed.assets.storage import write_atomic
from rayembed.assets.store import MANIFEST
from rayembed.config.run import Run
from rayembed.data.plan.batch_plan import CODE_VERSION
from rayembed.errors import AssetError
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.job import StageJob
from rayembed.training.on_ray import _fetch

pytestmark = pytest.mark.ray


def run_of(backbone: str) -> Run:
    run = get_recipe("nvembed-quickstart")
    model = run.model.model_copy(
        update={"backbone": run.model.backbone.model_copy(update={"path": backbone})}
    )
    return run.model_copy(update={"model": model})


def fetch(run: Run, folder: Path) -> None:
    write_atomic(folder / "plan" / MANIFEST, json.dumps({"code": CODE_VERSION}).encode())
    _fetch(StageJob(run, 0, str(folder / "plan"), None, "weights"))


def test_an_error_of_a_node_is_raised_as_itself(cluster, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    fetch(run_of(str(tmp_path)), tmp_path)
    with pytest.raises(AssetError, match="there is no file or folder"):
        fetch(run_of(str(tmp_path / "none")), tmp_path)


def test_the_encoder_beside_a_backbone_is_had_too(cluster, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    run = get_recipe("causal2vec-quickstart")
    model = run.model.model_copy(
        update={
            "backbone": run.model.backbone.model_copy(update={"path": str(tmp_path)}),
            "encoder": run.model.encoder.model_copy(update={"path": str(tmp_path / "none")}),
        }
    )
    with pytest.raises(AssetError, match=r"there is no file or folder .*/none"):
        fetch(run.model_copy(update={"model": model}), tmp_path)
