"""Ray Train's decisions in an elastic run: how many workers, when, and which failures count."""

import pickle
import socket
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train.torch import TorchConfig
from ray.train.v2._internal.exceptions import (
    InsufficientClusterResourcesError,
    UserExceptionWithTraceback,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    RunningState,
    SchedulingState,
)
from ray.train.v2._internal.execution.scaling_policy import NoopDecision, ResizeDecision
from waits import Replaced

from rayembed.config.placement import Placement
from rayembed.errors import (
    DataError,
    DeviceMemoryError,
    PlacementError,
    StorageError,
    StorageFullError,
    WorkerError,
)
from rayembed.machine import gpu_check_on_ray
from rayembed.training.faults import elastic_on_ray as elastic
from rayembed.training.faults import failures_on_ray as failures
from rayembed.training.faults.elastic_on_ray import ElasticPolicy
from rayembed.training.faults.failures_on_ray import (
    FAILED_STARTS,
    LOSSES_IN_A_ROW,
    LostNodes,
    Torch,
    cause,
    death,
    failure_callbacks,
    failure_config,
    reason,
)

STEPS, CPUS = 30, 2.0
PLACEMENT = Placement(workers=8, min_workers=2, cpus_per_worker=CPUS, max_failures=1)
LOOP_CONFIG = SimpleNamespace(name="only", global_rows=16, steps=STEPS)
JOB = SimpleNamespace(placement=PLACEMENT, stage=LOOP_CONFIG)


@dataclass
class Cluster:
    """CPUs of each node, and what is free of them, as Ray would tell."""

    total: list[float]
    free: list[float]
    now: float = 0.0
    leaving: set[str] = field(default_factory=set)


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster([2.0], [2.0])
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=lambda s: wait(made, s))
    monkeypatch.setattr(elastic, "time", clock)
    monkeypatch.setattr(elastic, "free_nodes", lambda: [{"CPU": c} for c in made.free])
    monkeypatch.setattr(elastic, "leaving_nodes", lambda: made.leaving)
    return made


def wait(cluster, seconds):
    cluster.now += seconds


@pytest.fixture
def policy(cluster, monkeypatch):
    config = ray.train.ScalingConfig(
        num_workers=(2, 8), resources_per_worker={"CPU": CPUS}, elastic_resize_monitor_interval_s=0
    )
    made = ElasticPolicy(config, PLACEMENT, LOOP_CONFIG)

    def reserved(self):
        return {str(node): {"CPU": cpus} for node, cpus in enumerate(cluster.total)}

    monkeypatch.setattr(ElasticPolicy, "_get_reserved_resources", reserved)
    monkeypatch.setattr(ElasticPolicy, "_maybe_send_resource_request", lambda self: None)
    return made


def nodes(cluster, *total, free=None):
    cluster.total, cluster.free = list(total), list(total if free is None else free)


def number(decision):
    return None if isinstance(decision, NoopDecision) else decision.num_workers


def poll(policy, running, *steps, group=1.0):
    """The decision while workers run, of whom the first ones tell of checkpoints of these steps."""
    told = [*steps, *[None] * (running - len(steps))]
    reports = [None if s is None else SimpleNamespace(metrics={"step": s}) for s in told]
    statuses = {rank: SimpleNamespace(training_report=r) for rank, r in enumerate(reports)}
    state = SimpleNamespace(start_time=group, num_workers=running)
    return number(
        policy.make_decision_for_running_worker_group(
            state, SimpleNamespace(worker_statuses=statuses)
        )
    )


def test_it_starts_with_the_most_that_have_room_and_share_the_batch(policy, cluster):
    for cpus, expected in ((4, 2), (6, 2), (8, 4), (14, 4), (16, 8), (100, 8)):
        nodes(cluster, float(cpus))
        assert number(policy.make_decision_for_non_running_worker_group()) == expected
    nodes(cluster, *[3.0] * 4)  # whole on one node: 12 CPUs in all, four workers
    assert number(policy.make_decision_for_non_running_worker_group()) == 4


def test_nodes_that_are_announced_to_go_are_no_room(policy, cluster):
    nodes(cluster, 8.0, 8.0)
    assert number(policy.make_decision_for_non_running_worker_group()) == 8
    cluster.leaving.add("1")
    assert number(policy.make_decision_for_non_running_worker_group()) == 4


