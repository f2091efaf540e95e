"""Train a stage in this process, without Ray, with checkpoints from which Ray Train can
resume.

The same trainer, callbacks and files as of a worker on Ray, so a run may change between the two.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from rayembed.assets.storage import join, upload_folder
from rayembed.config.placement import Placement
from rayembed.config.run import Run
from rayembed.data.plan.stream import prefetched
from rayembed.distributed.random_state import capture, restore
from rayembed.errors import DeviceMemoryError, PlacementError, RayembedError
from rayembed.machine.allocator import freed_memory_kept
from rayembed.machine.device import deterministic
from rayembed.machine.hardware import release_memory
from rayembed.training.callbacks import Preemption
from rayembed.training.checkpoints.checkpoint import Checkpoint, checkpoint_on_disk
from rayembed.training.checkpoints.checkpoint_list import (
    CHECKPOINTS,
    checkpoint_name,
    list_newest,
    listed_checkpoints,
    repair_checkpoint_list,
)
from rayembed.training.checkpoints.uploads import Uploads
from rayembed.training.job import Job
from rayembed.training.memory.capacity import validation_resources
from rayembed.training.metrics_sink import MetricsSink
from rayembed.training.progress import Progress
from rayembed.training.trainer import Callback, StepRecord
from rayembed.training.validation.folder import ValidationFolder
from rayembed.training.validation.scoring import Validation, ValidationScoring

logger = logging.getLogger(__name__)

_ACCELERATOR = "deepspeed.accelerator.real_accelerator"
"""DeepSpeed's module that keeps the device; looked at where it is imported, and never imported."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_Handler = Callable[[int, FrameType | None], object]


def train_here(
    job: Job,
    folder: str,
    metrics_log: Path,
    offset: int,
    *,
    metrics_place: str | None = None,
    validation: Validation | None = None,
) -> None:
    """Train in this process until the job's weights are in storage; do nothing if they are there
    already.

    An interrupt (SIGINT, SIGTERM, SIGHUP) is answered after the step in progress, with a
    checkpoint.

    Args:
        folder: the stage's folder in storage, for checkpoints.
        metrics_log: file on this machine that gets a line a step.
        offset: steps of the stages before.
        metrics_place: where the log is copied to with each checkpoint; None: nowhere.
        validation: how weights are scored when `job.validated_in` is set.

    Raises:
        RayembedError: what is wrong and what to do.
        KeyboardInterrupt: the training was interrupted.
    """
    if job.is_done():
        logger.info("stage %s is done; its weights: %s", job.stage.name, job.weights)
        return
    scored = None
    if job.validated_in is not None:
        assert validation is not None
        scored = ValidationHere(job.run, job.number, job.validated_in, validation)
    job.fetch()
    checkpoints = join(folder, CHECKPOINTS)
    repair_checkpoint_list(checkpoints)
    sink = MetricsSink(str(metrics_log), metrics_place)
    with (
        Progress(job.stage, metrics_log),
        _one_worker(job.placement),
        _Interrupts() as stops,
        Uploads() as uploads,
    ):

        def callbacks() -> list[Callback]:
            keep, minutes = job.placement.keep_checkpoints, job.placement.checkpoint_minutes
            timed = Preemption(
                lambda: stops.interrupt is not None, look_seconds=0.0, every_minutes=minutes
            )
            kept = _Kept(sink, offset, checkpoints, keep, stops, uploads)
            return [timed, uploads, kept, *([] if scored is None else [scored])]

        release_memory()  # what was scored before, whose memory is measured else
        for starts_left in reversed(range(job.placement.max_failures + 1)):
            try:
                _fit(job, checkpoints, callbacks())
                break
            except DeviceMemoryError as error:
                if not (error.may_pass and starts_left):
                    raise
                logger.warning("%s The stage resumes from its last checkpoint.", str(error))
            finally:
                # Weights and optimiser states, before the next thing needs room: out of the except
                # block nothing holds the frames of the step that failed.
                release_memory()
            uploads.wait()
    if scored is not None:
        scored.finish(job.weights)


def _fit(job: Job, checkpoints: str, callbacks: Sequence[Callback]) -> None:
    """Train to the end, from the newest checkpoint if one exists, otherwise from the first step."""
    names = listed_checkpoints(checkpoints)
    with closing(job.trainer(callbacks, prefetched)) as trainer:
        if names:
            with checkpoint_on_disk(join(checkpoints, names[-1])) as place:
                trainer.fit(Checkpoint(place, trainer.position), memory=checkpoints)
        else:
            trainer.fit(memory=checkpoints)


