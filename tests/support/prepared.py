"""A process that has imported torch, transformers, mteb and other libraries; what a test starts as
a Python is a fork of it.

The imports cost ten seconds of a core, more than most scripts do after them. Nothing of rayembed
and Ray is imported before the fork, so that the code is that of the asker's PYTHONPATH, also a copy
with changes, and Ray reads its settings from the asker's environment. Where a test reads what
libraries print or which of them are loaded, it should start a Python of its own.
"""

import atexit
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

IMPORTED_ONCE = (
    "torch",
    "transformers",
    "sentence_transformers",
    "mteb",
    "mlflow.pyfunc",
    "faiss",
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # see `run_distributed`
    "matplotlib.pyplot",
    "peft",
    "torch.distributed",
    "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
    "transformers.models.nomic_bert.modeling_nomic_bert",
)

SESSION = "TESTS_PREPARED_FOR"
"""Environment variable with the id of the process that the prepared one lives as long as."""

READ_BY_IMPORTS = (
    "HF_",
    "MLFLOW_DISABLE_",
    "MLFLOW_LOGGING_",
    "MTEB_",
    "OMP_",
    "TORCH",
    "TQDM_",
    "TRANSFORMERS_",
)
"""How names of variables begin that libraries read when they are imported."""

SECONDS = 180
"""For the imports, on a busy machine."""


