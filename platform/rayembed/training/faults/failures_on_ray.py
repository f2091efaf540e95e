"""How Ray Train reacts to failed workers: when it retries, and which error ends a run."""

import logging
import re
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any

import ray
import ray.train
from ray.exceptions import RayActorError
from ray.train import UserCallback
from ray.train.torch import TorchConfig
from ray.train.v2._internal.exceptions import (
    InsufficientClusterResourcesError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)

from rayembed.config.placement import Placement
from rayembed.errors import PlacementError, RayembedError, WorkerError, may_pass
from rayembed.machine.gpu_check_on_ray import live_nodes
from rayembed.training.job import Job
from rayembed.training.memory.capacity import worker_resources, workers_that_fit

logger = logging.getLogger(__name__)

FAILED_STARTS = 3
"""Tolerated failed worker starts in a row; Ray has no limit by default."""

_NOT_STARTED = (
    InsufficientClusterResourcesError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
)

LOSSES_IN_A_ROW = 3
"""Tolerated node losses without notice and without a checkpoint between them, in an elastic run."""

_WITHOUT_LIMIT = -1

_NODE_DEATH_SECONDS = 90.0
"""Seconds in which Ray detects a lost node: at least five health checks of 10 s fail."""

_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.5

_REASON_CHARACTERS = 300

AGAIN = "Submit the run again under the same name to resume from its last checkpoint."


def failure_config(placement: Placement) -> Any:
    """Make Ray Train's retry limits; elastic runs count failures themselves (`LostNodes`,
    `ElasticPolicy`).

    Nodes that are taken away with notice never count.
    """
    if placement.is_elastic:
        return ray.train.FailureConfig(
            max_failures=_WITHOUT_LIMIT, controller_failure_limit=_WITHOUT_LIMIT
        )
    return ray.train.FailureConfig(
        max_failures=placement.max_failures, controller_failure_limit=FAILED_STARTS
    )


def failure_callbacks(job: Job) -> list[Any]:
    """Make the callbacks that Ray Train calls on a failure, before it decides on a retry."""
    if job.placement.is_elastic:
        return [OnWorkerErrors(), LostNodes(job.stage.name, job.placement)]
    return [OnWorkerErrors()]


class _Backend(TorchConfig().backend_cls):  # type: ignore[misc]  # Ray is not typed
    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        try:
            super().on_shutdown(worker_group, backend_config)
        except ray.exceptions.OutOfMemoryError as error:
            logger.debug("a worker ended before its process group was closed: %s", error)


class Torch(TorchConfig):  # type: ignore[misc]  # Ray is not typed
    """Ray Train's torch configuration, changed so that closing the process groups survives workers
    that Ray killed for memory. A worker that Ray killed because memory was full is like any other
    that died: Train's own end with such an error, when they are closed, and the run with them.
    """

    @property
    def backend_cls(self) -> type[Any]:
        """Class with which Ray Train opens and closes the process groups."""
        return _Backend