def test_parts_of_a_cpu_are_counted_as_they_are_meant(cluster, monkeypatch):
    """0.9 // 0.3 is 2 in floating point."""
    placement = Placement(workers=3, min_workers=1, cpus_per_worker=0.3)
    config = ray.train.ScalingConfig(num_workers=(1, 3), resources_per_worker={"CPU": 0.3})
    policy = ElasticPolicy(config, placement, SimpleNamespace(global_rows=6, steps=STEPS))
    assert policy._count_possible_workers({"a": {"CPU": 0.9}}) == 3


def test_more_workers_come_after_a_checkpoint_that_all_have_told_of(policy, cluster):
    nodes(cluster, 16.0, free=[12.0])
    assert poll(policy, 2) is None, "no checkpoint"
    assert poll(policy, 2, 3) is None, "one of two workers"
    assert poll(policy, 2, None, 3) == 8, "and then the other"
    assert poll(policy, 2, 6, 6) == 8
    assert poll(policy, 2, STEPS, STEPS) is None, "not for the end alone"


def test_reports_of_workers_that_have_ended_do_not_count(policy, cluster):
    nodes(cluster, 16.0, free=[12.0])
    assert poll(policy, 2, 3, group=1.0) is None
    assert poll(policy, 2, None, 6, group=2.0) is None
    assert poll(policy, 2, 6, group=2.0) == 8


def test_what_others_hold_is_no_room(policy, cluster):
    nodes(cluster, 16.0, free=[3.0])
    assert poll(policy, 2, 3, 3) is None, "room for a third, which does not share the batch"
    nodes(cluster, 16.0, free=[4.0])
    assert poll(policy, 2, 6, 6) == 4
    theirs = super(ElasticPolicy, policy)._count_possible_workers({"0": {"CPU": 16.0}})
    assert theirs == 8, "the control: Ray's own policy counts the nodes"


def test_it_gives_up_no_worker_that_is_at_work(policy, cluster):
    nodes(cluster, 8.0, free=[0.0])
    assert poll(policy, 8, *[3] * 8) is None
    assert poll(policy, 4, *[3] * 4, group=2.0) is None


def test_after_a_start_that_failed_only_what_is_free_counts(policy, cluster):
    nodes(cluster, 16.0, free=[5.0])
    decision = policy.make_decision_for_non_running_worker_group()
    assert number(decision) == 8, "workers that have died may still hold theirs"
    fail_to_start(policy, decision)
    assert number(policy.make_decision_for_non_running_worker_group()) == 2
    policy.after_controller_state_update(SchedulingState(decision), RunningState())
    assert number(policy.make_decision_for_non_running_worker_group()) == 8


def fail_to_start(policy, decision):
    again = ReschedulingState(training_failed_error=None)
    policy.after_controller_state_update(SchedulingState(decision), again)
    policy.after_controller_state_update(again, again)  # while it waits


def test_failed_starts_end_the_run_only_in_a_row(policy, cluster):
    nodes(cluster, 16.0)
    for _ in range(3):
        for _ in range(FAILED_STARTS):
            fail_to_start(policy, policy.make_decision_for_non_running_worker_group())
        decision = policy.make_decision_for_non_running_worker_group()
        policy.after_controller_state_update(SchedulingState(decision), RunningState())
    for _ in range(FAILED_STARTS + 1):
        fail_to_start(policy, policy.make_decision_for_non_running_worker_group())
    with pytest.raises(ray.train.ControllerError) as error:
        policy.make_decision_for_non_running_worker_group()
    told = cause(error.value, JOB)
    assert isinstance(told, PlacementError)
    assert "2 workers of {'CPU': 2.0} each could not be started" in str(told)
    assert "lower placement.min_workers" in str(told)


def test_waiting_for_the_fewest_workers_ends(policy, cluster, caplog):
    nodes(cluster, 2.0)
    for _ in range(200):
        assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    assert cluster.now == 200, "Train's controller asks again at once"
    assert [r.message for r in caplog.records if r.name.startswith("rayembed")] == [
        "the cluster has no room for placement.min_workers=2 workers: waiting for nodes, up to "
        "240 s"
    ]
    nodes(cluster, 4.0)
    assert isinstance(policy.make_decision_for_non_running_worker_group(), ResizeDecision)
    nodes(cluster, 2.0)
    for _ in range(241):
        assert isinstance(policy.make_decision_for_non_running_worker_group(), NoopDecision)
    with pytest.raises(ray.train.ControllerError) as error:
        policy.make_decision_for_non_running_worker_group()
    assert isinstance(error.value.controller_failure, InsufficientClusterResourcesError)


