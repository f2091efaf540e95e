"""A Ray head on this machine as a child process: found, started, waited for, stopped.

Nothing here imports Ray; the head is the command `ray start --head --block` of this environment.
Whatever is stopped was started here: the head leads a session of its own, and only its members
and descendants are ended (`ray stop` would end every Ray on the machine).
"""

import logging
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from rayembed.display.progress import doing
from rayembed.errors import PlacementError
from rayembed.pipeline.stopping import ends_with_it

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
JOB_STOP_SECONDS = 45
"""Seconds that a job of such a head has to end in when it is stopped; Ray's own 3 make no
checkpoint."""

_STOP_SECONDS = 40.0


@dataclass(frozen=True)
class Ports:
    """Ports of a head that `ray start` would otherwise take at their defaults or fail."""

    head: int = 6379
    dashboard: int = 8265
    agent: int = 52365
    client: int = 10001


def prepare_environment() -> None:
    """Set what Ray's commands and clients of this process need to reach a local head.

    Token authentication is on unless `RAY_AUTH_MODE` says otherwise: a head takes the token file
    as soon as there is one, a client only when told (else 401). Proxies are kept off loopback.
    Must run before Ray is imported.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        missing = [host for host in ("127.0.0.1", "localhost") if host not in hosts]
        os.environ[name] = ",".join(hosts + missing)


def ensure_token() -> str | None:
    """The cluster token, made in `~/.ray/auth_token` (mode 600) when there is none.

    None when authentication is off. `RAY_AUTH_TOKEN` and `RAY_AUTH_TOKEN_PATH` come first, as in
    Ray.

    Raises:
        PlacementError: the token file is empty, or `RAY_AUTH_TOKEN_PATH` names none.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return None
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    chosen = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(chosen or "~/.ray/auth_token").expanduser()
    if not path.exists():
        if chosen:
            raise PlacementError(f"RAY_AUTH_TOKEN_PATH names {str(path)!r}, which does not exist")
        _write_token(path)
    elif not chosen and path.stat().st_mode & 0o077:
        path.chmod(0o600)
        logger.info("%s was readable by others; its mode is now 600", path)
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise PlacementError(f"the Ray token file {str(path)!r} is empty; remove it and try again")
    return token


def _write_token(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".auth_token.", dir=path.parent)  # mode 600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32))
        # A link fails where a file already is, so a token of another process wins.
        path.hardlink_to(name)
    except FileExistsError:
        pass
    finally:
        Path(name).unlink()


def probe(address: str, token: str | None, *, timeout_seconds: float = 3.0) -> int:
    """HTTP status of a Jobs server's version page: 200, 401 for another token, 0 for no answer."""
    request = urllib.request.Request(f"{address}/api/version")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=timeout_seconds) as response:
            body = response.read(10_000)
            return int(response.status) if b"ray_version" in body else 0
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return 0


def find_head(token: str | None) -> str | None:
    """The address of a Jobs server on this machine that takes the token, or None.

    Looks at the default port and at the ports of every dashboard process that this user may see.
    """
    for address in _dashboards():
        status = probe(address, token)
        if status == 200:
            return address
        if status in (401, 403):
            logger.warning("the Ray at %s refuses this user's token; it is not used", address)
    return None


def _dashboards() -> list[str]:
    ports = {("127.0.0.1", Ports().dashboard)}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if not any(part.endswith("ray/dashboard/dashboard.py") for part in command):
            continue
        try:
            listening = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        for connection in listening:
            if connection.status == psutil.CONN_LISTEN:
                host = connection.laddr.ip
                any_host = host in ("0.0.0.0", "::", "::1")
                ports.add(("127.0.0.1" if any_host else host, connection.laddr.port))
    return [f"http://{host}:{port}" for host, port in sorted(ports)]


def choose_ports(wanted: Ports = Ports()) -> Ports:
    """The wanted ports, each replaced by a free one where it is taken.

    Raises:
        PlacementError: no free port was found.
    """
    taken: set[int] = set()

    def choose(port: int) -> int:
        chosen = port if port not in taken and _is_free(port) else free_port(taken)
        taken.add(chosen)
        return chosen

    asked = wanted.head, wanted.dashboard, wanted.agent, wanted.client
    return Ports(*map(choose, asked))


def own_cluster(environment: dict[str, str]) -> dict[str, Any]:
    """Arguments of `ray.init` that start a cluster of this process; completes its environment."""
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    # Train asks the dashboard whether its controller lives. Untold, it asks the cluster that
    # somebody's `ray start` last left its address of, and takes the controller for dead. All
    # processes of such a cluster run on this machine.
    port = free_port()  # not Ray's own 8265, which a second script would want too
    environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
    logger.info("Ray starts in this process; its dashboard: http://127.0.0.1:%d", port)
    return {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}


def free_port(taken: Collection[int] = ()) -> int:
    """A port that is free now, not one of those taken.

    Not one that the system would choose: before it is bound, seconds later, the system may give
    such a one to any connection.

    Raises:
        PlacementError: none was found.
    """
    # Below the ephemeral range and above Ray's worker ports (10002 to 19999).
    for candidate in random.SystemRandom().sample(range(20_000, 32_000), 50):
        if candidate not in taken and _is_free(candidate):
            return candidate
    raise PlacementError("no free port was found in 20000 to 32000")


def _is_free(port: int) -> bool:
    with socket.socket() as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind(("", port))
        except OSError:
            return False
    return True


