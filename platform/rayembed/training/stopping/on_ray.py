"""The end of a training whose driver is interrupted: a checkpoint first, if there is time.

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
"""That a checkpoint may take from the stop on, with the step that is under way."""

_ANSWER_SECONDS = 5.0
_POLL_SECONDS = 0.2


class StoppableTrainer(TorchTrainer):  # type: ignore[misc]  # Ray is not typed
    """Ray Train's trainer, which leaves SIGINT to whoever runs it."""

    _controller: Any = None

    def _register_sigint_handler(self, controller: Any) -> None:
        self._controller = controller

    def end(self) -> None:
        """End the controller, with which its workers go; nothing where it is not there."""
        if self._controller is not None:
            ray.kill(self._controller)


def is_stopped(sink: Any) -> bool:
    """Whether this worker knows of a stop: the first one asks the actor, the others do not."""
    if rank():
        return False
    try:
        return bool(ray.get(sink.stops.remote(), timeout=_ANSWER_SECONDS))
    except ray.exceptions.RayError:
        return False


def end_with_checkpoint(trainer: StoppableTrainer, sink: Any, stage: str) -> None:
    """Return when the workers are ended, after a checkpoint of theirs if they can make one in time.

    Args:
        sink: an actor that is a `Saving`.
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
