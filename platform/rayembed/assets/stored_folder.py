"""A local folder of small files that are in storage as well.

Appending, locking and atomic replacing work on local disk, but a run that goes on at another
machine finds only what is in storage.
"""

import hashlib
import shutil
from pathlib import Path

from rayembed.assets.storage import is_remote, join, list_files, read_bytes, write_atomic
from rayembed.errors import ArtifactError


class StoredFolder:
    """The files at `place`, used in the folder `local`; hidden ones stay where they are.

    For a place on disk `local` is that folder and nothing is ever copied.
    """

    def __init__(self, place: str, local: Path, *, recursive: bool = False) -> None:
        self.place, self.local = place, local
        self._recursive = recursive
        self._kept: dict[str, bytes] = {}

    def fetch(self) -> None:
        """Make the local folder hold what storage has, and nothing else.

        Raises:
            ArtifactError: the storage cannot be read.
        """
        if not is_remote(self.place):
            return
        names = list_files(self.place, recursive=self._recursive)
        content = {name: read_bytes(join(self.place, name)) for name in names}
        shutil.rmtree(self.local, ignore_errors=True)
        self.local.mkdir(parents=True)
        for name, data in content.items():
            path = self.local / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._kept = {name: _digest(data) for name, data in content.items()}

    def keep(self) -> None:
        """Copy what is new or changed in the local folder to storage, each file whole.

        Read from the last name to the first and written from the first to the last: the count in
        `mlflow_outbox.taken` must not be ahead of the entries in `mlflow_outbox.jsonl`.

        Raises:
            ArtifactError: the storage refuses it.
        """
        if not is_remote(self.place):
            return
        names = sorted(self._local_files())
        content = {name: (self.local / name).read_bytes() for name in reversed(names)}
        for name in names:
            digest = _digest(content[name])
            if self._kept.get(name) == digest:
                continue
            target = join(self.place, name)
            try:
                write_atomic(target, content[name])
            except OSError as error:
                raise ArtifactError(
                    f"cannot write {target!r}: {error}. The file lies in {str(self.local)!r}; "
                    "correct the storage or its credentials, then submit the run again"
                ) from error
            self._kept[name] = digest

    def _local_files(self) -> list[str]:
        found = self.local.rglob("*") if self._recursive else self.local.glob("*")
        names = [path.relative_to(self.local) for path in found if path.is_file()]
        return [n.as_posix() for n in names if not any(part.startswith(".") for part in n.parts)]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
