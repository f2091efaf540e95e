"""The backbone is had on the nodes before workers start."""

import pytest

from rayembed.config.run import Run
from rayembed.errors import AssetError
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.on_ray import _fetch_model

pytestmark = pytest.mark.ray


def run_of(backbone: str) -> Run:
    run = get_recipe("nvembed-quickstart")
    model = run.model.model_copy(
        update={"backbone": run.model.backbone.model_copy(update={"path": backbone})}
    )
    return run.model_copy(update={"model": model})


def test_an_error_of_a_node_is_raised_as_itself(cluster, tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    _fetch_model(run_of(str(tmp_path)))
    with pytest.raises(AssetError, match="there is no file or folder"):
        _fetch_model(run_of(str(tmp_path / "none")))
