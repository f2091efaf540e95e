"""Workers of a test's Ray that are forks of one process which has imported what they need.

A worker of Ray is a new Python that imports torch, transformers and more before it does anything:
five to seventeen CPU seconds each, more than most tests of them do. `forked_workers` has the nodes
that this process starts begin theirs in the way of this file instead: it asks that one process for
a fork, which becomes Ray's own `default_worker.py` with the arguments, environment, folder and
streams that Ray gave. `script` has a script run in a process whose cluster does so. Nodes of `ray
start`, and clusters of other processes, start their workers as everywhere. The process that forks
is itself a fork of the one of `prepared.py`, which serves all clusters of a session.
"""

import fcntl
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prepared import (
    Forked,
    be_a_process_of_its_own,
    connect,
    end,
    new_socket,
    prepare,
    take_over,
)

IMPORTED_ONCE = (
    "ray.data",
    "ray.train.torch",
    "rayembed.data.engine.on_ray",
    "rayembed.evaluation.pooled.on_ray",
    "rayembed.training.train_function_on_ray",
)
"""What workers need beside that of `prepared.py` and `run_distributed`."""

FOLDER = "TESTS_FORKED_WORKERS"
"""Environment variable with the folder of the socket."""

PRESTART = "RAY_prestart_worker_first_driver"
"""Ray's setting for workers that it starts before one needs them: of no job yet, they would not be
forks, and import everything.
"""

NO_JOB = "ffffffff"
"""Ray's id of no job: of workers that it starts before one needs them."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Inside it, nodes that this process starts have forked workers."""
    import ray._private.ray_constants as constants

    prepare()  # it imports while Ray starts
    with tempfile.TemporaryDirectory(prefix="forks-") as folder:
        os.environ |= {FOLDER: folder, PRESTART: "0"}
        kept, constants.SETUP_WORKER_FILENAME = constants.SETUP_WORKER_FILENAME, __file__
        try:
            yield
        finally:
            constants.SETUP_WORKER_FILENAME = kept
            del os.environ[FOLDER], os.environ[PRESTART]


def script(path: str, *arguments: str) -> list[str]:
    """Command that runs a script as `python path arguments`, with forked workers."""
    prepare()
    return [sys.executable, __file__, "run", path, *arguments]


def serve(place: str) -> None:
    """Import, then fork for each that asks, as long as Ray's node lives; who goes away has its fork
    killed.
    """
    listener = new_socket()
    listener.bind(place)
    listener.listen(100)
    from run_distributed import IMPORTED_ONCE as of_training

    with _no_random_numbers():
        for name in (*of_training, *IMPORTED_ONCE):
            __import__(name)
    gc.freeze()  # who collects garbage does not look through it, nor copy its pages
    assert _random_id_of_a_fork() != _random_id_of_a_fork(), "forks name different things alike"
    running = threading.enumerate()  # beside those of allocators, which know of forks
    assert len(running) == 1, f"a fork would have but one of {running}"
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    forks: dict[socket.socket, int] = {}
    while Path("/proc", os.environ["RAY_RAYLET_PID"]).exists():
        for ready in select.select([listener, *forks], [], [], 1.0)[0]:
            if ready is not listener:
                _kill(forks.pop(ready))
                ready.close()
                continue
            asking, _ = listener.accept()
            payload, streams, *_ = socket.recv_fds(asking, 1 << 20, 3)
            if not payload:
                continue
            pid = os.fork()
            if pid == 0:
                for other in (*forks, listener, asking):
                    other.close()
                _become_worker(json.loads(payload), streams)
            for stream in streams:
                os.close(stream)
            asking.send(pid.to_bytes(8, "big"))
            forks[asking] = pid


@contextmanager
def _no_random_numbers() -> Iterator[None]:
    """Inside it, actor classes get their ids from the system.

    Ray's own generator is seeded when it is first used. Seeded before the forks, it would name
    their tasks alike: of two that run at a time with one name, Ray lets an actor die.
    """
    import ray.actor
    from ray._raylet import ActorClassID

    class Ids:
        @staticmethod
        def from_random() -> ActorClassID:
            return ActorClassID(os.urandom(ActorClassID.size()))

    ray.actor.ActorClassID = Ids
    try:
        yield
    finally:
        ray.actor.ActorClassID = ActorClassID


def _random_id_of_a_fork() -> bytes:
    import ray

    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, ray.ObjectRef.from_random().binary())
        os._exit(0)
    os.waitpid(pid, 0)
    found = os.read(reader, 1000)
    os.close(reader)
    os.close(writer)
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _become_worker(given: dict, streams: list[int]) -> None:
    """Run Ray's worker in this fork; does not return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setpgid(0, 0)
        take_over(given, streams)
        _set_up(given["arguments"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:  # noqa: BLE001  it is told, and nothing of this process goes on
        import traceback

        traceback.print_exc()
    finally:
        end(code)


def _set_up(arguments: list[str]) -> None:
    """What Ray's `setup_worker.py` does, without another Python."""
    import argparse

    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs

    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context", default="{}")
    parser.add_argument("--language")
    parsed, (script, *rest) = parser.parse_known_args(arguments)
    update_envs(RuntimeEnvContext.deserialize(parsed.serialized_runtime_env_context).env_vars)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    be_a_process_of_its_own()
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")


def ask(folder: str) -> None:
    """Ask for a fork and wait for its end, as Ray's `setup_worker.py` becomes a worker.

    The first one of a job starts the process that forks: Ray reads from the environment, when it is
    imported, of which node and job a worker is. Those of others start as everywhere.
    """
    job, place = os.environ["RAY_JOB_ID"], f"{folder}/socket"
    ours = f"{os.environ['RAY_RAYLET_PID']} {job}"
    with Path(folder, "whose").open("a+") as whose:
        fcntl.flock(whose, fcntl.LOCK_EX)
        whose.seek(0)
        forked = whose.read()
        if not forked and job != NO_JOB:
            whose.write(forked := ours)
            environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
            command = [sys.executable, __file__, "serve", place]
            Forked(command, env=environment, stdout=1, stderr=2, is_left_alone=True)
    if forked != ours:
        usual = Path(importlib.util.find_spec("ray").origin).parent / "_private/workers"
        usual = str(usual / "setup_worker.py")
        os.execv(sys.executable, [sys.executable, usual, *sys.argv[1:]])
    asking = connect(place)
    given = {"arguments": sys.argv[1:], "environment": dict(os.environ), "folder": str(Path.cwd())}
    socket.send_fds(asking, [json.dumps(given).encode()], [0, 1, 2])
    pid = int.from_bytes(asking.recv(8), "big")
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(pid)], [], [])


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    elif sys.argv[1:2] == ["run"]:
        sys.argv = sys.argv[2:]
        with forked_workers():
            runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        ask(os.environ[FOLDER])
