"""Ray as the pipeline meets it: a cluster to join as a run's runtime, or a job on one.

A job is submitted, followed to its end, and stopped when we are stopped. The same submission serves
a laptop and a cluster; `run_on_local_head` only adds a head where none runs. The head itself is in
`local_head`, which does not import Ray.
"""

import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from rayembed.config.credentials import check_address
from rayembed.config.data_run import DataRun
from rayembed.display.progress import doing
from rayembed.display.quiet import JOB, quiet, set_unset, without_harmless
from rayembed.errors import ConfigError, PlacementError, WorkerError
from rayembed.pipeline.job import work_begins
from rayembed.pipeline.run import local_head
from rayembed.pipeline.stopping import keep_hearing, without_hangups
from rayembed.registry.provenance import with_commit

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

_NO_AGENT = "No available agent"
"""Message of the Jobs server while it does not know the node that runs drivers yet."""

_AGENT_SECONDS = 120.0

_SILENCE = 60.0
"""Seconds after which the silence of a job's log is told. A job that waits says so every ten."""

_STOP_SECONDS = local_head.JOB_STOP_SECONDS + 15.0

Echo = Callable[[str], object]
"""Takes text as it comes, with its line ends."""

RUNTIME_ENV = "cluster/runtime_env.yaml"

_LOG_LEVEL = "WARNING"

_QUIET_HOOK = "rayembed.display.quiet.quiet"

# They list every ignored folder and the end of the log's connection between the job's own lines.
_TALKATIVE = (
    "ray._private.runtime_env.packaging",
    "ray._private.runtime_env.working_dir",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",
)


def connect() -> None:
    """Join the cluster that `RAY_ADDRESS` names, as it does within a job, or start one.

    Without it Ray would look for any cluster of this machine, and wait for one that has gone.
    """
    work_begins()
    address = os.environ.get("RAY_ADDRESS") or "local"
    check_address(address, "the environment variable RAY_ADDRESS")
    if address == "local":
        # Ray would make the token of such a cluster in a file that everybody here can read.
        local_head.ensure_token()
        if "ray" not in sys.modules:
            os.environ.setdefault(*local_head.LOOPBACK)
    import ray
    import ray.data

    from rayembed.machine.device import allocator_environment

    quiet()
    # Of the variables that a job's runtime environment names, Ray takes no second value.
    unset = set_unset(JOB)
    if not ray.is_initialized():
        unset |= set_unset(allocator_environment())
        started = local_head.own_cluster(unset) if address == "local" else {}
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


def _filter_lines_of_workers() -> None:
    """Leave out what Ray's workers write to no logger; Ray has no public way to."""
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def leave_out(batch: dict[str, Any]) -> None:
        batch["lines"] = without_harmless(batch["lines"])

    dispatcher.remove_handler(_QUIET_HOOK)
    dispatcher.add_handler(_QUIET_HOOK, leave_out)  # before Ray's own, which prints


