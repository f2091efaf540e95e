"""Outbox for MLflow: messages other than metrics, kept on disk until MLflow has accepted them."""

import json
from pathlib import Path
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.errors import ArtifactError
from rayembed.registry.metrics_log import LogReader, append_line

Entry = dict[str, Any]
"""One message: `kind` and its fields. Sending it twice is harmless."""


class Outbox:
    """Queue in a JSONL file, with a second file that counts the delivered entries.

    A process that is killed between telling and counting tells the entry once more.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._taken_path = path.with_suffix(".taken")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.read_bytes().endswith(b"\n"):
            whole = LogReader(path).read()
            write_atomic(path, "".join(json.dumps(entry) + "\n" for entry in whole).encode())
        path.touch()

    def put(self, entry: Entry) -> None:
        """Append one entry.

        Raises:
            ArtifactError: the file cannot be written.
        """
        try:
            append_line(self._path, json.dumps(entry) + "\n")
        except OSError as error:
            raise ArtifactError(
                f"what MLflow is to be told cannot be kept in {str(self._path)!r}: {error}; make "
                "room or correct the permissions, then submit the run again"
            ) from error

    def entries(self) -> list[Entry]:
        """All entries, delivered or not, oldest first."""
        return LogReader(self._path).read()

    def waiting(self) -> list[Entry]:
        """Undelivered entries, oldest first."""
        return self.entries()[self._num_taken() :]

    def taken(self) -> None:
        """Mark the oldest undelivered entry as delivered."""
        write_atomic(self._taken_path, str(self._num_taken() + 1).encode())

    def restart(self) -> None:
        """Mark all entries as undelivered, for another MLflow run."""
        write_atomic(self._taken_path, b"0")

    def _num_taken(self) -> int:
        if not self._taken_path.exists():
            return 0
        return int(self._taken_path.read_text(encoding="utf-8"))
