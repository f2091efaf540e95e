"""Ray Data makes the same plans as one process."""

import dataclasses
import itertools
import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from made_up_records import made_up_records
from second_node import second_node

from rayembed.assets.storage import refused
from rayembed.config.data_run import TeacherPlacement
from rayembed.config.placement import Placement
from rayembed.data.engine.on_ray import execute_with_ray_data, gpus_for
from rayembed.data.engine.parts import write_part
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.display.progress import hearing, pieces
from rayembed.errors import DataError, PlacementError, StorageFullError, WorkerError
from rayembed.machine.gpu_check_on_ray import cluster_gpus

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclasses.dataclass(frozen=True)
class Number:
    value: int

    @property
    def key(self) -> str:
        return str(self.value)


class Squares:
    """Keeps what it has seen, as a task keeps a model in its process."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, unit: Number, device: str = "cpu") -> dict[str, Any]:
        if unit.value < 0:
            raise DataError(f"{unit.value} has no root")
        self.seen.append(unit.value)
        return {"rows_in": 1, "square": unit.value**2, "calls": len(self.seen), "device": device}


class WithoutRoom:
    """Writes to a disk that is full, as /dev/full always is."""

    def __call__(self, unit: Number, device: str = "cpu") -> dict[str, Any]:
        try:
            with Path("/dev/full").open("wb", buffering=0) as file:
                file.write(b"content")
        except OSError as error:
            raise refused("/dev/full", error) from error
        raise AssertionError("there was room")


class Stops:
    """Stops its process, as one that waits for a storage for ever, the first time or always."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, unit: Number, device: str = "cpu") -> dict[str, Any]:
        stopped = self.folder / str(unit.value)
        if unit.value < 0 or (unit.value == 2 and not stopped.exists()):
            stopped.touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return {"rows_in": 1, "value": unit.value}


class Tells:
    """Works for five seconds and tells how far it is."""

    def __call__(self, unit: Number, device: str = "cpu") -> dict[str, Any]:
        for _ in pieces(range(10 * unit.value)):
            time.sleep(0.1)
        return {"rows_in": 1, "value": unit.value}


@pytest.fixture(scope="module")
def plans(cluster, tmp_path_factory: pytest.TempPathFactory) -> tuple[BatchPlan, BatchPlan]:
    folder = tmp_path_factory.mktemp("plan")
    rows = [
        dataclasses.replace(record, dataset="a")
        for record in made_up_records(100)
        if record.positives[0] != record.query
    ]
    parts = {
        "a": [write_part(str(folder / "p"), rows[i : i + 30]) for i in range(0, len(rows), 30)]
    }
    config = PlanConfig({"a": 1.0}, 8, 2, 20, 0, True)
    here = write_plan(str(folder / "here"), parts, config)
    there = write_plan(str(folder / "there"), parts, config, execute=execute_with_ray_data)
    return here, there


def test_the_same_plan_is_written(plans: tuple[BatchPlan, BatchPlan]) -> None:
    here, there = plans
    assert here.fingerprint == there.fingerprint
    assert [here.read(s) for s in range(20)] == [there.read(s) for s in range(20)]


def test_results_keep_their_order_and_actors_their_process(cluster) -> None:
    units = [Number(i) for i in range(12)]
    light = list(execute_with_ray_data(Squares(), units, "cpu"))
    assert [result["square"] for result in light] == [i * i for i in range(12)]
    search = list(execute_with_ray_data(Squares(), units, "gpu or cpu"))
    assert [result["square"] for result in search] == [i * i for i in range(12)]
    heavy = list(execute_with_ray_data(Squares(), units, "gpu or machine"))
    assert [result["square"] for result in heavy] == [i * i for i in range(12)]
    assert {result["device"] for result in (*light, *search, *heavy)} == {"cpu"}
    assert max(result["calls"] for result in heavy) == 12, "one machine, one process with a model"


def test_teachers_wait_for_the_first_gpu_of_a_cluster_that_begins_without(cluster) -> None:
    placement = TeacherPlacement(gpus=2, wait_for_nodes_seconds=100)
    units = [Number(i) for i in range(4)]
    with ExitStack() as nodes:

        def come(_seconds: float) -> None:
            address = ray.get_runtime_context().gcs_address
            nodes.enter_context(second_node(address, num_cpus=3, num_gpus=1))

        assert gpus_for(TeacherPlacement()) == 0
        assert gpus_for(placement, sleep=come) == 2, "the second may come while they work"
        # Ray takes the node at its word; whether torch computes there a task on it finds out.
        assert (cluster_gpus(Placement()).number > 0) == torch.cuda.is_available()
        made = list(execute_with_ray_data(Squares(), units, "gpu or cpu", placement=placement))
        assert [result["square"] for result in made] == [0, 1, 4, 9]
        assert {result["device"] for result in made} == {"cuda"}
    deadline = time.monotonic() + 60
    while "GPU" in ray.cluster_resources() and time.monotonic() < deadline:
        time.sleep(0.2)  # until Ray knows that the node has gone
    assert gpus_for(TeacherPlacement()) == 0


def test_gpus_that_do_not_come_are_an_error_before_a_teacher_works_on_cpus(cluster) -> None:
    now = itertools.count(step=20.0)
    placement = TeacherPlacement(gpus=4, wait_for_nodes_seconds=100)
    with pytest.raises(
        PlacementError,
        match=r"gpus=4 requests GPUs for teachers, but no node has a GPU after 100 s",
    ):
        gpus_for(placement, sleep=lambda _: None, clock=lambda: next(now))
    execute = partial(execute_with_ray_data, placement=TeacherPlacement(gpus=4))
    with pytest.raises(PlacementError, match="after 0 s"):
        list(execute(Squares(), [Number(1)], "gpu or machine"))
    light = list(execute(Squares(), [Number(1)], "cpu"))
    assert light[0]["square"] == 1, "what needs no GPU waits for none"


def test_a_process_that_hangs_is_replaced_and_a_unit_that_always_hangs_is_named(
    cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    execute = partial(execute_with_ray_data, placement=TeacherPlacement(unit_seconds=6))
    made, units = list[int](), [Number(i) for i in (0, 1, 2, 3, -1)]
    with pytest.raises(WorkerError, match=r"the unit -1 took longer .* in each of 3 processes"):
        made.extend(result["value"] for result in execute(Stops(tmp_path), units, "cpu"))
    assert made == [0, 1, 2, 3]
    told = [
        r.getMessage()
        for r in caplog.records
        if "another process repeats the work item" in r.getMessage()
    ]
    named = Counter(
        text.partition(" took longer than placement.unit_seconds=6, so ")[0] for text in told
    )
    assert named == {"the work item 2": 1, "the work item -1": 3}


def test_units_on_ray_tell_how_far_they_are(cluster) -> None:
    heard: list[float] = []
    with hearing(heard.append):
        placement = TeacherPlacement(unit_seconds=8)
        (found,) = execute_with_ray_data(Tells(), [Number(5)], "cpu", placement=placement)
    assert found["value"] == 5
    assert any(0 < share < 1 for share in heard), heard


def test_errors_of_workers_are_raised_as_themselves(cluster) -> None:
    with pytest.raises(DataError, match="-1 has no root"):
        list(execute_with_ray_data(Squares(), [Number(1), Number(-1)], "cpu"))
    with pytest.raises(StorageFullError, match=r"no room to write .*Make room"):
        list(execute_with_ray_data(WithoutRoom(), [Number(1)], "cpu"))