class Forked:
    """A fork that runs a command which begins with this Python, in a session of its own; as much
    of `subprocess.Popen` as tests use.

    Args:
        is_left_alone: it goes on when the process that asked is gone.
    """

    def __init__(
        self,
        command: Sequence[str | os.PathLike],
        *,
        stdout: IO | int,
        stderr: IO | int,
        stdin: IO | int | None = None,
        cwd: str | os.PathLike | None = None,
        env: Mapping[str, str] | None = None,
        is_left_alone: bool = False,
    ) -> None:
        self.returncode: int | None = None
        python, *arguments = map(str, command)
        assert python == sys.executable
        environment = dict(os.environ if env is None else env)
        given = {
            "arguments": arguments,
            "environment": environment,
            "folder": str(Path(cwd or Path.cwd()).absolute()),
            "is_left_alone": is_left_alone,
        }
        self._asking = connect(f"{prepare(environment)}/socket")
        with Path(os.devnull).open() as nothing:
            streams = [nothing if stdin is None else stdin, stdout, stderr]
            numbers = [one if isinstance(one, int) else one.fileno() for one in streams]
            socket.send_fds(self._asking, [json.dumps(given).encode()], numbers)
        self.pid = int.from_bytes(self._asking.recv(8), "big")

    def poll(self) -> int | None:
        """Exit code, if it has ended."""
        with suppress(TimeoutError, subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit code; that of a signal is negative."""
        if self.returncode is None:
            if not select.select([self._asking], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
            told = self._asking.recv(8)
            assert told, "the prepared process is gone"
            self.returncode = int.from_bytes(told, "big", signed=True)
            self._asking.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def run(
    command: Sequence[str | os.PathLike], *, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """What `subprocess.run(…, capture_output=True, text=True)` returns."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Forked(command, stdout=out, stderr=err, **options)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(list(command), code, out.read(), err.read())


def python_of_a_fork() -> str:
    """Words of a command that does what `python` does, in a fork."""
    prepare()
    return shlex.join([sys.executable, __file__, "run"])


def prepare(environment: Mapping[str, str] | None = None) -> str:
    """Folder of the socket of the prepared process, which is started if there is none: one for all
    processes of a session of tests, and one more where the environment of imports differs.
    """
    environment = os.environ if environment is None else environment
    if SESSION not in os.environ:
        is_worker = "PYTEST_XDIST_WORKER" in os.environ
        os.environ[SESSION] = str(os.getppid() if is_worker else os.getpid())
    session = os.environ[SESSION]
    read = sorted((k, v) for k, v in environment.items() if k.startswith(READ_BY_IMPORTS))
    key = hashlib.sha256(json.dumps(read).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"rayembed-prepared-{session}-{key}")
    folder.mkdir(exist_ok=True)
    with (folder / "started").open("a+") as started:
        fcntl.flock(started, fcntl.LOCK_EX)
        started.seek(0)
        if not started.read():
            subprocess.Popen(
                [sys.executable, __file__, str(folder), session],
                stdin=subprocess.DEVNULL,
                # its first asker's PYTHONPATH is not that of the others
                env={
                    **{name: v for name, v in environment.items() if name != "PYTHONPATH"},
                    "DS_ACCELERATOR": "cpu",
                },
                start_new_session=True,
            )
            started.write("yes")
    return str(folder)


def new_socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def connect(place: str) -> socket.socket:
    """A connection to who may still be importing."""
    asking, deadline = new_socket(), time.monotonic() + SECONDS
    while True:
        try:
            super(socket.socket, asking).connect(place)  # not as tests without a network have it
            return asking
        except (ConnectionRefusedError, FileNotFoundError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _serve(folder: str, owner: int) -> None:
    """Import, then fork for each that asks, as long as the owner lives; who goes away has its fork
    killed.
    """
    listener = new_socket()
    listener.bind(f"{folder}/socket.new")
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    assert not {"ray", "rayembed"} & sys.modules.keys()
    gc.collect()
    gc.freeze()  # who collects garbage does not look through it, nor copy its pages
    running = threading.enumerate()  # beside those of allocators, which know of forks
    assert len(running) == 1, f"a fork would have but one of {running}"
    listener.listen(100)
    Path(folder, "socket.new").rename(f"{folder}/socket")
    paths = sys.path[1:]
    forks: dict[socket.socket, tuple[int, int, bool]] = {}
    while Path(f"/proc/{owner}").exists():
        ended = {pidfd: asking for asking, (_, pidfd, _) in forks.items()}
        watched = [asking for asking, (*_, is_left_alone) in forks.items() if not is_left_alone]
        for one in select.select([listener, *watched, *ended], [], [], 1.0)[0]:
            if one is listener:
                asking, _ = listener.accept()
                payload, streams, *_ = socket.recv_fds(asking, 1 << 20, 3)
                if not payload:
                    continue
                given = json.loads(payload)
                pid = os.fork()
                if pid == 0:
                    os.setsid()
                    asking.send(os.getpid().to_bytes(8, "big"))
                    for other in (*forks, listener, asking):
                        other.close()
                    for _, pidfd, _ in forks.values():
                        os.close(pidfd)
                    _become(given, streams, paths)
                for stream in streams:
                    os.close(stream)
                forks[asking] = pid, os.pidfd_open(pid), given["is_left_alone"]
                continue
            asking = ended.get(one, one)
            if asking not in forks:
                continue
            pid, pidfd, _ = forks.pop(asking)
            if one is asking:  # who asked is gone
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            with suppress(OSError):
                asking.send(code.to_bytes(8, "big", signed=True))
            asking.close()
            os.close(pidfd)
    for pid, *_ in forks.values():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def take_over(given: Mapping[str, Any], streams: Sequence[int]) -> None:
    """Be in this fork where the asker wants it: its streams, environment, folder."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    os.environ.clear()
    os.environ.update(given["environment"])
    os.chdir(given["folder"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))


def be_a_process_of_its_own() -> None:
    """Draw other random numbers than other forks, on as many threads as the environment says."""
    import random

    import numpy
    import torch

    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))  # what torch reads when it is imported
    random.seed()
    numpy.random.seed()


def end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _become(given: Mapping[str, Any], streams: Sequence[int], paths: Sequence[str]) -> None:
    """Run in this fork what Python's arguments ask for; does not return."""
    code = 1
    try:
        take_over(given, streams)
        be_a_process_of_its_own()
        _run(given["arguments"], paths)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:  # noqa: BLE001  it is told, and nothing of this process goes on
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        end(code)


def _run(arguments: list[str], paths: Sequence[str]) -> None:
    if arguments[0] == "-u":
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
        arguments = arguments[1:]
    first, *rest = arguments
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    place = {"-c": "", "-m": str(Path.cwd())}.get(first, str(Path(first).parent.absolute()))
    sys.path[:] = [place, *(str(Path(path).absolute()) for path in own), *paths]
    importlib.invalidate_caches()
    if first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        sys.exit(Forked([sys.executable, *sys.argv[2:]], stdin=0, stdout=1, stderr=2).wait())
    _serve(sys.argv[1], int(sys.argv[2]))
