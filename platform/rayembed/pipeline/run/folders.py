"""Folders of a run, locked and leased so that only one job works on them."""

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from rayembed.assets.cache import cache_folder
from rayembed.assets.lease import ADVICE, Lease, holder, refused, this_machine
from rayembed.assets.names import check_inside
from rayembed.assets.storage import (
    check_writable,
    exists,
    file_name,
    is_remote,
    join,
    read_bytes,
    write_atomic,
)
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.document import NamedRun
from rayembed.config.run import Run
from rayembed.errors import ArtifactError
from rayembed.pipeline.storage import absolute_storage, placed
from rayembed.registry.metrics_log import METRICS_FILE
from rayembed.registry.run_folder import claim_run_folder
from rayembed.registry.tracking import send_metrics

logger = logging.getLogger(__name__)

PLANS_FILE = "plans.json"
"""File of a run: stage → name of its batch plan's folder in storage."""


RUNS, SWEEPS = "runs", "sweeps"
"""Folders of the storage with a folder for each run and sweep."""

LEASES = "leases"
"""Folder of the storage with a folder of claims for each run and sweep that is at work."""


@dataclass
class RunFolders:
    """Folders of a run: `storage`, which every node sees, and `local` on the driver's
    machine.

    They are one folder when storage is on disk. With object storage `local` has the small files
    that are appended to, and `files` carries them there and back.
    """

    files: StoredFolder

    @property
    def storage(self) -> str:
        """Folder of the run in storage, or its prefix in object storage."""
        return self.files.place

    @property
    def local(self) -> Path:
        """Folder of the run's small files on this machine."""
        return self.files.local

    @property
    def results(self) -> str:
        """Folder with the evaluation results of the run's models."""
        return join(self.storage, "evaluation")

    @property
    def metrics(self) -> str | None:
        """Path in storage to which the metrics log is copied; None if the log is written there
        directly.
        """
        remote = is_remote(self.storage)
        return join(self.storage, METRICS_FILE) if remote else None

    def stage(self, name: str) -> str:
        """Folder of a stage's checkpoints and weights."""
        return join(self.storage, name)

    def weights(self, name: str) -> str:
        """Path of the trained weights of a stage."""
        return join(self.storage, name, "weights.safetensors")

    def model(self, name: str) -> str:
        """Folder of the model that a stage exported."""
        return join(self.storage, "models", name)

    def claim(self, run: NamedRun, plans: Mapping[str, str]) -> None:
        """Claim the folder for a run, and write the run's settings and plans there and in
        storage.

        Raises:
            ArtifactError: it belongs to a run of other settings or data, or cannot be written.
                Nothing was changed then.
        """
        self._check_plans(run.name, plans)
        claim_run_folder(self.local, run)
        self.keep_plans(plans)
        self.files.keep()

    def _check_plans(self, name: str, plans: Mapping[str, str]) -> None:
        """Raise if a stage would train on another batch plan than the one recorded for this
        run.

        Args:
            name: of the run, for the message.
            plans: stage → folder of its plan.

        Raises:
            ArtifactError: the run of that name trains on other data. Nothing was changed.
        """
        path = self.local / PLANS_FILE
        try:
            kept = json.loads(path.read_bytes()) if path.exists() else {}
        except ValueError:  # `keep_plans` writes it again
            return
        for stage, place in plans.items():
            former, here = kept.get(stage), file_name(place)
            if former not in (None, here):
                raise ArtifactError(
                    f"the run {name!r} in {self.storage!r} has other data: its stage "
                    f"{stage!r} trains on the batch plan {former!r}, but the sources now "
                    f"give the plan {here!r}. The data files, or rayembed's way of "
                    "preparing them, have changed since the run began, so this start is "
                    "refused; the existing run was not changed. Give this run another name "
                    "(--set name=…), put the files back, or remove the existing run."
                )

    def keep_plans(self, plans: Mapping[str, str]) -> None:
        """Record the folder name of each stage's batch plan."""
        named = {stage: file_name(place) for stage, place in plans.items()}
        write_atomic(self.local / PLANS_FILE, (json.dumps(named, indent=2) + "\n").encode())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Copy the small files to storage at the end of the block, even after an error."""
        try:
            yield
        except BaseException:
            try:
                self.files.keep()
            except ArtifactError as error:
                logger.warning("%s", error)
            raise
        self.files.keep()


def plan_of(run: Run, stage: str) -> str:
    """Read which batch plan a stage of the run trains on, and return its folder.

    Raises:
        ArtifactError: no training of that name has come so far as to have one.
        StorageError: the storage cannot be read.
    """
    storage = absolute_storage(run.placement.storage_path)
    path = join(storage, RUNS, run.name, PLANS_FILE)
    try:
        plans = json.loads(read_bytes(path)) if exists(path) else {}
    except ValueError as error:
        raise ArtifactError(
            f"the list of batch plans {path!r} is broken: {error}. Submit the run again, which "
            "writes a new list"
        ) from None
    if stage not in plans:
        raise ArtifactError(
            f"{path!r} lists no batch plan for the stage {stage!r}, because no training "
            "with this run name has prepared a plan; start the training, or correct --name "
            "or placement.storage_path"
        )
    return join(storage, "plans", check_inside(plans[stage], repr(path)))


@contextmanager
def locked_folders(run: NamedRun, *, wait: bool = False) -> Iterator[RunFolders]:
    """Lock the run's folders against other jobs, and fetch its small files from storage.

    Args:
        wait: for the job that has them, instead of refusing.

    Raises:
        PlacementError: the storage cannot be written.
        ArtifactError: another job has them right now.
    """
    what = f"trains the run {run.name!r}"
    with locked_place(run.placement.storage_path, RUNS, run.name, what, wait=wait) as files:
        yield RunFolders(files)


@contextmanager
def locked_place(
    storage: str, kind: str, name: str, what: str, *, wait: bool = False, advice: str = ADVICE
) -> Iterator[StoredFolder]:
    """Lock the files of a run or sweep against other processes here, and lease them against jobs on
    other machines.

    Args:
        kind: `RUNS` or `SWEEPS`.
        what: what the other job does that has them, after `another job `.
        advice: what the refused job's user can do.

    Raises:
        PlacementError: the storage cannot be written.
        ArtifactError: another job has them right now.
    """
    files = files_of(storage, kind, name)
    claims = join(storage, LEASES, kind, name)
    files.local.parent.mkdir(parents=True, exist_ok=True)
    # Not of one thread: the trials of a sweep are threads of one process.
    lock = FileLock(f"{files.local}.lock", thread_local=False)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise ArtifactError(refused(what, str(files.local), holder(claims), advice)) from None
    try:
        machine = this_machine(Path(lock.lock_file))
        with Lease(claims, what, machine, wait=wait, advice=advice):
            files.fetch()
            yield files
    finally:
        lock.release()


def files_of(storage: str, kind: str, name: str) -> StoredFolder:
    """Check that the storage is writable, and return the small files of a run or sweep."""
    check_writable(storage)
    place = join(storage, kind, name)
    if not is_remote(storage):
        return StoredFolder(place, Path(place))
    key = hashlib.sha256(place.encode()).hexdigest()[:12]
    return StoredFolder(place, cache_folder() / kind / f"{name}-{key}")


def send_pending(run: NamedRun, out: TextIO) -> None:
    """Send the named run's pending data to MLflow, without starting the run or Ray.

    It goes to where the run said that MLflow is, or to `placement.tracking_uri` where it is given.

    Raises:
        ArtifactError: no job has begun a run of that name there, or one is at work on it.
        TrackingError: MLflow is away; what was not sent stays.
    """
    with locked_folders(placed(run)) as folders:
        send_files(folders.files, run.placement.tracking_uri, out)


def send_files(files: StoredFolder, tracking_uri: str | None, out: TextIO) -> None:
    """Send the pending data in a locked folder to MLflow; raises the same errors as
    `send_pending`.
    """
    number = send_metrics(files.local, tracking_uri=tracking_uri)
    files.keep()
    out.write(f"sent {number} steps; MLflow has everything of {files.place}\n")