def tell_nodes(patch, nodes):
    """Ray's list of nodes, where dead ones are read and where live ones are."""
    for module in (failures, gpu_check_on_ray):
        patch.setattr(module, "ray", Replaced(ray, nodes=nodes))


@pytest.fixture
def gone(monkeypatch):
    """Ids of nodes that have gone, to be changed by the test."""
    ids = {"one of long ago"}

    def nodes():
        dead = [{"NodeID": node, "Alive": False} for node in sorted(ids)]
        small = {"NodeID": "small", "Alive": "small" not in ids, "Resources": {"CPU": 0.5}}
        return [{"NodeID": "here", "Alive": True, "Resources": {"CPU": 4.0}}, small, *dead]

    tell_nodes(monkeypatch, nodes)
    monkeypatch.setattr(failures, "_answers", lambda node: True)
    return ids


def died(preempted=False):
    return WorkerHealthCheckFailedError("no answer", RayActorError(preempted=preempted))


def test_failures_on_nodes_that_are_there_count(gone):
    counted = LostNodes("only", Placement(max_failures=2))
    for _ in range(2):
        counted.after_exception(None, {1: died()})
        counted.after_report(None, [], None)
    with pytest.raises(ray.train.ControllerError) as error:
        counted.after_exception(None, {1: died()})
    told = cause(error.value, JOB)
    assert isinstance(told, WorkerError)
    assert "more often than placement.max_failures=2 allows; the first failure: no ans" in str(told)


def test_the_end_of_a_node_without_room_for_a_worker_excuses_no_failure(gone, caplog):
    counted = LostNodes("only", Placement(max_failures=1))
    gone.add("small")
    counted.after_exception(None, {0: died()})
    assert not [line for line in caplog.messages if "lost nodes" in line]
    with pytest.raises(ray.train.ControllerError):
        counted.after_exception(None, {0: died()})


def test_lost_nodes_count_only_without_a_checkpoint_between_them(gone, caplog):
    counted = LostNodes("only", Placement(max_failures=0))

    def lose(number):
        gone.update({f"{number} a", f"{number} b"})
        counted.after_exception(None, {0: died()})

    for number in range(2 * LOSSES_IN_A_ROW):
        lose(number)
        counted.after_report(None, [], None)
    told = "stage only: number of lost nodes that had workers: 2"
    assert caplog.messages.count(told) == 2 * LOSSES_IN_A_ROW
    for number in range(20, 20 + LOSSES_IN_A_ROW):
        lose(number)
    with pytest.raises(ray.train.ControllerError) as error:
        lose(30)
    ended = cause(error.value, JOB)
    assert isinstance(ended, WorkerError)
    assert f"lost {LOSSES_IN_A_ROW + 1} times with no checkpoint between them" in str(ended)


def test_nodes_that_are_taken_away_with_notice_never_count(gone):
    counted = LostNodes("only", Placement(max_failures=0))
    gone.add("a")
    for _ in range(5):  # Train's controller tells of them until the node is gone
        counted.after_exception(None, {0: RuntimeError("connection closed"), 1: died(True)})
    with pytest.raises(ray.train.ControllerError):
        counted.after_exception(None, {0: died()})


