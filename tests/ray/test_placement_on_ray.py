"""What a run does on a cluster whose nodes are large enough but taken by others."""

import pytest
import ray

from rayembed.config.override import override
from rayembed.errors import PlacementError
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.provenance import node_hardware
from rayembed.training import on_ray
from rayembed.training.job import StageJob
from rayembed.training.on_ray import check_placement, train_on_ray, worker_hardware

pytestmark = pytest.mark.ray


@pytest.fixture
def run(tmp_path):
    settings = [f"placement.storage_path={tmp_path}", "placement.cpus_per_worker=2"]
    return override(get_recipe("biencoder"), settings)


@pytest.fixture
def taken(cluster):
    """Three of four CPUs are another's."""
    group = ray.util.placement_group([{"CPU": 3}])
    ray.get(group.ready())
    yield
    ray.util.remove_placement_group(group)


def test_hardware_is_that_of_a_node_with_room_for_a_worker(cluster, run):
    assert worker_hardware(run.placement) == node_hardware()


def test_hardware_of_a_full_cluster_is_not_known(taken, run, monkeypatch, caplog):
    monkeypatch.setattr(on_ray, "_WORKER_START_SECONDS", 1)
    assert worker_hardware(run.placement) is None
    assert "no node had {'CPU': 2.0} free" in caplog.text


def test_workers_whose_resources_are_taken_are_an_error_of_placement(
    taken, run, tmp_path, monkeypatch
):
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1")
    check_placement(run.placement)  # in total the nodes are large enough
    job = StageJob(run, 0, str(tmp_path / "plan"), None, str(tmp_path / "weights.safetensors"))
    with pytest.raises(PlacementError, match="other jobs hold their CPUs") as error:
        train_on_ray(job, str(tmp_path / "stage"), tmp_path / "metrics.jsonl", 0)
    assert "placement.wait_for_nodes_seconds" in str(error.value)
    assert "timed out after 1.0 seconds" in str(error.value)  # what the controller says