class OnRay:
    """A Ray cluster as the place where a run is done; a `Runtime`."""

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
        """GPUs of the cluster's live nodes; a cluster that would only be started for the job is
        this machine.
        """
        import ray

        from rayembed.machine.gpu_check import usable_gpus_here
        from rayembed.machine.gpu_check_on_ray import cluster_gpus

        if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
            return usable_gpus_here()
        self.start()
        return cluster_gpus(placement)

    def precision(self, placement: "Placement | EvaluationPlacement") -> "Precision":
        """Number type that a worker computes fast, by its node; a cluster that would only be
        started for the job is this machine.
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
        """Context whose tasks the whole cluster runs."""
        from rayembed.data.engine.on_ray import ray_pipeline_context

        return ray_pipeline_context(run)

    def export(
        self, export: Callable[..., None], run: Any, weights: str | None, folder: str
    ) -> None:
        """Call `export(run, weights, folder)` in a task on a node with room for a worker."""
        from rayembed.training.on_ray import export_on_ray

        export_on_ray(export, run, weights, folder)

    def pool(self, workers: "Workers") -> "Pool":
        """Pool of workers on the cluster."""
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


def run_on_local_head(
    entrypoint: Sequence[str],
    *,
    checkout: Path,
    echo: Echo,
    runtime_env: str = RUNTIME_ENV,
    num_cpus: int | None = None,
) -> int:
    """The exit code of a job that ran on this machine; nothing that was started here stays.

    A Ray that already runs here is used and left running. Otherwise a head lives as long as the
    job, and Ctrl-C, SIGTERM and SIGHUP end both where the caller hears them (`hearing`).

    Args:
        entrypoint: the command, as its words; runs in a copy of the checkout.
        checkout: folder that is uploaded; the head's log lies in its `outputs/`.
        echo: receives messages and the job's log.
        runtime_env: YAML file of the job's environment, from the checkout.
        num_cpus: of a head that is started; None: all that Ray finds.

    Raises:
        PlacementError: no head could be started, or it takes no job.
    """
    work_begins()
    local_head.prepare_environment()
    token = local_head.ensure_token()
    address = local_head.find_head(token)
    if address is not None:
        echo(f"Ray already runs on this machine ({address}): it is used and left running.\n")
        return run_job(
            entrypoint, address=address, checkout=checkout, echo=echo, runtime_env=runtime_env
        )
    echo("No Ray runs on this machine: starting a head for this job...\n")
    log_file = checkout / "outputs" / "local-head.log"
    try:
        with local_head.head(log_file, token, num_cpus=num_cpus) as address:
            return run_job(
                entrypoint,
                address=address,
                checkout=checkout,
                echo=echo,
                runtime_env=runtime_env,
            )
    finally:
        echo("The Ray head that was started for this job is stopped.\n")


def run_job(
    entrypoint: Sequence[str],
    *,
    address: str,
    checkout: Path,
    echo: Echo,
    runtime_env: str = RUNTIME_ENV,
) -> int:
    """The exit code of a job on the cluster at `address`, after its log was echoed to the end.

    A job that is interrupted on this side is stopped on the cluster.

    Raises:
        PlacementError: the Jobs server does not take the job.
        WorkerError: the cluster went away while the job ran.
    """
    from ray.job_submission import JobSubmissionClient

    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    environment = read_runtime_env(checkout / runtime_env, checkout)
    entrypoint = with_commit(entrypoint, checkout / "platform" / "rayembed")
    command = submit_command(entrypoint, checkout, address=address, runtime_env=runtime_env)
    echo(f"Dashboard: {address}\nThe same by hand:\n  {command}\n")
    try:
        client = JobSubmissionClient(address)
        with doing("submitting the job"):
            job = _submit(client, shlex.join(entrypoint), environment)
    except (RuntimeError, OSError) as error:
        raise PlacementError(f"the Ray at {address} does not take the job: {error}") from error
    echo(f"Job {job} is submitted; its log follows.\n")
    try:
        return _follow(client, job, echo)
    except BaseException:
        _stop_job(client, job, echo)
        raise


def _submit(client: Any, entrypoint: str, environment: Mapping[str, Any]) -> str:
    """The id of the submitted job; waits for the agent of a head that has just started."""
    deadline = time.monotonic() + _AGENT_SECONDS
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env=dict(environment)))
        except RuntimeError as error:
            if _NO_AGENT not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(1.0)


def submit_command(
    entrypoint: Sequence[str], checkout: Path, *, address: str, runtime_env: str
) -> str:
    """The shell command that does what `run_job` does, from any folder.

    Ray takes the paths in a runtime environment from the folder in which it is called.
    """
    options = f"--address {address} --working-dir . --runtime-env {shlex.quote(runtime_env)}"
    submit = f"RAY_AUTH_MODE=token ray job submit {options} -- {shlex.join(entrypoint)}"
    return f"(cd {shlex.quote(str(checkout))} && {submit})"


def read_runtime_env(path: Path, checkout: Path) -> dict[str, Any]:
    """A job's runtime environment with the checkout as working directory, local paths absolute.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, or a module folder that is missing.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the runtime environment {str(path)!r}: {error}") from error
    if not isinstance(values, Mapping):
        raise ConfigError(f"the runtime environment {str(path)!r} must be a mapping")
    modules = []
    for module in values.get("py_modules", []):
        folder = str(module) if "://" in str(module) else str(checkout / module)
        if "://" not in folder and not Path(folder).is_dir():
            raise ConfigError(f"{str(path)!r} names the module folder {folder!r}, which is missing")
        modules.append(folder)
    return {**values, "py_modules": modules, "working_dir": str(checkout)}


def _follow(client: Any, job: str, echo: Echo) -> int:
    """Echo the job's log until its end; a broken log connection is taken up where it broke."""
    import aiohttp

    shown, heard = 0, time.monotonic()

    def silence() -> str:
        seconds = time.monotonic() - heard
        return f"waiting for the job, silent for {seconds:.0f} s" if seconds > _SILENCE else ""

    async def tail() -> None:
        nonlocal shown, heard
        position = 0
        async for text in client.tail_job_logs(job):
            # A new connection sends the log from its start.
            new = text[max(0, shown - position) :]
            position += len(text)
            shown = max(shown, position)
            if new:
                heard = time.monotonic()
                with doing(""):  # what a terminal shows of the silence makes room
                    echo(new)

    failures = 0
    with doing(silence):
        while True:
            try:
                asyncio.run(tail())
            except (RuntimeError, OSError, aiohttp.ClientError) as error:
                logger.warning("the job's log broke off (%s); reading on", error)
            try:
                info = client.get_job_info(job)
                failures = 0
            except (RuntimeError, OSError) as error:
                failures += 1
                if failures == 10:
                    raise WorkerError(
                        f"the Ray cluster does not answer any more, the end of job {job} is not "
                        f"known: {error}"
                    ) from error
            else:
                if info.status.is_terminal():
                    return _exit_code(info, echo)
            time.sleep(1.0)


def _exit_code(info: Any, echo: Echo) -> int:
    status = str(getattr(info.status, "value", info.status))
    code = info.driver_exit_code
    if status == "SUCCEEDED":
        return 0
    echo(f"The job ended with the status {status}: {info.message}\n")
    # A driver that a signal ended has a negative code.
    return int(code) if code is not None and 0 < code < 256 else 1


def _stop_job(client: Any, job: str, echo: Echo, *, timeout_seconds: float = _STOP_SECONDS) -> None:
    """Stop the job and wait for it; a cluster that no longer answers has no job to stop.

    A signal ends the wait.
    """
    try:
        with local_head.deferred_signals():
            if client.get_job_status(job).is_terminal():
                return
            echo(f"\nStopping job {job}, which may make a checkpoint first...\n")
            client.stop_job(job)
        deadline = time.monotonic() + timeout_seconds
        with doing("waiting for the job to stop"):
            while not client.get_job_status(job).is_terminal():
                if time.monotonic() > deadline:
                    logger.warning("job %s did not stop in %s s", job, timeout_seconds)
                    return
                time.sleep(0.5)
    except (RuntimeError, OSError) as error:
        logger.warning("job %s could not be stopped: %s", job, error)
