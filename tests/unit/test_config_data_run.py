"""A data job's settings: where its results lie is no part of what they are; its teachers' GPUs."""

import pytest
from tiny_job import make_run

from rayembed.config.data_run import DataRun, data_of
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.errors import ConfigError


def test_where_things_lie_and_what_it_is_called_are_no_part_of_its_identity(tmp_path):
    data = data_of(make_run(tmp_path))
    same = override(data, [f"placement.storage_path={tmp_path / 'elsewhere'}", "name=other"])
    assert same.fingerprint == data.fingerprint
    assert "root" not in data.identity()["data"]
    for change in ("seed=7", "data.datasets.topics.num_samples=3"):
        assert override(data, [change]).fingerprint != data.fingerprint


def test_a_training_runs_file_is_read_as_its_data_part(tmp_path):
    run = make_run(tmp_path)
    whole, part = tmp_path / "run.yaml", tmp_path / "data.yaml"
    whole.write_text(run.to_yaml())
    part.write_text(data_of(run).to_yaml())
    assert DataRun.read(whole) == DataRun.read(part) == data_of(run)


def test_teachers_may_have_the_gpus_that_the_run_waits_for(tmp_path):
    run = make_run(tmp_path)
    gpus = override(
        run,
        ["placement.use_gpu=true", "placement.workers=2", "placement.wait_for_nodes_seconds=600"],
    )
    placement = data_of(gpus).placement
    assert (placement.gpus, placement.wait_for_nodes_seconds) == (2, 600.0)
    there = data_of(override(gpus, ["placement.wait_for_nodes_seconds=0"])).placement
    assert (there.gpus, there.wait_for_nodes_seconds) == (0, 0.0)
    without = data_of(override(run, ["placement.wait_for_nodes_seconds=600"])).placement
    assert (without.gpus, without.wait_for_nodes_seconds) == (0, 0.0)


def test_waiting_for_no_gpu_is_refused(tmp_path):
    values = data_of(make_run(tmp_path)).model_dump(mode="json")
    values["placement"]["wait_for_nodes_seconds"] = 60
    with pytest.raises(ConfigError, match=r"placement\.gpus"):
        parse(DataRun, values)


def test_two_data_sets_of_one_name_are_refused(tmp_path):
    values = data_of(make_run(tmp_path)).model_dump(mode="json")
    values["data"]["datasets"].append(values["data"]["datasets"][0])
    with pytest.raises(ConfigError, match="it must be unique"):
        parse(DataRun, values)
