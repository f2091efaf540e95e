"""Stop of a training whose driver is interrupted: a checkpoint first, if time permits.

Ray Train would end its workers where they are, and takes SIGINT for itself to do so.
"""

import logging
import time
from typing import Any

import ray
from ray.train.torch import TorchTrainer

from rayembed.distributed.collectives import rank

logger = logging.getLogger(__name__)

SAVE_SECONDS = 30.0
"""Maximum seconds for a checkpoint after the stop, including the step in progress."""

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.2


class StoppableTrainer(TorchTrainer):  # type: ignore[misc]  # Ray is not typed
    """Ray Train trainer that leaves SIGINT to its caller."""

    _controller: Any = None

    def _register_sigint_handler(self, controller: Any) -> None:
        self._controller = controller

    def end(self) -> None:
        """End the controller and its workers; does nothing if it is gone."""
        if self._controller is not None:
            ray.kill(self._controller)


def is_stopped(sink: Any) -> bool:
    """Whether this worker knows of a stop: the first worker asks the actor, others never do."""
    if rank():
        return False
    try:
        return bool(ray.get(sink.stops.remote(), timeout=_ANSWER_SECONDS))
    except ray.exceptions.RayError:
        return False


def end_with_checkpoint(trainer: StoppableTrainer, sink: Any, stage: str) -> None:
    """End the workers, after a checkpoint if they can make one in time.

    Args:
        sink: an actor that is a `StopState`.
    """
    try:
        _await_checkpoint(sink, stage)
    except ray.exceptions.RayError:
        logger.warning(
            "stage %s: no checkpoint can be made, because Ray's own processes do not answer or "
            "were stopped too; it goes on from the one before",
            stage,
        )
    finally:
        trainer.end()


def _await_checkpoint(sink: Any, stage: str) -> None:
    if not ray.get(sink.stop.remote(), timeout=_ANSWER_SECONDS):
        return
    logger.info("stage %s: a checkpoint is made before the end, in up to %g s", stage, SAVE_SECONDS)
    deadline = time.monotonic() + SAVE_SECONDS
    while time.monotonic() < deadline:
        step = ray.get(sink.saved_step.remote(), timeout=_ANSWER_SECONDS)
        if step:
            logger.info("stage %s: the checkpoint of step %d is made", stage, step)
            return
        time.sleep(_POLL_SECONDS)
    logger.warning("stage %s: no checkpoint was made in %g s", stage, SAVE_SECONDS)
