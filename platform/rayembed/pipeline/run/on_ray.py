"""Ray runtime of a run: connect to a cluster, or start one from this process."""

import logging
import os
import random
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayembed.config.credentials import check_address
from rayembed.config.data_run import DataRun
from rayembed.display.progress import doing
from rayembed.display.quiet import JOB, quiet, set_unset, without_harmless
from rayembed.errors import PlacementError
from rayembed.pipeline.job import work_begins
from rayembed.pipeline.stopping import keep_hearing, without_hangups

if TYPE_CHECKING:
    from rayembed.config.evaluation import EvaluationPlacement
    from rayembed.config.placement import Placement
    from rayembed.config.settings import Settings
    from rayembed.data.engine.artifacts import PipelineContext
    from rayembed.evaluation.pooled.pool import Workers
    from rayembed.evaluation.score import Pool
    from rayembed.machine.device import SeenGpus
    from rayembed.machine.hardware import Precision

logger = logging.getLogger(__name__)

_LOG_LEVEL = "WARNING"

_QUIET_HOOK = "rayembed.display.quiet.quiet"

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

_LOOPBACK = ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
"""Variable and value with which every process of a cluster listens on loopback alone, as on Windows
and macOS, where Ray has no clusters of several machines. `--node-ip-address=127.0.0.1` does not:
Ray puts the machine's own address in its place. Read when Ray is imported."""


def connect() -> None:
    """Connect to the cluster at `RAY_ADDRESS`, which Ray sets inside a job; without an address,
    start a cluster.

    Without it Ray would look for any cluster of this machine, and wait for one that has gone.
    """
    work_begins()
    address = os.environ.get("RAY_ADDRESS") or "local"
    check_address(address, "the environment variable RAY_ADDRESS")
    if address == "local":
        # Ray would make the token of such a cluster in a file that everybody here can read.
        ensure_token()
        if "ray" not in sys.modules:
            os.environ.setdefault(*_LOOPBACK)
    import ray
    import ray.data

    from rayembed.machine.device import allocator_environment

    quiet()
    # Of the variables that a job's runtime environment names, Ray takes no second value.
    unset = set_unset(JOB)
    if not ray.is_initialized():
        unset |= set_unset(allocator_environment())
        started = _own_cluster(unset) if address == "local" else {}
        _filter_lines_of_workers()
        try:
            where = "starting Ray" if started else f"joining the Ray cluster at {address}"
            with doing(where), without_hangups():
                ray.init(
                    address=address,
                    logging_level=_LOG_LEVEL,
                    runtime_env={"env_vars": unset, "worker_process_setup_hook": _QUIET_HOOK},
                    **started,
                )
        except (OSError, RuntimeError, TimeoutError, ValueError) as error:
            raise _no_ray(address, error) from error
        keep_hearing()
    # Those that are imported already have read the environment.
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(_LOG_LEVEL)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def ensure_token() -> None:
    """Create Ray's authentication token `~/.ray/auth_token` (mode 600) if it is missing.

    Nothing is made where authentication is off, or where `RAY_AUTH_TOKEN` or `RAY_AUTH_TOKEN_PATH`
    gives the token, as in Ray.

    Raises:
        PlacementError: the token file is empty, or `RAY_AUTH_TOKEN_PATH` names none.
    """
    if os.environ.get("RAY_AUTH_MODE", "token") != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    chosen = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(chosen or "~/.ray/auth_token").expanduser()
    if not path.exists():
        if chosen:
            raise PlacementError(f"RAY_AUTH_TOKEN_PATH names {str(path)!r}, which does not exist")
        _write_token(path)
    elif not chosen and path.stat().st_mode & 0o077:
        path.chmod(0o600)
        logger.info("the token file %s was readable by other users; its mode is now 600", path)
    if not path.read_text(encoding="utf-8").strip():
        raise PlacementError(f"the Ray token file {str(path)!r} is empty; remove it and try again")


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


