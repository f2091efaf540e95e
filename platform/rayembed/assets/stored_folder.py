"""Keep a local folder of small files in step with a folder in storage.

Appending, locking and atomic replacing work on local disk, but a run that goes on at another
machine finds only what is in storage.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from rayembed.assets.storage import is_remote, join, list_files, read_bytes, write_atomic
from rayembed.errors import StorageError

logger = logging.getLogger(__name__)

KEPT_FILE = ".kept.json"
"""File with the checksums of storage's files when this machine last read or wrote them."""

_APPEND_ONLY = ".jsonl"


class StoredFolder:
    """Working copy `local` of the files at `place` in storage; hidden files are not copied.

    For a place on disk `local` is that folder and nothing is ever copied.
    """

    def __init__(self, place: str, local: Path, *, recursive: bool = False) -> None:
        self.place, self.local = place, local
        self._recursive = recursive
        self._kept: dict[str, str] = {}

    def fetch(self) -> None:
        """Update the local folder from storage, but keep local changes that an earlier `keep`
        failed to copy.

        A file that changed here alone since the last `keep` stays and goes to storage with the
        next one; of append-only files (`.jsonl`) the longer one stays when it goes on from the
        other. Where files changed on both sides otherwise, storage is taken, and what lies here is
        put into a folder `<local>.lost-<time>` and warned of.

        Raises:
            ArtifactError: the storage cannot be read.
        """
        if not is_remote(self.place):
            return
        names = list_files(self.place, recursive=self._recursive)
        stored = {name: read_bytes(join(self.place, name)) for name in names}
        self.local.mkdir(parents=True, exist_ok=True)
        here = {name: (self.local / name).read_bytes() for name in self._local_files()}
        kept = self._read_kept()
        ahead = {
            name: _which(name, data, stored, kept)
            for name, data in here.items()
            if data != stored.get(name) and (kept is None or _digest(data) != kept.get(name))
        }
        if "neither" in ahead.values():
            # Files belong together, so none of this side is put among those of storage.
            self._set_aside({name: here[name] for name in ahead})
            ahead = {}
        wanted = stored | {name: here[name] for name, which in ahead.items() if which == "here"}
        for name, data in wanted.items():
            if here.get(name) != data:
                write_atomic(self.local / name, data)
        for name in here.keys() - wanted.keys():
            (self.local / name).unlink()
        self._kept = {name: _digest(data) for name, data in stored.items()}
        self._write_kept()

    def keep(self) -> None:
        """Copy new and changed files of the local folder to storage, each atomically.

        Read from the last name to the first and written from the first to the last: the count in
        `mlflow_outbox.taken` must not be ahead of the entries in `mlflow_outbox.jsonl`.

        Raises:
            StorageError: the storage refuses it.
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
            except StorageError as error:
                raise StorageError(
                    f"{error}. The file is still in the local folder {str(self.local)!r} on this "
                    "machine"
                ) from error
            self._kept[name] = digest
            self._write_kept()

    def _local_files(self) -> list[str]:
        found = self.local.rglob("*") if self._recursive else self.local.glob("*")
        names = [path.relative_to(self.local) for path in found if path.is_file()]
        return [n.as_posix() for n in names if not any(part.startswith(".") for part in n.parts)]

    def _read_kept(self) -> dict[str, str] | None:
        """Read the recorded checksums of the last copy to storage; None if none were recorded."""
        path = self.local / KEPT_FILE
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

    def _write_kept(self) -> None:
        write_atomic(self.local / KEPT_FILE, json.dumps(self._kept, indent=1).encode())

    def _set_aside(self, files: Mapping[str, bytes]) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        folder = self.local.with_name(f"{self.local.name}.lost-{stamp}")
        for name, data in files.items():
            write_atomic(folder / name, data)
        logger.warning(
            "the files in %s have changed since this machine last wrote there, and the local "
            "files %s have changes that were not copied there yet: using the files in storage; "
            "the local files were moved to %s",
            self.place,
            ", ".join(sorted(files)),
            folder,
        )


def _which(
    name: str, here: bytes, stored: Mapping[str, bytes], kept: Mapping[str, str] | None
) -> Literal["here", "stored", "neither"]:
    """Decide which version of a changed file supersedes the other: the local one, the stored one,
    or neither.

    Args:
        kept: digests of what storage had when it was last read or written here.
    """
    there = stored.get(name)
    if there is None:
        # A file of a run that was removed from storage, or of nobody knows what, is not brought in.
        removed = kept is None or name in kept or (kept and not stored)
        return "neither" if removed else "here"
    if kept is not None and _digest(there) == kept.get(name):
        return "here"
    if name.endswith(_APPEND_ONLY):
        if here.startswith(there):
            return "here"
        if there.startswith(here):
            return "stored"
    return "neither"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
