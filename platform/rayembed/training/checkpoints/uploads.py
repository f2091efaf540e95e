"""Upload checkpoints in the background while training continues. Knows no Ray."""

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rayembed.training.trainer import Callback, StepRecord

logger = logging.getLogger(__name__)

_WORTH_TELLING_SECONDS = 5.0
"""Least seconds that a training which waited for an upload tells of."""


_AFTER_AN_ERROR_SECONDS = 120.0
"""Most seconds that an upload is waited for when training ended with an error."""


class Uploads(Callback):
    """Uploads this worker's part of each checkpoint in a thread, one at a time.

    A checkpoint is complete on the local disk before its upload begins, so training may change
    weights meanwhile; it counts when all of it is stored, and until then the one before does. At
    the end of a `with` block nothing is on its way any more, except after another error an upload
    that takes minutes: the other workers may have gone, without whom it does not end.

    As a callback it raises what an upload raised after the next step, and waits for the last one
    before the next checkpoint and at the end.

    Raises:
        Exception: at the end of the block without another error, what an upload raised.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._step = 0
        self._error: BaseException | None = None

    def __enter__(self) -> "Uploads":
        return self

    def __exit__(self, _: object, value: BaseException | None, *__: object) -> None:
        if value is None:
            self.wait()
            return
        # What is whole on the disk is worth keeping, whatever ended the training.
        self._join(_AFTER_AN_ERROR_SECONDS)
        if self._error not in (None, value):
            logger.warning("the checkpoint of step %d is not stored: %s", self._step, self._error)

    def start(self, step: int, folder: Path, store: Callable[[Path], None]) -> None:
        """Move the folder aside and upload it in a thread, after the previous upload has ended.

        Raises:
            Exception: what the upload before raised.
        """
        self.wait()
        own = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=folder.parent))
        part = folder.rename(own / folder.name)

        def upload() -> None:
            try:
                store(part)
            except BaseException as error:  # noqa: BLE001  raised by `wait` in the training's thread
                self._error = error
            finally:
                shutil.rmtree(own, ignore_errors=True)

        self._step = step
        self._thread = threading.Thread(target=upload, name=f"upload of step {step}", daemon=True)
        self._thread.start()

    def on_step_end(self, record: StepRecord) -> None:
        """Raise the error of a failed upload; otherwise return at once."""
        if self._error is not None:
            raise self._error

    def before_checkpoint(self) -> None:
        """Wait for the last upload, so that the disk has room for the new checkpoint."""
        self.wait()

    def on_train_end(self) -> None:
        """Wait for the last upload, because a stage ends only when its checkpoints are in
        storage.
        """
        self.wait()

    def wait(self) -> None:
        """Wait until no upload is in progress.

        Raises:
            Exception: what the upload raised.
        """
        began = time.monotonic()
        self._join()
        seconds = time.monotonic() - began
        if seconds > _WORTH_TELLING_SECONDS:
            logger.info(
                "training has waited %.0f s for the upload of the checkpoint of step %d",
                *(seconds, self._step),
            )
        if self._error is not None:
            raise self._error

    def _join(self, timeout: float | None = None) -> None:
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None
