"""What a pod runs before it is stopped: it finds its raylet, and tells Ray if something trains."""

import subprocess
from types import SimpleNamespace

import pytest
from waits import Replaced

from rayembed.training.faults import drain_node as module
from rayembed.training.faults.drain_node import drain, drain_node, trains

RAYLET = (
    "/opt/venv/ray/core/src/ray/raylet/raylet",
    "--node_id=4711",
    "--gcs-address=10.0.0.1:6379",
    "--python_worker_command=python --node-id=other --gcs-address=10.9.9.9:1",
)
WORKER = ("ray::RayTrainWorker", "", "")


def processes(folder, *commands):
    """Folders as those of `/proc`."""
    (folder / "self").mkdir()
    for number, command in enumerate(commands, start=10):
        (folder / str(number)).mkdir()
        (folder / str(number) / "cmdline").write_bytes("\0".join(command).encode() + b"\0")
    (folder / "99").mkdir()  # it has just ended
    return folder


@pytest.fixture
def told(monkeypatch):
    """Commands that Ray was told by; they take no time."""
    commands = []

    def run(command, **options):
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(module, "subprocess", Replaced(subprocess, run=run))
    return commands


def test_the_node_is_that_of_the_raylet_which_runs_here(tmp_path, told):
    assert drain(110, processes(tmp_path, ("bash",), RAYLET, WORKER))
    (command,) = told
    assert {"--node-id=4711", "--address=10.0.0.1:6379"} <= set(command)
    assert {"--deadline-remaining-seconds=110", "--reason=DRAIN_NODE_REASON_PREEMPTION"} <= {
        *command
    }


def test_where_nothing_trains_ray_is_not_told(tmp_path, told):
    """A pod that the autoscaler ends because it is idle must not wait."""
    folder = processes(tmp_path, RAYLET, ("ray::IDLE",))
    assert not trains(folder)
    assert drain_node(110, folder) == 0
    assert told == []


def test_it_waits_until_no_worker_is_left(tmp_path, told, monkeypatch):
    folder = processes(tmp_path, RAYLET, WORKER)
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 3:
            (folder / "11" / "cmdline").unlink()

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=sleep))
    assert drain_node(110, folder) == 0
    assert len(waits) == 3
    assert len(told) == 1


def test_a_head_that_is_gone_holds_up_no_pod(tmp_path, capsys):
    def fails(command, **options):
        assert options["timeout"] <= 60
        raise subprocess.TimeoutExpired(command, options["timeout"])

    folder = processes(tmp_path, RAYLET, WORKER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "subprocess", Replaced(subprocess, run=fails))
        assert drain_node(110, folder) == 1
    assert "cannot announce to Ray that this node will stop" in capsys.readouterr().err


def test_a_machine_without_ray_is_told_of(tmp_path, capsys):
    assert drain_node(110, processes(tmp_path, WORKER)) == 1
    assert "no raylet runs on this machine" in capsys.readouterr().err