class OnWorkerErrors(UserCallback):  # type: ignore[misc]  # Ray is not typed
    """Ends a run at a rayembed error that a retry would only repeat; logs other errors, after which
    Ray Train retries.

    What a callback raises in Train's controller is never tried again.
    """

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Raise a rayembed error that a retry would repeat; otherwise log the first failure as a
        warning.
        """
        ours = _ours(worker_exceptions.values())
        if ours is not None:
            # Wrapped already, so that Train's controller does not print its own traceback.
            raise ray.train.ControllerError(ours)
        worker = _first(worker_exceptions)
        error = worker_exceptions[worker]
        died = isinstance(error, WorkerHealthCheckFailedError)
        logger.warning(
            "worker %d %s; all workers restart from the last checkpoint (at most "
            "placement.max_failures times). Cause: %s",
            *(worker, "died" if died else "failed", death(error) or reason(error)),
        )


class LostNodes(UserCallback):  # type: ignore[misc]  # Ray is not typed
    """Counts failures in an elastic run, where losing nodes is normal: lost nodes count only until
    the next checkpoint, failed workers always.

    A job that brings its nodes down, or trains too short a time on them, comes to an end so.

    Args:
        stage: what is trained, for the error.
        placement: of the run; nodes that cannot hold one of its workers are not among those lost.
    """

    def __init__(self, stage: str, placement: Placement) -> None:
        self._stage, self._placement = stage, placement
        self._max_failures = placement.max_failures
        self._failures = self._losses = 0
        self._gone = _gone()
        self._small = self._too_small()

    def after_report(self, run_context: Any, metrics: list[Any], checkpoint: Any) -> None:
        """Reset the count of node losses after a checkpoint."""
        self._losses, self._gone = 0, _gone()
        self._small |= self._too_small()

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Count the failure or node loss, and raise if a limit is exceeded."""
        before, self._gone = self._gone, await_lost_nodes()
        if any(map(_was_announced, worker_exceptions.values())):
            return
        lost = len(self._gone - before - self._small)
        if lost:
            self._losses += 1
            logger.warning("stage %s: number of lost nodes that had workers: %d", self._stage, lost)
        else:
            self._failures += 1
        if self._failures > self._max_failures:
            raise ray.train.ControllerError(
                _too_often(self._stage, self._max_failures, worker_exceptions)
            )
        if self._losses > LOSSES_IN_A_ROW:
            raise ray.train.ControllerError(_never_long_enough(self._stage, self._losses))

    def _too_small(self) -> set[str]:
        """Return the ids of live nodes that are too small for a worker; losing them does
        not count.

        Of a node that is gone Ray does not tell the resources any more.
        """
        return {
            node["NodeID"]
            for node in live_nodes()
            if not workers_that_fit(self._placement, [node["Resources"]])
        }


def await_lost_nodes() -> set[str]:
    """Wait until every node that Ray lists as live answers; return the ids of the nodes that were
    lost.

    A machine that goes without notice stays among Ray's live ones until its health checks have
    failed, 15 s after its process has ended; workers that are started meanwhile wait for it.
    """
    deadline = time.monotonic() + _NODE_DEATH_SECONDS
    while time.monotonic() < deadline:
        if all(map(_answers, live_nodes())):
            break
        time.sleep(_POLL_SECONDS)
    return _gone()


def _gone() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if not node["Alive"]}


def _answers(node: Mapping[str, Any]) -> bool:
    address = node["NodeManagerAddress"], node["NodeManagerPort"]
    try:
        with socket.create_connection(address, timeout=_ANSWER_SECONDS):
            return True
    except OSError:
        return False


def _was_announced(failure: Exception) -> bool:
    """Whether the worker failed because its node was drained, which Ray Train does not count as a
    failure.
    """
    failure = getattr(failure, "health_check_failure", failure)
    return isinstance(failure, RayActorError) and bool(failure.preempted)


def _ours(failures: Iterable[Any]) -> RayembedError | None:
    """Return the first rayembed error that a retry would only repeat, without Ray Train's wrapper;
    None if there is no such error.

    A storage that does not answer is like a worker that dies: the next try may fare better. One
    that is full stays so. A GPU's memory stays too small for a step unless the next start plans
    with less; outside steps another process may hold it, as a worker that died just now.
    """
    for failure in failures:
        error = _unwrapped(failure)
        if isinstance(error, RayembedError) and not may_pass(error):
            return error
    return None


def _first(failures: Mapping[int, Exception]) -> int:
    """Return the worker whose failure caused the others, which fail because they were waiting for
    it.
    """
    ours = [w for w, e in failures.items() if isinstance(_unwrapped(e), RayembedError)]
    died = [w for w, e in failures.items() if isinstance(e, WorkerHealthCheckFailedError)]
    return min(ours or died or failures)


def _unwrapped(failure: Any) -> Any:
    """Return the worker's own error, without Ray Train's wrapper."""
    return getattr(failure, "_base_exc", failure)


