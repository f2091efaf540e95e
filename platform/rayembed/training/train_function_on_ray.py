"""Function that Ray Train runs in each worker, and the workers' environment variables.

Workers import this and not the driver's side: each of them waits for its imports.
"""

import logging
import os
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.collective

from rayembed.assets.atomic import is_full
from rayembed.assets.clients import is_unanswered
from rayembed.config.placement import Placement
from rayembed.data.plan.stream import prefetched
from rayembed.distributed.collectives import rank
from rayembed.errors import RayembedError, StorageError, StorageFullError
from rayembed.machine.device import (
    CUBLAS,
    CUBLAS_DETERMINISTIC,
    allocator_environment,
    deterministic,
)
from rayembed.machine.spinning import spin_environment
from rayembed.training.callbacks import Preemption
from rayembed.training.checkpoints.checkpoint import Checkpoint
from rayembed.training.checkpoints.checkpoint_list import checkpoint_name
from rayembed.training.checkpoints.uploads import Uploads
from rayembed.training.dropped import mean_of_finite
from rayembed.training.faults.hangs import SHARE, HangWatch
from rayembed.training.job import Job
from rayembed.training.trainer import Callback, StepRecord

LOG_LEVEL = "WARNING"
"""Log level of other libraries in Train's own processes."""

_ANSWER_SECONDS = 5.0


_NCCL_WATCH = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    "TORCH_NCCL_ENABLE_MONITORING": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_FR_DUMP_TEMP_FILE": f"{tempfile.gettempdir()}/rayembed-nccl-trace-",
}
"""Torch's watchdog over NCCL: a collective that times out ends its process (3: without a clean-up
that may hang itself), one that does not is ended by a heartbeat, and the last collectives of each
rank are written to a file of that name and the rank, for `torchfrtrace`."""


_COMPILE_THREADS = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
"""Processes with which each worker compiles; by itself each of a machine's workers takes up to 32,
of some 0.3 GB each."""


def worker_environment(placement: Placement) -> dict[str, str]:
    """Return the environment variables of the training workers, except for those that the user has
    set.
    """
    values = {
        "OMP_NUM_THREADS": str(placement.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    }
    values["DS_ACCELERATOR"] = "cuda" if placement.on_gpu else "cpu"
    unless_set = {**spin_environment(), **(_COMPILE_THREADS if placement.compile_layers else {})}
    if placement.on_gpu:
        unless_set = {**unless_set, **_NCCL_WATCH, **allocator_environment()}
        if placement.deterministic:
            unless_set[CUBLAS] = CUBLAS_DETERMINISTIC
    values |= {name: value for name, value in unless_set.items() if name not in os.environ}
    if not placement.on_gpu:
        # Steps allocate and free gigabytes: with jemalloc, which Ray's wheels for Linux bring, a
        # worker needs less memory than with glibc (benchmarks/log). Its pages must be allowed to
        # decay: kept for ever (dirty_decay_ms:-1) they grew to three times the need.
        jemalloc = Path(ray.__file__).parent / "core" / "libjemalloc.so"
        # Of a path with a space or a colon the loader would make several, and refuse each.
        is_one = not re.search(r"[\s:$]", str(jemalloc))
        if is_one and jemalloc.exists() and "LD_PRELOAD" not in os.environ:
            values["LD_PRELOAD"] = str(jemalloc)
    return values


def train_function(config: dict[str, Any]) -> None:
    """Train on this worker, from the job's last checkpoint if it has one.

    Args:
        config: `job`; `sink`, the `MetricsSink` actor; `offset`, the steps of earlier stages;
            `memory`, the folder of the stage's memory plan.

    Raises:
        RayembedError: what the job raises, or the storage of its checkpoints.
    """
    # As in the driver: Ray Train lets everybody's INFO through here, not only ours.
    logging.getLogger().setLevel(LOG_LEVEL)
    logging.getLogger("rayembed").setLevel(logging.INFO)
    try:
        _train(**config)
    except RayembedError:
        # The driver tells its message; Train would print a traceback from every worker besides.
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)
        raise


