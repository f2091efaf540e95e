"""Mining all over a cluster: processes that are killed on the way change nothing in the output."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import mining_by_hand as by_hand
import pytest
import ray
from mining_step import configured, mine, told

from rayembed.data.on_ray import execute_with_ray_data
from rayembed.data.units import Result

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class DiesOnce:
    """A task of which one process gets SIGKILL, when all but a unit's result is done."""

    def __init__(self, task: Any, folder: Path) -> None:
        self.task, self.folder = task, folder

    def __call__(self, unit: Any, *device: str) -> Result:
        try:
            (self.folder / type(self.task.task).__name__).mkdir()
        except FileExistsError:
            result: Result = self.task(unit, *device)
            return result
        self.task.task(unit, *device)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it should be dead")


def test_killed_processes_change_nothing(cluster, tmp_path) -> None:
    rows = by_hand.made_up_rows(40, 1, labels=True)
    config = configured(rule={"kind": "top_k_perc_pos", "max_relative_score": 0.8})
    marks = tmp_path / "marks"
    marks.mkdir()

    def execute(task, units, needs):
        return execute_with_ray_data(DiesOnce(task, marks), units, needs)

    found, manifest = mine(tmp_path / "killed", rows, config, 3, execute=execute)
    assert sorted(mark.name for mark in marks.iterdir()) == ["EmbedPart", "MinePart"]
    whole, untouched = mine(tmp_path / "whole", rows, config, 3)
    assert found == whole
    assert told(found) == by_hand.mined(rows, config)
    del manifest["seconds"], untouched["seconds"]
    assert manifest == untouched
    parts = [
        sorted(tmp_path.glob(f"{name}/out/data/mined/*/parts/*")) for name in ("killed", "whole")
    ]
    assert [p.name for p in parts[0]] == [p.name for p in parts[1]]
    assert [p.read_bytes() for p in parts[0]] == [p.read_bytes() for p in parts[1]]
