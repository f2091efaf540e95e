"""Ray Train trainers that make a checkpoint when they are stopped, and elastic ones whose number of
workers follows the cluster.

When its driver is interrupted Ray Train would end its workers where they are, and takes SIGINT for
itself to do so. Elasticity leans on Ray Train's own policy, which is no public interface:
pyproject.toml fixes Ray's version, and tests/ray/test_train_on_ray.py tells when another one
differs.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.exceptions import InsufficientClusterResourcesError
from ray.train.v2._internal.execution.controller.state import ReschedulingState, RunningState
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
)

from rayembed.config.optimizer import TrainLoopConfig
from rayembed.config.placement import Placement, worker_numbers
from rayembed.training.faults.failures_on_ray import FAILED_STARTS
from rayembed.training.job import Job
from rayembed.training.memory.capacity import Node, most_workers, workers_that_fit

logger = logging.getLogger(__name__)

START_SECONDS = 30
"""Seconds a worker start may wait for resources that were free when it was scheduled."""

_FEWEST_SECONDS = 240.0
"""Minimum seconds that a run waits for resources for its fewest workers; the same as the time in
which a fixed-size run tries to start them."""

SAVE_SECONDS = 30.0
"""Maximum seconds for a checkpoint after the stop, including the step in progress."""

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 1.0
_SAVE_POLL_SECONDS = 0.2


def free_nodes() -> list[Node]:
    """Return the unused resources of each live node that is not draining."""
    found, leaving = ray._private.state.available_resources_per_node(), leaving_nodes()
    return [dict(resources) for node, resources in found.items() if node not in leaving]


def leaving_nodes() -> set[str]:
    """Return the ids of draining nodes, on which Ray starts no new work."""
    return set(ray._private.state.state.get_draining_nodes())


class StoppableTrainer(TorchTrainer):  # type: ignore[misc]  # Ray is not typed
    """Ray Train trainer that does not handle Ctrl-C (SIGINT) itself, so that its caller can make a
    checkpoint first.
    """

    _controller: Any = None

    def _register_sigint_handler(self, controller: Any) -> None:
        self._controller = controller

    def end(self) -> None:
        """Kill Ray Train's controller, which ends its workers; do nothing if it has ended
        already.
        """
        if self._controller is not None:
            ray.kill(self._controller)


def end_with_checkpoint(trainer: StoppableTrainer, sink: Any, stage: str) -> None:
    """Make the workers write a checkpoint, if they can in time, and then stop them.

    Args:
        sink: the `MetricsSink` actor.
    """
    try:
        _await_checkpoint(sink, stage)
    except ray.exceptions.RayError:
        logger.warning(
            "stage %s: no checkpoint can be made, because Ray's own processes do not "
            "answer or were stopped too; the stage will resume from the previous checkpoint",
            stage,
        )
    finally:
        trainer.end()


def _await_checkpoint(sink: Any, stage: str) -> None:
    if not ray.get(sink.stop.remote(), timeout=_ANSWER_SECONDS):
        return
    logger.info(
        "stage %s: stopping; waiting up to %g s until workers have written a checkpoint",
        stage,
        SAVE_SECONDS,
    )
    deadline = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < deadline:
        step = ray.get(sink.saved_step.remote(), timeout=_ANSWER_SECONDS)
        if step:
            logger.info("stage %s: the checkpoint of step %d is made", stage, step)
            return
        time.sleep(_SAVE_POLL_SECONDS)
    logger.warning(
        "stage %s: stopped without a new checkpoint, because workers wrote none within %g s",
        stage,
        SAVE_SECONDS,
    )


class ElasticTrainer(StoppableTrainer):
    """Ray Train trainer whose number of workers `ElasticPolicy` chooses while it runs."""

    def __init__(self, train: Callable[..., None], *, job: Job, **settings: Any) -> None:
        super().__init__(train, **settings)
        self._job = job

    def _initialize_and_run_controller(self, **arguments: Any) -> Any:
        arguments["scaling_policy"] = ElasticPolicy(
            self.scaling_config, self._job.placement, self._job.stage
        )
        return super()._initialize_and_run_controller(**arguments)


class ElasticPolicy(ElasticScalingPolicy):  # type: ignore[misc]  # Ray is not typed
    """Variant of Ray Train's elastic scaling policy: adds workers only after a checkpoint, and
    gives up after repeated failed starts.

    - Of the numbers of workers only those are taken that share a global batch equally.
    - More workers are taken just after a checkpoint, so that hardly a step is done twice.
    - CPUs and GPUs that other jobs hold are no room. Ray's own policy counts them: it would end
      workers that are at work, and then find no place for more.
    - Nodes that have gone, or are announced to go, count no more at once: not up to 20 s later.
    - Waiting for room for the fewest workers comes to an end, as do starts that fail one after the
      other; how many fail in a long run with many changes does not matter.

    An object of it lives in Train's controller.
    """

    def __init__(
        self, scaling_config: Any, placement: Placement, loop_config: TrainLoopConfig
    ) -> None:
        super().__init__(scaling_config)
        self._placement = placement
        self._numbers = worker_numbers(
            loop_config.global_rows, placement.fewest_workers, placement.workers
        )
        self._steps = loop_config.steps
        self._held: int | None = None
        """Workers whose CPUs and GPUs the run holds now; None if unknown."""
        self._failed_starts = 0
        self._waits_since: float | None = None
        self._group: float | None = None
        self._reports: list[int] = []

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> Any:
        """Add workers if resources for more are free and a checkpoint was just made."""
        self._held = worker_group_state.num_workers
        if not self._has_saved(worker_group_state, worker_group_status):
            self._maybe_send_resource_request()
            return NoopDecision()
        decision = super().make_decision_for_running_worker_group(
            worker_group_state, worker_group_status
        )
        grows = isinstance(decision, ResizeDecision) and decision.num_workers > self._held
        return decision if grows else NoopDecision()

    def make_decision_for_non_running_worker_group(self) -> Any:
        """Start as many workers as free resources allow, or wait for nodes.

        Raises:
            ControllerError: there was none for too long.
        """
        # What a start that failed had was given back. Workers that died may still have theirs: then
        # the nodes count, not what is free on them.
        self._held = 0 if self._failed_starts else None
        if self._failed_starts > FAILED_STARTS:
            raise _no_room(f"workers failed to start {self._failed_starts} times in a row")
        decision = super().make_decision_for_non_running_worker_group()
        if isinstance(decision, ResizeDecision):
            self._waits_since = None
        else:
            self._wait()
        return decision

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        """Count how many times in a row starting the workers failed."""
        if isinstance(current_state, RunningState):
            self._failed_starts = 0
        elif isinstance(current_state, ReschedulingState):
            self._failed_starts += not isinstance(previous_state, ReschedulingState)

    def _count_possible_workers(self, reserved_resources: dict[str, Node]) -> int:
        leaving = leaving_nodes()
        staying = [has for node, has in reserved_resources.items() if node not in leaving]
        room = workers_that_fit(self._placement, staying)
        if self._held is not None:
            room = min(room, self._held + workers_that_fit(self._placement, free_nodes()))
        return most_workers(self._numbers, room)

    def _get_reserved_resources(self) -> dict[str, Node] | None:
        """Return the resources that Ray's autoscaling coordinator has reserved for this run on each
        node; None if it does not answer.
        """
        asked = self._autoscaling_coordinator.get_reserved_resources.remote(
            self._requester_id, recompute=True
        )
        try:
            answer: dict[str, Node] = ray.get(asked, timeout=_ANSWER_SECONDS)
        except ray.exceptions.RayError as error:
            logger.warning(
                "Ray's autoscaling coordinator does not say which resources it has "
                "reserved for this run: %s",
                error,
            )
            return None
        return answer

    def _has_saved(self, group: Any, status: Any) -> bool:
        """Whether all workers have now reported a further checkpoint, and the stage has
        steps left.
        """
        if group.start_time != self._group:
            self._group, self._reports = group.start_time, [0] * group.num_workers
        before = min(self._reports)
        reports = {rank: worker.training_report for rank, worker in status.worker_statuses.items()}
        for rank, report in reports.items():
            self._reports[rank] += report is not None
        told = [report.metrics["step"] for report in reports.values() if report is not None]
        return min(self._reports) > before and max(told) < self._steps

    def _wait(self) -> None:
        seconds = max(_FEWEST_SECONDS, self._placement.wait_for_nodes_seconds)
        now = time.monotonic()
        if self._waits_since is None:
            self._waits_since = now
            logger.warning(
                "the cluster has no room for placement.min_workers=%d workers: waiting for "
                "nodes, up to %g s",
                *(self._placement.fewest_workers, seconds),
            )
        if now - self._waits_since > seconds:
            raise _no_room(
                f"no room for {self._placement.fewest_workers} workers within {seconds:g} s"
            )
        time.sleep(_POLL_SECONDS)  # Train's controller asks again at once


def _no_room(why: str) -> Exception:
    # Wrapped already, so that Train's controller does not print its own traceback.
    error: Exception = ray.train.ControllerError(InsufficientClusterResourcesError(why))
    return error