@contextmanager
def head(
    log_file: Path, token: str | None, *, num_cpus: int | None = None, timeout_seconds: float = 180
) -> Iterator[str]:
    """The address of a head that runs inside the `with` block and is gone after it, also where a
    signal ends the block (`hearing`) or a second one the process.

    Args:
        log_file: receives what `ray start` prints.
        token: the cluster's token, None without authentication.
        num_cpus: what Ray may hand out; None: what Ray finds (it knows containers' limits).
        timeout_seconds: for the Jobs server to answer.

    Raises:
        PlacementError: the head died or did not answer in time; with the end of its log.
    """
    ports = choose_ports()
    address = f"http://127.0.0.1:{ports.dashboard}"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    process: subprocess.Popen[bytes] | None = None
    try:
        # A signal between the start and the assignment would leave a head that nobody stops.
        with deferred_signals(), log_file.open("wb") as log:
            process = subprocess.Popen(
                start_command(ports, num_cpus),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_head_environment(),
                start_new_session=True,
            )
        with ends_with_it(partial(stop, process, leader_seconds=0.0)):
            with doing("starting the Ray head"):
                _wait_until_ready(process, address, token, log_file, timeout_seconds)
            yield address
    finally:
        if process is not None:
            with deferred_signals(), doing("stopping the Ray head"):
                stop(process)


def start_command(ports: Ports, num_cpus: int | None) -> list[str]:
    """The `ray start` command of a head with a dashboard on loopback."""
    command = [_ray(), "start", "--head", "--block", "--dashboard-host=127.0.0.1"]
    command += [f"--port={ports.head}", f"--dashboard-port={ports.dashboard}"]
    command += [f"--dashboard-agent-listen-port={ports.agent}"]
    command += [f"--ray-client-server-port={ports.client}", "--disable-usage-stats"]
    return command if num_cpus is None else [*command, f"--num-cpus={num_cpus}"]


def _ray() -> str:
    command = Path(sys.executable).parent / "ray"
    if not command.exists():
        raise PlacementError(f"there is no {str(command)!r}; install rayembed in this environment")
    return str(command)


RAY_SETTINGS = {
    # Ray's workers have the lowest priority otherwise, and each of its own processes that wakes up
    # (100 times a second) takes a core from them: a tenth of the speed on two.
    "RAY_worker_niceness": "0",
    # Where memory is full Ray kills one worker then, of those with the same owner. Since 2.56 it
    # kills as many of the newest processes as would free enough: Train's controller with its
    # cleaner, without which the workers' CPUs are never given back.
    "RAY_worker_killing_policy_by_group": "true",
}
"""Environment of a cluster's processes, where nobody sets it otherwise."""

LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""Variable and value with which every process of a cluster listens on loopback alone, as on Windows
and macOS, where Ray has no clusters of several machines. `--node-ip-address=127.0.0.1` does not:
Ray puts the machine's own address in its place. Read when Ray is imported."""


def _head_environment() -> dict[str, str]:
    """The environment, with this Python first on the PATH: jobs run `python` from there."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    values = {**RAY_SETTINGS, **dict([LOOPBACK]), **os.environ, "PATH": path}
    values.setdefault("RAY_JOB_STOP_WAIT_TIME_S", str(JOB_STOP_SECONDS))
    # Its job has ended or was stopped before it, and there is no other node that anything could
    # move to: draining would wait 30 seconds for what a job has left behind.
    values.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):  # would point at another cluster
        values.pop(name, None)
    return values


def _wait_until_ready(
    process: subprocess.Popen[bytes],
    address: str,
    token: str | None,
    log_file: Path,
    timeout_seconds: float,
) -> None:
    deadline = time.monotonic() + timeout_seconds
    while probe(address, token) != 200:
        code = process.poll()
        if code is not None:
            problem = f"the Ray head ended at once with exit code {code}"
        elif time.monotonic() > deadline:
            problem = f"the Ray head's Jobs server {address} did not answer in {timeout_seconds} s"
        else:
            time.sleep(0.3)
            continue
        end = "\n".join(log_file.read_text(errors="replace").splitlines()[-15:])
        raise PlacementError(f"{problem}. The end of {str(log_file)!r}:\n{end}")


def stop(leader: subprocess.Popen[bytes], *, leader_seconds: float = _STOP_SECONDS) -> None:
    """Return when the session leader, its session and its descendants are gone, and only they.

    The leader gets SIGTERM and time to end; what is left gets SIGTERM, then SIGKILL. A process
    is known by its id and start time, so an id that was given anew is not hit.
    """
    members = _members(leader.pid)
    if leader.poll() is None:
        leader.terminate()
        try:
            leader.wait(leader_seconds)
        except subprocess.TimeoutExpired:
            logger.warning("the Ray head (process %d) did not stop; killing it", leader.pid)
            leader.kill()
            leader.wait()
    # The kernel gives no process the id of a session that still has members.
    members |= _in_session(leader.pid)
    for end in ("terminate", "kill"):
        _, alive = psutil.wait_procs(members, timeout=2)
        for process in alive:
            try:
                getattr(process, end)()
            except psutil.NoSuchProcess:
                continue
        members = set(alive)
    psutil.wait_procs(members, timeout=10)


def _members(leader: int) -> set[psutil.Process]:
    """Members of the leader's session and its descendants (a job's driver has its own session)."""
    try:
        below = set(psutil.Process(leader).children(recursive=True))
    except psutil.NoSuchProcess:
        below = set()
    return below | _in_session(leader)


def _in_session(leader: int) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        try:
            if process.pid != leader and os.getsid(process.pid) == leader:
                found.add(process)
        except (ProcessLookupError, PermissionError):
            continue
    return found


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Hold back SIGINT, SIGTERM and SIGHUP inside the block; the last one is delivered after."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    former = {number: signal.signal(number, remember) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    if seen:
        signal.raise_signal(seen[-1])