class _Interrupts:
    """Catches the first interrupt inside the block, and keeps it to be raised once a checkpoint is
    made.

    The handler that was there before tells the user, and decides about a second one. What it
    raises to end the program, SystemExit for instance, is an interrupt; if it raises nothing, the
    signal is none.
    """

    def __init__(self) -> None:
        self.interrupt: BaseException | None = None
        """What the handler raised."""
        self._former: dict[int, _Handler] = {}

    def __enter__(self) -> "_Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._former[number] = handler
                    signal.signal(number, self._around(handler))
        elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            logger.info(
                "SIGTERM would end this training at once, without a checkpoint, because "
                "Python handles signals in the main thread only. Train in the main thread, "
                "or set placement.checkpoint_minutes to limit the loss"
            )
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _around(self, handler: _Handler) -> _Handler:
        def hear(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as interrupt:  # raised after a checkpoint
                if self.interrupt is not None:
                    raise
                self.interrupt = interrupt

        return hear


class _Kept(Callback):
    """Writes steps to the run's log and checkpoints to storage; ends an interrupted training once
    its checkpoint is stored.
    """

    def __init__(
        self,
        sink: MetricsSink,
        offset: int,
        folder: str,
        keep: int,
        stops: _Interrupts,
        uploads: Uploads,
    ) -> None:
        self._sink, self._offset, self._folder, self._keep = sink, offset, folder, keep
        self._stops, self._uploads = stops, uploads

    def on_step_end(self, record: StepRecord) -> None:
        """Append the step's metrics to the log."""
        self._sink.append(record, self._offset)

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Start storing the checkpoint and removing older ones; raise the interrupt if there was
        one.

        Raises:
            StorageError: the storage does not take the log, or the checkpoint of an interrupted
                training.
            BaseException: the training was interrupted; KeyboardInterrupt, or what the program's
                own handler raises.
        """
        self._sink.keep()  # the log has the steps that the checkpoint counts as done
        self._uploads.start(step, folder, lambda part: self._store(step, part))
        if self._stops.interrupt is not None:
            self._uploads.wait()
            logger.info("the checkpoint of step %d is made", step)
            raise self._stops.interrupt

    def _store(self, step: int, part: Path) -> None:
        upload_folder(part, join(self._folder, checkpoint_name(step)))
        list_newest(self._folder, self._keep)


class ValidationHere(Callback):
    """Scores weights between two training steps, without changing the training's random
    state.

    Args:
        number: of the stage in its run.
        stage_folder: in storage, where weights to score are left.
    """

    def __init__(self, run: Run, number: int, stage_folder: str, validation: Validation) -> None:
        self._run, self._validation = run, validation
        self._folder = ValidationFolder(stage_folder)
        self._scoring = ValidationScoring.of(run, number, self._folder, validation)

    def should_stop(self, step: int) -> bool:
        """Score the submitted weights of earlier steps; return False, as another callback decides
        on early stopping.
        """
        self._score()
        return False

    def finish(self, target: str) -> int:
        """Finish scoring, and move the chosen step's weights to `target`; return the step.

        Raises:
            ArtifactError: the storage refuses what it must do.
        """
        self._scoring.training_is_done()
        self._score()
        return self._scoring.promote(target)

    def _score(self) -> None:
        state = capture()
        try:
            for step in self._scoring.due(()):
                self._score_step(step)
        finally:
            restore(state)
        self._scoring.tidy()

    def _score_step(self, step: int) -> None:
        content, began = self._folder.content(step), time.monotonic()
        device = "cuda" if validation_resources(self._run.placement).get("GPU") else "cpu"
        try:
            scores = self._validation.score(self._run, self._folder.weights(step), device)
        except RayembedError as error:
            problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            self._scoring.failed(step, content, problem, time.monotonic() - began)
        else:
            self._scoring.scored(step, content, scores, time.monotonic() - began)


def take_device(device: str) -> None:
    """Prepare this process for training on `cuda` or `cpu`; raise if it has already trained on the
    other one.

    DeepSpeed fixes its device when it is imported, and a process group its backend when it is made.

    Raises:
        PlacementError: this process has trained on the other device, or has a process group for it.
    """
    accelerator = getattr(sys.modules.get(_ACCELERATOR), "ds_accelerator", None)
    taken = None if accelerator is None else str(accelerator.device_name()).partition(":")[0]
    if taken not in (None, device):
        raise PlacementError(_other_device(device, f"DeepSpeed computes on {taken!r} in it"))
    if dist.is_initialized():
        backend = dict(part.split(":") for part in dist.get_backend_config().split(","))
        # gloo takes tensors of GPUs as well, but not in all collectives of a training.
        if backend.get(device) is None or (device == "cuda" and backend[device] != "nccl"):
            made = f"its torch.distributed group uses the backend {dist.get_backend()!r}"
            raise PlacementError(_other_device(device, made))
    # Read when DeepSpeed is imported, which would warn of a guess.
    os.environ["DS_ACCELERATOR"] = device


def _other_device(device: str, why: str) -> str:
    asked, other = ("true", "false") if device == "cuda" else ("false", "true")
    return (
        f"placement.use_gpu={asked} trains on {device!r}, but this process is set to the other "
        f"device by what ran in it before: {why}. Start a new process (in a notebook: restart the "
        f"kernel) and train there, or keep placement.use_gpu={other}"
    )


@contextmanager
def _one_worker(placement: Placement) -> Iterator[None]:
    """Make this process the only worker, with a process group of size one for DeepSpeed.

    Raises:
        PlacementError: the process is one of several workers already.
    """
    take_device("cuda" if placement.on_gpu else "cpu")
    if not dist.is_initialized():
        backend = "nccl" if placement.on_gpu else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        shown = sys.excepthook
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        sys.excepthook = shown  # torch's puts a rank before every line of a traceback
        # It stays for later stages, as DeepSpeed keeps it.
        atexit.register(dist.destroy_process_group)
    if dist.get_world_size() != 1:
        raise PlacementError(
            f"this process is one of {dist.get_world_size()} of a torch.distributed group, "
            "but placement.runtime=local trains in a single process; start the training "
            "outside of such a group, or set placement.workers to let rayembed start the "
            "workers"
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(placement.threads)
    before = dict(os.environ)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed asks for it
    try:
        with deterministic(placement.deterministic), freed_memory_kept():
            yield
    finally:
        torch.set_num_threads(threads)
        # Whatever else trains in this process or is started by it would take itself for a worker.
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