def death(error: Exception) -> str:
    """Describe which process died on which node and why, as far as Ray reports it, or that a worker
    does not answer; empty for other errors.
    """
    if isinstance(error, WorkerHealthCheckTimeoutError):
        return (
            "it did not answer for placement.collective_timeout_seconds: it was stopped, its "
            "machine is swapping, or its node is cut off"
        )
    text = str(getattr(error, "health_check_failure", error))
    process = re.search(r"^\s*pid: (\d+)", text, re.MULTILINE)
    node = re.search(r"^\s*ip: (\S+)", text, re.MULTILINE)
    if memory := killed_for_memory(text):
        return memory if process is None else f"process {process[1]}: {memory}"
    if process is None or node is None:
        return ""
    if "Worker unexpectedly exits" in text:
        why = (
            "SIGKILL, which the kernel's memory killer sends too (`dmesg` there tells the "
            "bytes), or a crash"
        )
    else:
        why = reason(error)
    return f"process {process[1]} on node {node[1]}: {why}"


def killed_for_memory(text: str) -> str:
    """Summarise Ray's report of a process that it killed because memory was full; empty for other
    deaths.
    """
    memory = re.search(r"\(IP: (\S+), ID: \S+\) was (\S+ used / \S+ limit)", text)
    if memory is None:
        return ""
    return f"Ray killed it because the memory of node {memory[1]} was full ({memory[2]})"


def reason(error: Exception) -> str:
    """Return the reason of an error in one line: a rayembed error's message, or the last line of
    other errors.
    """
    if isinstance(ours := _unwrapped(error), RayembedError):
        return " ".join(str(ours).split())
    return str(error).strip().rpartition("\n")[2][:_REASON_CHARACTERS]


def _told(failure: Any) -> str:
    """Return a rayembed error's message, or the whole text with traceback that Ray Train has of
    another error.
    """
    error = _unwrapped(failure)
    return str(error if isinstance(error, RayembedError) else failure)


def cause(error: Any, job: Job) -> RayembedError:
    """Return the rayembed error that ended the run, or a WorkerError or PlacementError that
    explains what ended it.
    """
    failures = getattr(error, "worker_failures", None) or {}
    controller = getattr(error, "controller_failure", None)
    ours = _ours([*failures.values(), controller])
    if ours is not None:
        return ours
    placement, stage = job.placement, job.stage.name
    if isinstance(controller, _NOT_STARTED):
        setting = "min_workers" if placement.is_elastic else "workers"
        return PlacementError(
            f"stage {stage!r}: {placement.fewest_workers} workers of {worker_resources(placement)} "
            "each could not be started, though the nodes are large enough; most likely other jobs "
            "hold their CPUs and GPUs, or nodes have gone. Free them (`ray status` shows what is "
            f"taken, `ray job stop` ends a job), lower placement.{setting}, or wait longer with "
            f"placement.wait_for_nodes_seconds. {AGAIN} Ray Train says: {controller}"
        )
    if not failures:
        return WorkerError(f"stage {stage!r}: Ray Train's controller failed: {error}. {AGAIN}")
    return _too_often(stage, placement.max_failures, failures)


def _too_often(stage: str, max_failures: int, failures: Mapping[int, Exception]) -> WorkerError:
    return WorkerError(
        f"stage {stage!r}: workers failed more often than placement.max_failures={max_failures} "
        f"allows; the first failure: {_told(failures[_first(failures)])}. {AGAIN}"
    )


def _never_long_enough(stage: str, losses: int) -> WorkerError:
    return WorkerError(
        f"stage {stage!r}: nodes were lost {losses} times with no checkpoint between them; `ray "
        "list nodes --filter state=DEAD` says why they went. If the job brings them down, lower "
        "placement.micro_batch_tokens or give them more memory; if they are taken away that often, "
        f"lower checkpoint_every_steps. {AGAIN}"
    )
