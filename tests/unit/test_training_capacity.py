"""How many workers nodes can hold, what a refusal says, and waiting for nodes."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayembed.config.placement import Placement
from rayembed.errors import PlacementError
from rayembed.training import on_ray
from rayembed.training.memory.capacity import (
    await_capacity,
    check_capacity,
    check_validation_capacity,
    kind_resource,
    most_workers,
    validation_resources,
    workers_that_fit,
)

SMALL, LARGE = {"CPU": 4.0, "memory": 1e9}, {"CPU": 16.0, "GPU": 2.0, "node:10.0.0.1": 1.0}


def placement(workers=1, cpus=1.0, **settings):
    return Placement(workers=workers, cpus_per_worker=cpus, **settings)


@pytest.mark.parametrize(
    ("cpus", "use_gpu", "nodes", "fit"),
    [
        (1, False, [SMALL], 4),
        (3, False, [SMALL, SMALL], 2),  # 8 CPUs, but one worker a node
        (0.3, False, [{"CPU": 0.9}], 3),
        (5, False, [SMALL, SMALL], 0),
        (1, True, [SMALL, LARGE], 2),  # by its GPUs
        (12, True, [LARGE, LARGE], 2),  # by its CPUs
        (1, False, [{}, {"CPU": 0.0}], 0),
        (1, False, [], 0),
    ],
)
def test_workers_that_fit(cpus, use_gpu, nodes, fit):
    assert workers_that_fit(placement(cpus=cpus, use_gpu=use_gpu), nodes) == fit


H100, L4 = ({"CPU": 8.0, "GPU": 4.0, f"accelerator_type:{kind}": 1.0} for kind in ("H100", "L4"))
PLAIN = {"CPU": 8.0, "GPU": 4.0}  # a node that names no kind


def kinds(*names):
    """A node whose GPUs Ray names so."""
    return {**PLAIN, **{f"accelerator_type:{name}": 1.0 for name in names}}


LOCAL = {"CPU": 8.0, "accelerator_type:L4": 1.0}  # whose GPUs Ray was told not to use


@pytest.mark.parametrize(
    ("gpu", "nodes", "fit", "constraint"),
    [
        (None, [H100, L4], 8, {}),
        ("H100", [H100, L4], 4, {"accelerator_type:H100": 0.001}),
        ("L4", [H100, L4, L4], 8, {"accelerator_type:L4": 0.001}),
        ("H100", [H100, H100], 8, {}),  # an autoscaler knows no kinds
        ("H100", [H100, PLAIN], 8, {}),
        ("H100", [H100, LOCAL], 4, {}),
        (
            "A100 40 GB",
            [{**PLAIN, "accelerator_type:A100": 1.0}, L4],
            4,
            {"accelerator_type:A100": 0.001},
        ),
        ("T4", [H100, L4], 0, {}),
        ("A100 80 GB", [kinds("A100-80G")], 4, {}),
        ("A100 80 GB", [kinds("A100", "A100-80G"), L4], 4, {"accelerator_type:A100": 0.001}),
        (
            "A100 80 GB",
            [kinds("A100", "A100-80G"), kinds("A100", "A100-40G")],
            4,
            {"accelerator_type:A100-80G": 0.001},
        ),
        ("A100 40 GB", [kinds("A100", "A100-80G")], 0, {}),
        ("H100", [kinds("H100-80GB"), L4], 4, {"accelerator_type:H100-80GB": 0.001}),
    ],
)
def test_workers_have_gpus_of_the_named_kind_alone(gpu, nodes, fit, constraint):
    asked = placement(use_gpu=True, gpu=gpu)
    assert workers_that_fit(asked, nodes) == fit
    assert kind_resource(asked, nodes) == constraint


def test_gpus_of_several_kinds_are_warned_of_where_nothing_names_one(caplog):
    check_capacity(placement(8, use_gpu=True), [H100, L4])
    assert "GPUs of several kinds (H100, L4)" in caplog.text
    caplog.clear()
    for asked in (placement(4, use_gpu=True, gpu="L4"), placement(1, use_gpu=True), placement(8)):
        check_capacity(asked, [H100, L4])
    assert not caplog.records


def test_ray_train_gets_the_kind_of_gpu(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(on_ray, "_nodes", lambda: [H100, L4])
    for name in ("_wait_for_workers", "_fetch"):
        monkeypatch.setattr(on_ray, name, lambda _: None)
    here = SimpleNamespace(get_node_id=lambda: "ab" * 28)
    monkeypatch.setattr(on_ray.ray, "get_runtime_context", lambda: here)
    monkeypatch.setattr(on_ray, "failure_callbacks", lambda _: [])
    actor = SimpleNamespace(remote=lambda *_: None)
    monkeypatch.setattr(on_ray.ray, "remote", lambda **_: lambda _: actor)
    monkeypatch.setattr(on_ray, "StoppableTrainer", lambda *_, **named: given.update(named))
    job = SimpleNamespace(placement=placement(4, use_gpu=True, gpu="H100"))
    on_ray._trainer(job, str(tmp_path), tmp_path / "log", 0, None)
    resources = given["scaling_config"].resources_per_worker
    assert resources == {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001}


def test_number_type_and_hardware_are_asked_of_the_named_kind(monkeypatch):
    asked = []

    def remote(**resources):
        asked.append(resources)
        return lambda function: SimpleNamespace(remote=lambda *_: "answer")

    monkeypatch.setattr(on_ray.ray, "remote", remote)
    monkeypatch.setattr(on_ray.ray, "get", lambda found, timeout: found)
    monkeypatch.setattr(on_ray, "_nodes", lambda: [H100, L4])
    of_h100 = {"resources": {"accelerator_type:H100": 0.001}}
    for gpu, others in (("H100", of_h100), (None, {})):
        one = placement(2, use_gpu=True, gpu=gpu)
        assert on_ray.worker_precision(one) == on_ray.worker_hardware(one) == "answer"
        wanted = {"num_cpus": 1.0, "num_gpus": 1.0, **others}
        assert asked == [wanted, wanted]
        asked.clear()


@given(st.lists(st.integers(0, 8), max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=1))
def test_as_many_as_can_be_put_one_by_one(cpus, each):
    left, placed = list(cpus), 0
    for node in range(len(left)):
        while left[node] >= each[0]:
            left[node] -= each[0]
            placed += 1
    nodes = [{"CPU": float(n)} for n in cpus]
    assert workers_that_fit(placement(cpus=each[0]), nodes) == placed


@pytest.mark.parametrize(
    ("asked", "nodes", "message"),
    [
        (
            placement(9, 1),
            [SMALL, SMALL],
            r"workers=9 need 1 CPU each: only 8 fit\. The cluster has the nodes 2 × \(4 CPU\)\. "
            r"Please lower placement\.workers to 8",
        ),
        (
            placement(2, 6),
            [SMALL, SMALL, SMALL],
            r"6 CPU each: no node is large enough for one worker\. .*3 × \(4 CPU\).*larger nodes",
        ),
        (
            placement(2, 3),
            [SMALL, {"CPU": 2.0}],
            r"enough in total, but only 1 fit, .* 1 × \(4 CPU\), 1 × \(2 CPU\)",
        ),
        (placement(1, 1, use_gpu=True), [SMALL], "no node has a GPU.*use_gpu=false"),
        (
            placement(4, 2, use_gpu=True),
            [LARGE, SMALL],
            r"2 CPU and 1 GPU each: only 2 fit.* 1 × \(16 CPU and 2 GPU\), 1 × \(4 CPU and 0 GPU\)"
            r".*lower placement\.workers to 2 .*, or compute on CPUs \(placement\.use_gpu=false\)",
        ),
        (placement(1, 1), [], "has no nodes.*wait_for_nodes_seconds"),
        (
            placement(1, use_gpu=True, gpu="T4"),
            [{"CPU": 8.0, "GPU": 4.0, "accelerator_type:H100": 1.0}],
            "no node has GPUs of the kind T4, they have H100.*correct or remove placement.gpu",
        ),
        (
            placement(1, use_gpu=True, gpu="A100 40 GB"),
            [{"CPU": 8.0, "GPU": 4.0, "accelerator_type:A100-80G": 1.0}],
            "no node has GPUs of the kind A100 40 GB, they have A100-80G",
        ),
    ],
)
def test_a_refusal_says_what_is_there_and_what_to_do(asked, nodes, message):
    with pytest.raises(PlacementError, match=message):
        check_capacity(asked, nodes)


def test_an_elastic_run_needs_room_for_its_fewest_workers(caplog):
    caplog.set_level("INFO", logger="rayembed")
    check_capacity(placement(8, min_workers=2), [SMALL])
    assert "room for 4 of 8 workers now" in caplog.text
    caplog.clear()
    check_capacity(placement(4, min_workers=2), [SMALL])
    assert not caplog.records
    with pytest.raises(PlacementError, match=r"min_workers=6 need .* lower placement\.min_workers"):
        check_capacity(placement(8, min_workers=6), [SMALL])
    with pytest.raises(PlacementError, match=r"placement\.workers=8 need"):
        check_capacity(placement(8), [SMALL])


def test_the_most_workers_there_is_room_for_share_the_batch():
    assert [most_workers((2, 4, 8), room) for room in (0, 1, 2, 7, 8, 99)] == [0, 0, 2, 4, 8, 8]


class Cluster:
    """A cluster to which a node comes some seconds after it was asked for."""

    def __init__(self, comes_after):
        self.now, self.comes_after, self.asked_at, self.requests = 0.0, comes_after, None, []

    def nodes(self):
        there = self.asked_at is not None and self.now - self.asked_at >= self.comes_after
        return [{"CPU": 4.0}] if there else []

    def request(self, bundles):
        self.requests.append(bundles)
        self.asked_at = self.now if bundles else self.asked_at

    def sleep(self, seconds):
        self.now += seconds

    def wait(self, asked, **more):
        clock = {"sleep": self.sleep, "clock": lambda: self.now}
        await_capacity(asked, self.nodes, self.request, **clock, **more)


def test_nodes_are_asked_for_and_the_request_is_taken_back():
    cluster = Cluster(comes_after=50)
    cluster.wait(placement(2, 2, wait_for_nodes_seconds=300))
    assert cluster.requests == [[{"CPU": 2.0}, {"CPU": 2.0}], []]
    assert 50 <= cluster.now < 55
    cluster.wait(placement(2, 2, wait_for_nodes_seconds=300))
    assert len(cluster.requests) == 2, "nothing is asked for where there is room"


def test_an_elastic_run_asks_for_its_fewest_workers_and_begins_with_them():
    cluster = Cluster(comes_after=50)
    cluster.wait(placement(8, 2, min_workers=2, wait_for_nodes_seconds=300))
    assert cluster.requests == [[{"CPU": 2.0}, {"CPU": 2.0}], []]
    assert 50 <= cluster.now < 55


def test_nodes_for_several_runs_are_asked_for_and_one_run_is_enough():
    cluster = Cluster(comes_after=50)
    cluster.wait(placement(2, 1, wait_for_nodes_seconds=300), runs=2)
    assert cluster.requests == [[{"CPU": 1.0}] * 4, []]
    assert 50 <= cluster.now < 55
    few = Cluster(comes_after=50)
    few.wait(placement(2, 1, wait_for_nodes_seconds=300), runs=9)
    assert 300 <= few.now < 305, "nodes for nine did not come, and one has room"


def test_where_nodes_are_waited_for_nothing_is_asked_before_the_data_is_there(monkeypatch):
    asked = []
    monkeypatch.setattr(on_ray, "check_placement", lambda p, **how: asked.append(p.workers))
    on_ray.check_placement_now(placement(2, 1, wait_for_nodes_seconds=300))
    on_ray.check_placement_now(placement(4, 1))
    assert asked == [4]


def test_nodes_that_do_not_come_in_time_are_refused():
    cluster = Cluster(comes_after=50)
    with pytest.raises(PlacementError, match="no nodes"):
        cluster.wait(placement(2, 2, wait_for_nodes_seconds=20))
    assert cluster.requests[-1] == []
    assert 20 <= cluster.now < 25


def test_by_default_nothing_is_asked_for():
    cluster = Cluster(comes_after=0)
    with pytest.raises(PlacementError):
        cluster.wait(placement(2, 2))
    assert (cluster.requests, cluster.now) == ([], 0.0)


def test_a_validation_task_takes_what_a_worker_takes_unless_told_otherwise():
    assert validation_resources(placement(cpus=2)) == {"CPU": 2}
    assert validation_resources(placement(use_gpu=True)) == {"CPU": 1, "GPU": 1}
    other = placement(use_gpu=True, validation_cpus=4, validation_gpus=0.5)
    assert validation_resources(other) == {"CPU": 4, "GPU": 0.5}
    assert validation_resources(placement(use_gpu=True, validation_gpus=0)) == {"CPU": 1}


def test_a_validation_task_that_no_node_can_ever_hold_is_refused(caplog):
    with pytest.raises(PlacementError, match="no node has the 5 CPU that a validation task needs"):
        check_validation_capacity(placement(validation_cpus=5), [SMALL, SMALL])
    with pytest.raises(PlacementError, match=r"1 CPU and 1 GPU.*validation_gpus"):
        check_validation_capacity(placement(validation_gpus=1), [SMALL])
    # One may come where nodes are waited for.
    check_validation_capacity(placement(validation_cpus=5, wait_for_nodes_seconds=9), [SMALL])
    caplog.clear()
    check_validation_capacity(placement(3), [SMALL])
    assert not caplog.records


def test_a_validation_task_without_room_beside_the_workers_is_warned_of(caplog):
    check_validation_capacity(placement(4), [SMALL])
    assert "no room for a validation task (1 CPU) next to 4 workers" in caplog.text
