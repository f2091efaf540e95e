"""Shuffle rows between tasks: each first task divides its rows among buckets, each second task
reads one bucket.

Files and their ranges grow with the rows, not with their square: a level of the route (`shuffle`)
writes as many files as there are tasks, and a task reads `FAN_OUT` ranges, many at a time.

    folder/<digest of task and items>/1/000000.arrow            of each item of the first task
                                 2/000000/000000.arrow     coarse bucket, then its files
                                 units/                    results of the tasks
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.storage import join
from rayembed.data.engine.shuffle import Route, forward_rows, read_bucket, send_rows
from rayembed.data.engine.work_items import Execute, Needs, Result, WorkItem, run_resumable


class Sent(NamedTuple):
    """Rows that a task made from one work item, with the bucket of each row."""

    table: pa.Table
    bucket: np.ndarray
    """(rows,) integer bucket of each row."""
    result: Result


def vectors_column(vectors: Iterable[np.ndarray]) -> pa.Array:
    """Make a binary column from one float16 array for each row: a vector (D,) or several (p, D)."""
    return pa.array([one.tobytes() for one in vectors], pa.large_binary())


def vectors_of(column: pa.ChunkedArray, width: int | None = None) -> np.ndarray:
    """(n, D) float16 vectors read back from a column that `vectors_column` made, also after rows
    were selected.

    Args:
        width: D; None: a row has one vector.
    """
    joined = np.frombuffer(b"".join(column.to_pylist()), dtype=np.float16)
    return joined.reshape(len(column), -1) if width is None else joined.reshape(-1, width)


@dataclass(frozen=True)
class Buckets:
    """Shuffled rows in files, which can be read bucket by bucket."""

    folder: str
    files: int
    """Number of files of the first level; or their names, in `names`."""
    route: Route
    names: tuple[str, ...] = ()

    def read(self, bucket: int) -> list[pa.Table]:
        """Read the rows of a bucket, ordered by item and within an item as they were sent.

        Raises:
            ArtifactError: a file is missing or broken.
        """
        return self.rows(self.route.levels, bucket)

    def records(self, bucket: int) -> list[dict[str, Any]]:
        """Read the rows of a bucket as dicts, in the order of `read`.

        Raises:
            ArtifactError: as `read`.
        """
        return [row for table in self.read(bucket) for row in table.to_pylist()]

    def rows(
        self, level: int, number: int, first: int = 0, last: int | None = None
    ) -> list[pa.Table]:
        """Read the rows of one coarse bucket at one level, from its files `first` to `last`
        (exclusive).
        """
        above, segment = (0, number) if level == 1 else divmod(number, self.route.fan)
        count = self.groups(level)
        numbers = range(first, count if last is None else min(last, count))
        paths = (self.path(level, above, file) for file in numbers)
        return [table for table in read_bucket(paths, segment) if table is not None]

    def groups(self, level: int) -> int:
        """Number of files, at one level, that share the rows of one coarse bucket of the level
        above.
        """
        count = self.files
        for _ in range(level - 1):
            count = -(-count // self.route.fan)
        return count

    def path(self, level: int, above: int, file: int) -> str:
        """Path of a file, given its level, its coarse bucket on the level above, and its number."""
        if level > 1:
            return join(self.folder, str(level), f"{above:06d}", f"{file:06d}.arrow")
        name = self.names[file] if self.names else join("1", f"{file:06d}.arrow")
        return join(self.folder, name)


def exchange(
    folder: str,
    what: str,
    task: Callable[[Any], Sent],
    items: Sequence[WorkItem],
    num_buckets: int,
    execute: Execute,
    needs: Needs = "cpu",
) -> tuple[Buckets, list[Result]]:
    """Run the task on all items and divide its rows among buckets; return the buckets and the
    result for each item.

    Args:
        folder: scratch folder; what an earlier try has sent of the same items stands there.
        what: names the task, in the log and among others in the folder.
        task: picklable.
    """
    digest = xxhash.xxh3_64(f"{what}\0".encode())
    for item in items:
        digest.update(f"{item.key}\0".encode())
    below = join(folder, f"{digest.hexdigest()}-{num_buckets}")
    buckets = Buckets(below, len(items), Route.to(num_buckets))
    numbered = [_Numbered(number, item) for number, item in enumerate(items)]
    results = run_resumable(below, what, _Send(task, buckets), numbered, execute, needs)
    forward(buckets, what, execute)
    return buckets, results


def forward(buckets: Buckets, what: str, execute: Execute) -> None:
    """Split coarse buckets, each with rows of several final buckets, level by level into final
    buckets; do nothing if the shuffle has one level.
    """
    for level in range(1, buckets.route.levels):
        items = [
            _Coarse(number, file)
            for number in range(buckets.route.count(level))
            for file in range(buckets.groups(level + 1))
        ]
        task = _Forward(buckets, level)
        run_resumable(buckets.folder, f"{what} {level + 1}", task, items, execute)


@dataclass(frozen=True)
class _Numbered:
    number: int
    item: WorkItem

    @property
    def key(self) -> str:
        return f"{self.number:06d}"


@dataclass(frozen=True)
class _Send:
    """Task: write the rows of an item as one file, divided into the coarse buckets of the first
    level.
    """

    task: Callable[[Any], Sent]
    buckets: Buckets

    def __call__(self, item: _Numbered, *device: str) -> Result:
        sent = self.task(item.item, *device)
        send_rows(self.buckets.path(1, 0, item.number), *sent[:2], self.buckets.route)
        return sent.result


@dataclass(frozen=True)
class _Coarse:
    """Work item: a group of files that hold rows of one coarse bucket."""

    number: int
    file: int

    @property
    def key(self) -> str:
        return f"{self.number:06d}-{self.file:06d}"


@dataclass(frozen=True)
class _Forward:
    """Task: read the rows of a coarse bucket from some files, and write them divided into finer
    buckets.
    """

    buckets: Buckets
    level: int

    def __call__(self, item: _Coarse) -> Result:
        fan = self.buckets.route.fan
        first = item.file * fan
        tables = self.buckets.rows(self.level, item.number, first, first + fan)
        path = self.buckets.path(self.level + 1, item.number, item.file)
        forward_rows(path, tables, self.buckets.route, self.level)
        return {"rows": sum(map(len, tables))}