def test_a_node_that_does_not_answer_is_waited_for(monkeypatch):
    looks = []

    def nodes():
        looks.append(None)
        known = len(looks) > 5
        return [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": not known}]

    tell_nodes(monkeypatch, nodes)
    monkeypatch.setattr(failures, "_answers", lambda node: node["NodeID"] == "a")
    monkeypatch.setattr(failures, "_POLL_SECONDS", 0.0)
    assert failures.await_lost_nodes() == {"b"}


def test_a_node_answers_as_long_as_its_raylet_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": server.getsockname()[1]}
        assert failures._answers(node)
    assert not failures._answers(node)


def test_an_elastic_run_counts_itself_and_others_leave_it_to_ray(gone):
    fixed = SimpleNamespace(placement=Placement(workers=8, max_failures=5), stage=LOOP_CONFIG)
    assert failure_config(fixed.placement).max_failures == 5
    assert failure_config(fixed.placement).controller_failure_limit == FAILED_STARTS
    assert failure_config(PLACEMENT).max_failures == -1
    assert failure_config(PLACEMENT).controller_failure_limit == -1
    assert [type(one).__name__ for one in failure_callbacks(fixed)] == ["OnWorkerErrors"]
    assert [type(one).__name__ for one in failure_callbacks(JOB)] == ["OnWorkerErrors", "LostNodes"]
    with pytest.raises(ray.train.ControllerError) as error:
        failure_callbacks(JOB)[0].after_exception(None, {0: DataError("made up")})
    assert str(cause(error.value, JOB)) == "made up"


def test_what_may_pass_is_tried_again_like_a_worker_that_died(gone, caplog):
    lost = StorageError("the storage does not answer")
    failure_callbacks(JOB)[0].after_exception(None, {0: lost, 1: RuntimeError("waited for it")})
    with pytest.raises(ray.train.ControllerError, match="made up"):
        failure_callbacks(JOB)[0].after_exception(None, {0: lost, 1: DataError("made up")})
    wrapped = UserExceptionWithTraceback(lost, f"Traceback:\n  a line of code\n{lost}")
    assert reason(wrapped) == "the storage does not answer"
    ended = cause(SimpleNamespace(worker_failures={0: wrapped}), JOB)
    assert type(ended) is WorkerError
    assert "does not answer" in str(ended)
    assert "Traceback" not in str(ended)
    full = DeviceMemoryError("rank 1 ran out of memory; " + 20 * "what to do, in many words; ")
    with pytest.raises(ray.train.ControllerError, match="rank 1"):
        failure_callbacks(JOB)[0].after_exception(None, {1: full})
    full.may_pass = True
    full = pickle.loads(pickle.dumps(full))
    wrapped = UserExceptionWithTraceback(full, "Traceback")
    waited = RuntimeError("connection closed by peer")
    failure_callbacks(JOB)[0].after_exception(None, {0: waited, 1: wrapped})
    assert "worker 1 failed; all workers restart from the last" in caplog.messages[-1]
    assert str(full).strip() in caplog.messages[-1], "not cut"
    assert str(full) in str(cause(SimpleNamespace(worker_failures={0: waited, 1: wrapped}), JOB))
    others = UserExceptionWithTraceback(ValueError("bad"), "Traceback:\n  a line of code\nbad")
    assert "Traceback" in str(cause(SimpleNamespace(worker_failures={0: others}), JOB))


def test_a_storage_that_is_full_ends_the_run_at_once(gone):
    full = StorageFullError("there is no room")
    with pytest.raises(ray.train.ControllerError) as error:
        failure_callbacks(JOB)[0].after_exception(None, {0: full})
    assert cause(error.value, JOB) is full


DIED = """The actor died unexpectedly before finishing this task.
\tclass_name: RayTrainWorker
\tactor_id: 5b
\tpid: 4711
\tnamespace: n
\tip: 10.0.0.3
"""


def test_a_silent_worker_is_told_in_words_of_the_run():
    told = death(WorkerHealthCheckTimeoutError("Set the RAY_TRAIN_… variable"))
    assert told.startswith("it did not answer for placement.collective_timeout_seconds")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            DIED + "Memory on the node (IP: 10.0.0.3, ID: ab12) was 120.5GB used / 125.0GB limit "
            "(0.96), above the threshold.\nSet max_restarts.",
            "process 4711: Ray killed it because the memory of node 10.0.0.3 was full "
            "(120.5GB used / 125.0GB limit)",
        ),
        (
            DIED + "The worker died: Worker unexpectedly exits with a connection error code 2.\nX",
            "process 4711 on node 10.0.0.3: SIGKILL, which the kernel's memory killer",
        ),
        ("RuntimeError: gloo timed out", ""),
    ],
)
def test_a_death_names_process_node_and_bytes(text, told):
    found = death(RuntimeError(text))
    assert found.startswith(told)
    assert bool(found) is bool(told)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(ray.exceptions.OutOfMemoryError("full"), False), (RuntimeError("gloo"), True)],
)
def test_a_worker_that_was_killed_for_memory_does_not_end_the_run(error, raised, monkeypatch):
    def closes(*_):
        raise error

    monkeypatch.setattr(TorchConfig().backend_cls, "on_shutdown", closes)
    backend = Torch(backend="gloo").backend_cls()
    with pytest.raises(RuntimeError, match="gloo") if raised else nullcontext():
        backend.on_shutdown(None, None)
