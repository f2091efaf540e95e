"""Folders that are made once and reused, on disk or in object storage.

    <folder>/working/         scratch of the tasks, removed when the folder is finished
             manifest.json    what was made, of what; written last

A folder is finished when its manifest exists; a finished folder is reused, an unfinished one is
resumed. Only `working` is deleted after the manifest is written: a process that misses a file there
finds the manifest. So several jobs may make the same folder concurrently, also in object storage,
which has no locks; the first manifest wins.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import (
    exists,
    file_sizes,
    is_remote,
    join,
    open_storage,
    remove_folder,
)
from rayembed.errors import ArtifactError

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Entry:
    """A folder of a store, named by a fingerprint of all inputs that its content depends on."""

    folder: str

    @property
    def working(self) -> str:
        """Scratch folder for files between tasks; deleted when the folder is finished."""
        return join(self.folder, "working")

    def existing(self) -> dict[str, Any] | None:
        """Return the manifest of a finished folder and remove leftover scratch files; None if the
        folder is unfinished.
        """
        if not exists(join(self.folder, MANIFEST)):
            return None
        log.info("nothing to do, %s is finished already", self.folder)
        self._remove_working()
        return read_json(join(self.folder, MANIFEST), self._remedy)

    def get_or_make(
        self, make: Callable[[], Mapping[str, Any]], *, alone: bool = False
    ) -> tuple[Mapping[str, Any], bool]:
        """Return the manifest of the finished folder, made if needed, and whether the folder was
        made before or by another job.

        Args:
            make: makes the folder and gives what `finish` gave. An error is ignored if another job
                has finished the folder meanwhile, and deleted the scratch files that `make` uses.
            alone: whether other processes wait meanwhile, where the folder is on a disk.
        """
        if (found := self.existing()) is not None:
            return found, True
        if alone and not is_remote(self.folder):
            with self._lock():
                return self.get_or_make(make)
        try:
            return make(), False
        except Exception as error:
            if (found := self.existing()) is None:
                raise
            log.info(
                "%s: another job finished this folder first, so this job uses that result (its "
                "own attempt failed: %s)",
                self.folder,
                error,
            )
            return found, True

    def finish(self, manifest: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write and return the manifest; if another job has written one in the meantime, return
        that one.

        Raises:
            StorageError: the storage refuses it.
        """
        if (found := self.existing()) is not None:
            return found
        write_json(join(self.folder, MANIFEST), manifest, indent=1)
        self._remove_working()
        return manifest

    def sizes(self, names: Sequence[str], below: str = "") -> dict[str, int]:
        """Return the size in bytes of each named file; raise if some are missing.

        Args:
            names: of the files.
            below: folder in this one that holds them.

        Raises:
            ArtifactError: some are gone, which an earlier try says that it wrote.
        """
        there = file_sizes(join(self.folder, below), recursive=False)
        if gone := set(names) - there.keys():
            raise ArtifactError(
                f"{len(gone)} of the {len(names)} files that an earlier attempt wrote are "
                f"missing, for instance {join(self.folder, below, min(gone))!r}. {self._remedy}"
            )
        return {name: there[name] for name in names}

    @property
    def _remedy(self) -> str:
        return f"Remove the folder {self.folder!r} and start the job again, which repeats the step"

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold a lock file next to a folder on disk."""
        lock = Path(f"{open_storage(self.folder)[1].rstrip('/')}.lock")
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock):
            yield

    def _remove_working(self) -> None:
        # The folder is finished: nothing that fails here may end the job, neither an outage nor
        # another job that still writes there. Object storage that may only be read is asked first.
        try:
            if exists(self.working):
                remove_folder(self.working)
        except ArtifactError as error:
            log.warning("%s; the next run tries again to remove it", error)
