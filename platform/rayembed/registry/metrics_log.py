"""Log file of a run's training metrics on local disk, one JSON line for each step; MLflow gets its
data from it.

MLflow gets a copy (`tracking.py`); a server that is away loses nothing. Knows no MLflow.
"""

import errno
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from rayembed.assets.storage import write_atomic
from rayembed.errors import ArtifactError

METRICS_FILE = "metrics.jsonl"
"""File name of the log in a run's folder."""

KEYS = ("stage", "step", "global_step", "time")
"""Keys of a record besides its metrics."""

Record = dict[str, Any]
"""One step: `stage` (str), `step` and `global_step` (int, counted from 1 over the stage and over
the run), `time` (seconds since 1970), and the metrics (float).

JSON has no number for what is not finite: in the file such a metric is the text `nan`, `inf` or
`-inf`."""

_logger = logging.getLogger(__name__)


class MetricsLog:
    """Append-only log of a run's steps, ordered by `global_step`, with each step once.

    One process writes; others may read the same file meanwhile. A line that a killed process left
    half-written is no record, and the next writer removes it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._last: int | None = None

    def append(
        self,
        stage: str,
        step: int,
        global_step: int,
        metrics: Mapping[str, float],
        *,
        seconds: float | None = None,
    ) -> None:
        """Append the record of one step.

        A step that is reported again (after a resume) takes the place of the former report, and
        of all that followed it.

        Args:
            seconds: when it happened, since 1970; None: now.

        Raises:
            ArtifactError: the file cannot be written.
        """
        clash = sorted(set(metrics) & set(KEYS))
        assert not clash, f"metrics named {clash} would hide the record's own keys"
        last = self._last_global_step()
        if global_step <= last:
            self.truncate(global_step - 1)
        record = {
            "stage": stage,
            "step": int(step),
            "global_step": int(global_step),
            "time": time.time() if seconds is None else seconds,
            **{name: float(value) for name, value in metrics.items()},
        }
        line = _line(record)
        try:
            append_line(self.path, line)
        except OSError as error:
            raise ArtifactError(
                f"the metrics of step {global_step} cannot be written to {str(self.path)!r}: "
                f"{error}; make room or correct the permissions, then submit the run again"
            ) from error
        self._last = int(global_step)

    def truncate(self, global_step: int) -> int:
        """Remove records after `global_step`, so that the run can resume there; return the number
        removed.

        Raises:
            ArtifactError: a line other than the last is not JSON.
        """
        records = self.records()
        kept = [record for record in records if record["global_step"] <= global_step]
        if len(kept) < len(records):
            self._rewrite(kept)
            _logger.info(
                "resuming after step %d: the stored metrics of later steps are discarded, "
                "and these steps are recorded again",
                global_step,
            )
        self._last = kept[-1]["global_step"] if kept else 0
        return len(records) - len(kept)

    def records(self) -> list[Record]:
        """All records in the order of steps; empty for a new log.

        Raises:
            ArtifactError: a line other than the last is not JSON.
        """
        return LogReader(self.path, record_of).read()

    def last(self, stage: str | None = None) -> Record | None:
        """Record of the latest step of the stage (None: of the run); None if there is no record."""
        found = [record for record in self.records() if stage in (None, record["stage"])]
        return found[-1] if found else None

    def _last_global_step(self) -> int:
        """Number of the last logged step; the first call repairs a cut-off last line of the
        file.
        """
        if self._last is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            records = self.records()
            if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
                self._rewrite(records)
            self._last = records[-1]["global_step"] if records else 0
        return self._last

    def _rewrite(self, records: list[Record]) -> None:
        write_atomic(self.path, "".join(map(_line, records)).encode())


def dropped_steps(records: Iterable[Record]) -> int:
    """Sum the steps that changed no weights, from the last record of each stage."""
    by_stage = {record["stage"]: record.get("dropped_steps", 0.0) for record in records}
    return int(sum(by_stage.values()))


class LogReader:
    """Incremental reader of a log; it starts from the beginning if the file was replaced.

    Args:
        parse: what a line says; raises `ValueError` where it says nothing.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Record] = json.loads) -> None:
        self.path, self._parse = path, parse
        self._file: BufferedReader | None = None
        self._num_lines = 0

    def read(self) -> list[Record]:
        """Return the complete records added since the last call.

        Raises:
            ArtifactError: a whole line is not JSON.
        """
        self._follow()
        if self._file is None:
            return []
        records: list[Record] = []
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(start)  # nothing, or a line that is still being written
                return records
            self._num_lines += 1
            try:
                records.append(self._parse(line))
            except ValueError:
                raise ArtifactError(
                    f"line {self._num_lines} of {str(self.path)!r} is not JSON: "
                    f"{line[:80]!r}; another program has changed the file: repair or remove "
                    "that line"
                ) from None

    def _follow(self) -> None:
        try:
            there = self.path.stat()
        except FileNotFoundError:
            self._close()
            return
        # The open file keeps its inode from being given to the file that replaces it.
        if self._file is not None and os.fstat(self._file.fileno()).st_ino != there.st_ino:
            self._close()
        if self._file is None:
            self._file = self.path.open("rb")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None
        self._num_lines = 0

    def __del__(self) -> None:
        self._close()


def _line(record: Record) -> str:
    values = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in record.items()
    }
    return json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n"


def record_of(line: bytes) -> Record:
    """Parse one line of a metrics log."""
    return {
        name: float(value) if isinstance(value, str) and name not in KEYS else value
        for name, value in json.loads(line).items()
    }


def append_line(path: Path, line: str) -> None:
    """Append a line to a file in a single write, so that readers see it whole or cut off at its
    end.

    Raises:
        OSError: the file cannot be written; it is left without a part of the line.
    """
    data = line.encode()
    with path.open("ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        written = file.write(data)
        if written < len(data):
            # The disk took what room there was, without an error. The next line would go on there.
            file.truncate(start)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