def _train(job: Job, sink: Any, offset: int, memory: str) -> None:
    placement = job.placement
    # A node that came after the driver had all fetch them does so now: this waits for it, where
    # the first collective of training has a time limit.
    job.fetch()
    ray.train.collective.barrier()
    checkpoint = ray.train.get_checkpoint()
    with ExitStack() as stack:
        uploads = stack.enter_context(Uploads())
        stops = Preemption(
            lambda: _must_stop(sink),
            every_minutes=placement.checkpoint_minutes,
            stored=uploads.wait,
        )
        limit = SHARE * placement.collective_timeout_seconds
        watch = stack.enter_context(HangWatch(limit, sink.where.remote))
        stack.enter_context(deterministic(placement.deterministic))
        nccl = _nccl_log(placement)
        report = TrainReport(sink, offset, uploads)
        trainer = job.trainer([watch, uploads, report, stops, *nccl], prefetched)
        if checkpoint is None:
            trainer.fit(memory=memory)
            return
        folder = Path(stack.enter_context(checkpoint.as_directory()))
        trainer.fit(Checkpoint(folder, trainer.position), memory=memory)


def _nccl_log(placement: Placement) -> list[Callback]:
    """Make worker 0's callback that logs which network NCCL uses, if workers are on several
    nodes.
    """
    if not placement.on_gpu or rank():
        return []
    context = ray.train.get_context()
    workers, here = context.get_world_size(), context.get_local_world_size()
    if workers == here and workers <= MOST_OF_NODE:
        return []
    file = log_nccl(tempfile.gettempdir())
    return [] if file is None else [TransportLog(file, workers, several_nodes=workers > here)]


class TrainReport(Callback):
    """Sends each step's metrics to the driver's actor, and each checkpoint to Ray Train from a
    background thread.

    Ray Train's own uploads beside a training end it from within, with a traceback of every worker;
    these end it as one of its own errors does.

    Args:
        sink: the `MetricsSink` actor.
        offset: steps of earlier stages.
        uploads: what stores checkpoints.
    """

    def __init__(self, sink: Any, offset: int, uploads: Uploads) -> None:
        self._sink, self._offset, self._uploads = sink, offset, uploads
        self._pending: list[Any] = []
        self._losses: list[float] = []

    def on_step_end(self, record: StepRecord) -> None:
        """Send a step's metrics to the driver's actor, from worker 0 only."""
        self._losses.append(record["loss"])
        if rank() == 0:
            self._pending.append(self._sink.append.remote(record, self._offset))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Start handing this worker's part of the checkpoint to Ray Train, which stores it."""
        pending, metrics = self._pending, {"step": step, "loss": mean_of_finite(self._losses)}
        self._pending, self._losses = [], []
        self._uploads.start(step, folder, lambda part: self._store(step, part, metrics, pending))

    def _store(self, step: int, part: Path, metrics: dict[str, float], pending: list[Any]) -> None:
        if pending:  # a step that a checkpoint counts as done must be in the log, and stay
            try:
                ray.get([*pending, self._sink.keep.remote()])
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
        try:
            ray.train.report(
                metrics,
                checkpoint=ray.train.Checkpoint.from_directory(str(part)),
                checkpoint_dir_name=checkpoint_name(step),
            )
        except OSError as error:
            raise _not_kept(step, error) from error
        self._sink.saved.remote(step, ray.train.get_context().get_world_size())


def _must_stop(sink: Any) -> bool:
    """Whether training must end now, because this worker's node will be removed or the run is
    stopped.

    Of a stop the first worker asks the actor, others never do.
    """
    if ray.train.get_preemption_info() is not None:
        return True
    if rank():
        return False
    try:
        return bool(ray.get(sink.stops.remote(), timeout=_ANSWER_SECONDS))
    except ray.exceptions.RayError:
        return False