def _own_cluster(environment: dict[str, str]) -> dict[str, Any]:
    """Prepare the environment for a cluster started by this process, and return the arguments of
    `ray.init`.
    """
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    keep_loopback_from_proxies()
    # Train asks the dashboard whether its controller lives. Untold, it asks the cluster that
    # somebody's `ray start` last left its address of, and takes the controller for dead. All
    # processes of such a cluster run on this machine.
    port = free_port()  # not Ray's own 8265, which a second script would want too
    environment["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
    logger.info("Ray starts in this process; its dashboard: http://127.0.0.1:%d", port)
    return {"include_dashboard": True, "dashboard_host": "127.0.0.1", "dashboard_port": port}


def keep_loopback_from_proxies() -> None:
    """Let this process and its children reach servers on this machine without a proxy."""
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in os.environ.get(name, "").split(",") if host]
        if "*" not in hosts:  # which counts only alone
            missing = [host for host in ("127.0.0.1", "localhost") if host not in hosts]
            os.environ[name] = ",".join(hosts + missing)


def free_port() -> int:
    """Find a TCP port that is free on this machine.

    Not one that the system would choose: before it is bound, seconds later, the system may give
    such a one to any connection.

    Raises:
        PlacementError: none was found.
    """
    # Below the ephemeral range and above Ray's worker ports (10002 to 19999).
    for candidate in random.SystemRandom().sample(range(20_000, 32_000), 50):
        with socket.socket() as opened, suppress(OSError):
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(("", candidate))
            return candidate
    raise PlacementError(
        "no free port was found in 20000 to 32000; stop processes that listen on these ports"
    )


def _filter_lines_of_workers() -> None:
    """Remove harmless lines from what Ray's workers print; Ray has no public way to do this."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def leave_out(batch: dict[str, Any]) -> None:
        batch["lines"] = without_harmless(batch["lines"])

    dispatcher.remove_handler(_QUIET_HOOK)
    dispatcher.add_handler(_QUIET_HOOK, leave_out)  # before Ray's own, which prints


class OnRay:
    """Runtime that does a run's work on a Ray cluster."""

    def __init__(self) -> None:
        from rayembed.data.engine.on_ray import execute_with_ray_data
        from rayembed.training.on_ray import (
            check_placement_now,
            check_ready,
            train_on_ray,
            worker_hardware,
        )

        self.start, self.execute = connect, execute_with_ray_data
        self.check_now, self.check = check_placement_now, check_ready
        self.hardware = worker_hardware
        self.train = train_on_ray

    def gpus(self, placement: "Settings") -> "SeenGpus":
        """List the usable GPUs of the cluster's live nodes; before a local cluster starts, of this
        machine.
        """
        import ray

        from rayembed.machine.gpu_check import usable_gpus_here
        from rayembed.machine.gpu_check_on_ray import cluster_gpus

        if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
            return usable_gpus_here()
        self.start()
        return cluster_gpus(placement)

    def precision(self, placement: "Placement | EvaluationPlacement") -> "Precision":
        """Number type that a worker's node (before a local cluster starts: this machine) computes
        fast.
        """
        import ray

        from rayembed.machine.hardware import auto_precision
        from rayembed.training.on_ray import worker_precision

        if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
            return auto_precision("cuda" if placement.on_gpu else "cpu")
        self.start()
        return worker_precision(placement)

    def is_here(self) -> bool:
        """Whether this machine is the cluster's only node."""
        import ray

        return len([node for node in ray.nodes() if node["Alive"]]) == 1

    def data_context(self, run: DataRun) -> "PipelineContext":
        """Make the context that runs data tasks on the whole cluster."""
        from rayembed.data.engine.on_ray import ray_pipeline_context

        return ray_pipeline_context(run)

    def export(
        self, export: Callable[..., None], run: Any, weights: str | None, folder: str
    ) -> None:
        """Call `export(run, weights, folder)` in a task on a node with room for a worker."""
        from rayembed.training.on_ray import export_on_ray

        export_on_ray(export, run, weights, folder)

    def pool(self, workers: "Workers") -> "Pool":
        """Make the pool of evaluation workers on the cluster."""
        from rayembed.evaluation.pooled.on_ray import run_jobs

        return partial(run_jobs, workers=workers)


def _no_ray(address: str, error: Exception) -> PlacementError:
    first = str(error).strip().partition("\n")[0]
    if address == "local":
        return PlacementError(
            f"Ray does not start on this machine: {first}. It may be too busy or short of memory: "
            "try again, or leave Ray out with one worker (placement.runtime=local)"
        )
    return PlacementError(
        f"there is no Ray cluster at RAY_ADDRESS={address}: {first}. Correct or unset RAY_ADDRESS, "
        "or start the cluster"
    )
