"""Where a run's parts lie, locked while one job works on it."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from rayembed.assets.cache import cache_folder
from rayembed.assets.storage import check_writable, is_remote, join
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.adaptation import AnyRun
from rayembed.errors import ArtifactError
from rayembed.registry.metrics_log import METRICS_FILE
from rayembed.registry.tracking import Status

logger = logging.getLogger(__name__)


@dataclass
class RunFolders:
    """Where a run's parts lie: `storage` for every node, `local` on the driver's machine.

    They are one folder when storage is on disk. With object storage `local` has the small files
    that are appended to, and `files` carries them there and back.
    """

    files: StoredFolder

    @property
    def storage(self) -> str:
        """The run's folder or prefix."""
        return self.files.place

    @property
    def local(self) -> Path:
        """The folder of its small files on this machine."""
        return self.files.local

    @property
    def results(self) -> str:
        """Of its evaluation."""
        return join(self.storage, "evaluation")

    @property
    def metrics(self) -> str | None:
        """Where the metrics log is copied to; None: it lies there."""
        remote = is_remote(self.storage)
        return join(self.storage, METRICS_FILE) if remote else None

    def stage(self, name: str) -> str:
        """Of a stage's checkpoints and weights."""
        return join(self.storage, name)

    def weights(self, name: str) -> str:
        """Of a stage's trained weights."""
        return join(self.storage, name, "weights.safetensors")

    def model(self, name: str) -> str:
        """Of a stage's exported model."""
        return join(self.storage, "models", name)

    def keep_at_the_end(self, status: Status) -> None:
        """Copy the small files to storage; what made the run fail stays the error that is told."""
        try:
            self.files.keep()
        except ArtifactError as error:
            if status == "FINISHED":
                raise
            logger.warning("%s", error)


@contextmanager
def locked_folders(run: AnyRun, *, wait: bool = False) -> Iterator[RunFolders]:
    """The run's folders, which no other job has meanwhile, with what storage has of its files.

    Args:
        wait: for the job that has them, instead of refusing.

    Raises:
        PlacementError: the storage cannot be written.
        ArtifactError: another job has them right now.
    """
    folders = _folders(run)
    folders.local.parent.mkdir(parents=True, exist_ok=True)
    # Not of one thread: the trials of a sweep are threads of one process.
    lock = FileLock(f"{folders.local}.lock", thread_local=False)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise ArtifactError(
            f"another job trains the run {run.name!r} in {str(folders.local)!r} right now; wait "
            "for it, stop it (`ray job stop`), or give this run another --name"
        ) from None
    try:
        folders.files.fetch()
        yield folders
    finally:
        lock.release()


def fetched_folder(run: AnyRun) -> Path:
    """Where the run's small files lie on this machine, with what storage has of them.

    Raises:
        ArtifactError: the storage cannot be read.
    """
    folders = _folders(run)
    folders.files.fetch()
    return folders.local


def _folders(run: AnyRun) -> RunFolders:
    """The run's folders, after the storage was found writable."""
    storage = run.placement.storage_path
    check_writable(storage)
    place = join(storage, "runs", run.name)
    if not is_remote(storage):
        return RunFolders(StoredFolder(place, Path(place)))
    key = hashlib.sha256(place.encode()).hexdigest()[:12]
    return RunFolders(StoredFolder(place, cache_folder() / "runs" / f"{run.name}-{key}"))