def _not_kept(step: int, error: OSError) -> StorageError:
    """Make the error for a checkpoint that could not be stored."""
    if is_full(error):
        return StorageFullError(
            f"the checkpoint of step {step} does not fit into storage: {error}. Make room there, "
            "then submit the run again under the same name: it resumes from the last one."
        )
    silent = ", because the storage does not answer" if is_unanswered(error) else ""
    return StorageError(f"the checkpoint of step {step} cannot be stored{silent}: {error}")


logger = logging.getLogger(__name__)

MOST_OF_NODE = 8
"""Workers that one machine holds as a rule; more of them speak over a network."""

_TALKATIVE = {"INFO", "TRACE", "ABORT"}

_USING = re.compile(r"NCCL INFO Using network (\S.*?)\s*$", re.MULTILINE)
_CHANNEL = re.compile(r"\bvia NET/([^/\n]+)/\d+")
_ADDRESS = re.compile(r"NET/Socket : Using (.+?)\s*$", re.MULTILINE)


def log_nccl(folder: str) -> Path | None:
    """Make NCCL log the network that it chooses to a file of this process; return the
    file's path.

    Must be called before the first collective. None where the user has NCCL log already, to the
    worker's output or to a file of their own; rank 0's warnings go to the file as well.
    """
    if "NCCL_DEBUG_FILE" in os.environ or os.environ.get("NCCL_DEBUG", "") in _TALKATIVE:
        return None
    file = Path(folder) / f"rayembed-nccl-{os.getpid()}.log"
    os.environ["NCCL_DEBUG"] = "INFO"
    os.environ.setdefault("NCCL_DEBUG_SUBSYS", "INIT,NET")
    os.environ["NCCL_DEBUG_FILE"] = str(file)
    return file


def networks_in(text: str) -> list[str]:
    """Extract the networks that NCCL's log names, such as `Socket`, `IB` or `AWS
    Libfabric`.

    Those of channels between workers, else the one that it chose; empty where the log has neither.
    """
    return sorted(set(_CHANNEL.findall(text))) or sorted(set(_USING.findall(text)))


class TransportLog(Callback):
    """Logs after the first step which network NCCL uses between the workers; warns if it is
    TCP.

    Args:
        file: that NCCL writes to.
        workers: number of all workers.
        several_nodes: whether they are on more than one.
    """

    def __init__(self, file: Path, workers: int, *, several_nodes: bool) -> None:
        self._file, self._workers, self._several_nodes = file, workers, several_nodes
        self._is_done = False

    def on_step_end(self, record: StepRecord) -> None:
        """Read NCCL's log file once, after the first step."""
        if self._is_done:
            return
        self._is_done = True
        try:
            text = self._file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            logger.warning(
                "NCCL's choice of network is not known, because its log cannot be read: %s", error
            )
            return
        networks = networks_in(text)
        if "Socket" in networks and (self._several_nodes or self._workers > MOST_OF_NODE):
            addresses = ", ".join(dict.fromkeys(_ADDRESS.findall(text))) or "unknown interfaces"
            logger.warning(
                "NCCL sends data between %d workers over TCP (NET/Socket, %s), so training "
                "on several nodes may spend as much time on sending as on computing. If "
                "the nodes have a faster network (EFA, InfiniBand), its NCCL plugin is "
                "missing or memory cannot be locked; see docs/watching.md. NCCL's own log: "
                "%s",
                *(self._workers, addresses, self._file),
            )
        elif not networks and self._several_nodes:
            logger.warning(
                "NCCL's choice of network is not known: workers are on several nodes, but "
                "NCCL's log names no network (NCCL_DEBUG_SUBSYS must include INIT and "
                "NET). The log: %s",
                self._file,
            )
        else:
            named = ", ".join(f"NET/{name}" for name in networks) or "no network: within one node"
            logger.info("NCCL's transport: %s (%s)", named, self._file)
