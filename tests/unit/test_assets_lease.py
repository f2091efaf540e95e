"""One job at a time has something in storage, whichever machine it is on."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from s3_server import BUCKET, s3_server

from rayembed.assets import lease
from rayembed.assets.cache import CACHE_VARIABLE
from rayembed.assets.lease import Lease, holder, this_machine
from rayembed.assets.storage import join, list_files, remove_file, write_atomic
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, StorageError
from rayembed.pipeline.run.folders import locked_folders

WHAT = "trains the run 'tiny'"

RUN = {
    "name": "tiny",
    "model": {"kind": "biencoder", "backbone": {"path": "hf://org/base@abc"}},
    "data": {"datasets": [{"name": "own", "source": {"kind": "pairs", "path": "p.jsonl"}}]},
    "stages": [
        {
            "name": "only",
            "datasets": {"own": 1.0},
            "batch": {"global_pairs": 8, "in_batch_negatives": True},
            "optimizer": {"learning_rate": 1e-4},
            "steps": 5,
        }
    ],
}


@pytest.fixture(scope="module")
def environment():
    with s3_server() as environment:
        yield environment


@pytest.fixture(params=["disk", "s3"])
def folder(request, tmp_path):
    """An empty folder, where times are told in parts of a second and where they are not."""
    if request.param == "disk":
        return str(tmp_path / "claims")
    patch = request.getfixturevalue("monkeypatch")
    for name, value in request.getfixturevalue("environment").items():
        patch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name}"


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """A lease of seconds, which the clock of S3 can still tell."""
    monkeypatch.setattr(lease, "LEASE_SECONDS", 3.0)
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.5)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.3)


def left_by_a_dead_job(folder, monkeypatch, machine="first"):
    """A claim that was held and is not renewed any more."""
    with monkeypatch.context() as patch:
        patch.setattr(Lease, "_renew", lambda self: None)
        patch.setattr(Lease, "_withdraw", lambda self: None)
        with Lease(folder, WHAT, machine):
            pass


def test_a_second_job_is_refused_and_told_who_has_it(folder):
    with Lease(folder, WHAT, "first", on_lost=pytest.fail):
        told = str(holder(folder))
        assert f"process {os.getpid()} on " in told
        with pytest.raises(ArtifactError, match="another job trains the run 'tiny'") as refused:
            Lease(folder, WHAT, "second").__enter__()
        assert told in str(refused.value)
        assert len(list_files(folder, recursive=False)) == 1  # the second one's claim is gone
    assert not list_files(folder, recursive=False)
    with Lease(folder, WHAT, "second"):
        pass


def test_a_dead_jobs_lease_is_taken_over_when_it_is_over(folder, monkeypatch):
    left_by_a_dead_job(folder, monkeypatch)
    began = time.monotonic()
    with Lease(folder, WHAT, "second", on_lost=pytest.fail):
        assert 1.5 < time.monotonic() - began < 8
        assert len(list_files(folder, recursive=False)) == 1


def test_on_the_same_machine_its_lock_tells_at_once(folder, monkeypatch):
    left_by_a_dead_job(folder, monkeypatch)
    began = time.monotonic()
    with Lease(folder, WHAT, "first", on_lost=pytest.fail):
        assert time.monotonic() - began < 1


def test_a_job_may_wait_for_the_other(tmp_path):
    first = Lease(str(tmp_path), WHAT, "first", on_lost=pytest.fail)
    first.__enter__()
    threading.Timer(1.5, first.__exit__, (None, None, None)).start()
    began = time.monotonic()
    with Lease(str(tmp_path), WHAT, "second", wait=True):
        assert time.monotonic() - began > 1.4


@pytest.mark.parametrize("looks", [True, False])
def test_no_two_have_it_at_a_time(tmp_path, monkeypatch, looks):
    """Eight ask at the same time; the control does not look at the others' claims."""
    if not looks:
        monkeypatch.setattr(Lease, "_others", lambda self: (self._times(), {}))
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.05)
    inside, most = 0, 0
    guard, together = threading.Lock(), threading.Barrier(8)

    def works(number):
        nonlocal inside, most
        together.wait()
        with Lease(str(tmp_path), WHAT, f"machine {number}", wait=True, on_lost=pytest.fail):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.05)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=works, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most == 1) is looks


def test_a_holder_whose_storage_was_away_goes_on(tmp_path, monkeypatch, caplog):
    away = threading.Event()
    written = lease.write_atomic

    def write(path, data):
        if away.is_set():
            raise StorageError("the storage does not answer")
        written(path, data)

    monkeypatch.setattr(lease, "write_atomic", write)
    with Lease(str(tmp_path), WHAT, "first", on_lost=pytest.fail):
        away.set()
        time.sleep(3.5)  # longer than the lease, and nobody has taken it
        away.clear()
        time.sleep(1)
        with pytest.raises(ArtifactError, match="another job"):
            Lease(str(tmp_path), WHAT, "second").__enter__()
    assert [r.message.split(" in ")[0] for r in caplog.records if r.levelname == "WARNING"] == [
        "cannot renew this job's lock",
        "renewed this job's lock",
    ]
    assert "s without a renewal" in caplog.text


HOLDS = """
import sys, time
from rayembed.assets import lease
lease.LEASE_SECONDS, lease.RENEWAL_SECONDS = 3.0, 0.5
with lease.Lease(sys.argv[1], "trains the run 'tiny'", "first"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_holder_that_was_stopped_ends_when_another_has_taken_the_lease(tmp_path):
    """A head pod that did not run for a while, and goes on beside the next one."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as first:
        assert first.stdout is not None
        assert first.stderr is not None
        assert first.stdout.readline() == "held\n"
        first.send_signal(signal.SIGSTOP)
        with Lease(str(tmp_path), WHAT, "second", on_lost=pytest.fail):
            first.send_signal(signal.SIGCONT)
            assert first.wait(10) == 1
            time.sleep(1)  # the second one looks at its claim and keeps the lease
        message = first.stderr.read()
    assert "this job has lost its lock" in message
    assert f"another job trains the run 'tiny' now (process {os.getpid()} on" in message
    assert not list(tmp_path.iterdir())


def test_a_holder_whose_claim_another_job_took_and_gave_back_ends(folder):
    """It was away for as long as the other one worked, so what it would write is old."""
    lost = threading.Event()
    told = []

    def on_lost(message):
        told.append(message)
        lost.set()

    with Lease(folder, WHAT, "first", on_lost=on_lost):
        (name,) = list_files(folder, recursive=False)
        remove_file(join(folder, name))
        assert lost.wait(10)
        assert list_files(folder, recursive=False) == []
    assert "another job has taken the lock and released it" in told[0]


@pytest.mark.parametrize(
    "content",
    [
        '{"machine": "m", "host": "h", "process": 3, "since": "s", "held_from": 5, "later": 1}',
        '{"machine": "m", "later": true}',
        "[]",
        "not JSON",
    ],
)
def test_a_claim_that_this_version_cannot_read_is_another_jobs(content, tmp_path):
    ended = threading.Event()

    def renew():
        while not ended.wait(0.1):
            write_atomic(tmp_path / "other.claim", content.encode())

    write_atomic(tmp_path / "other.claim", content.encode())
    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        with pytest.raises(ArtifactError, match="another job trains the run"):
            Lease(str(tmp_path), WHAT, "second").__enter__()
    finally:
        ended.set()
        renewing.join()
    assert [path.name for path in tmp_path.iterdir()] == ["other.claim"]


def test_two_machines_cannot_work_on_one_run_in_object_storage(environment, monkeypatch, tmp_path):
    """Each head has its own cache folder, and its own lock there."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    storage = f"s3://{BUCKET}/heads"
    run = parse(Run, {**RUN, "placement": {"storage_path": storage}})
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "first"))
    with locked_folders(run) as folders:
        with pytest.raises(ArtifactError, match="since"), locked_folders(run):
            pass  # the lock of the same machine
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "second"))
        with pytest.raises(ArtifactError, match=f"process {os.getpid()} on .*, since"):
            locked_folders(run).__enter__()
        assert (
            list_files(folders.storage, recursive=True) == []
        )  # claims lie beside the run's files
    with locked_folders(run):
        pass


def test_the_same_lock_file_is_the_same_machine(tmp_path):
    assert this_machine(tmp_path / "a.lock") == this_machine(tmp_path / "a.lock")
    assert this_machine(tmp_path / "a.lock") != this_machine(Path("b.lock"))
