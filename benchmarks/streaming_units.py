"""One conversion two ways on Ray: as a streaming pipeline of Ray Data's own operators, which read,
convert and write, and as units of rayembed, whose tasks read and write themselves.

    python benchmarks/streaming_units.py [--rows 100000] [--files 16]

Both parse the same JSON lines and make the same records with the same functions. Told are CPU
seconds of all processes, the peak of their memory, files, rows after a first and a second run, and
whether two runs write the same bytes. Then what Ray takes for tiny units, each a task and grouped.
"""

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import xxhash

from rayembed.data import on_ray
from rayembed.data.parts import table_of, write_table
from rayembed.data.records import Record
from rayembed.data.work_items import Result, run_resumable
from rayembed.pipeline.on_ray import connect


@dataclass(frozen=True)
class File:
    """Work item: a file of JSON lines."""

    path: str

    @property
    def key(self) -> str:
        """Its name."""
        return Path(self.path).stem


def records_of(lines: list[str]) -> pa.Table:
    """The records in some lines, as a table."""
    found = []
    for line in lines:
        row = json.loads(line)
        name = f"own/{xxhash.xxh3_64_hexdigest(line.encode())}"
        found.append(Record(name, row["query"], (row["positive"],), "own"))
    return table_of(found)


@dataclass(frozen=True)
class Convert:
    """Task: write the records of a file as a part."""

    folder: str

    def __call__(self, item: File) -> Result:
        """Report the part and its rows."""
        lines = Path(item.path).read_text(encoding="utf-8").splitlines()
        part = write_table(self.folder, records_of(lines))
        return {"rows_in": len(lines), "rows_out": part.rows, "rejected": {}, "part": part.name}


@dataclass(frozen=True)
class Nothing:
    """Task: nothing."""

    def __call__(self, item: File) -> Result:
        """Report nothing."""
        return {}


def by_units(files: list[str], folder: Path) -> None:
    """Units of rayembed, one a file."""
    task, items = Convert(str(folder / "parts")), [File(file) for file in files]
    run_resumable(str(folder), "convert", task, items, on_ray.execute_with_ray_data)


def by_stream(files: list[str], folder: Path) -> None:
    """Ray Data's own operators from end to end."""
    lines = ray.data.read_text(files, override_num_blocks=len(files))
    made = lines.map_batches(_converted, batch_format="pyarrow", batch_size=None)
    made.write_parquet(str(folder / "parts"))


def _converted(batch: pa.Table) -> pa.Table:
    return records_of(batch["text"].to_pylist())


@contextmanager
def measured(what: str) -> Iterator[None]:
    """Print CPU seconds of this process and all below it, and the peak of their memory."""
    peak, stop = [0.0], threading.Event()

    def look() -> None:
        while not stop.wait(1.0):
            sizes = _of_all(lambda process: process.memory_full_info().pss)
            peak[0] = max(peak[0], sum(sizes) / 2**20)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    before = _cpu()
    yield
    spent = _cpu() - before
    stop.set()
    thread.join()
    print(f"{what}: {spent:.1f} CPU-seconds, peak memory {peak[0]:,.0f} MiB", flush=True)


def _of_all(value: Callable[[psutil.Process], float]) -> list[float]:
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            found.append(value(process))
    return found


def _cpu() -> float:
    # Of processes that have ended their parents tell.
    return sum(_of_all(lambda process: sum(process.cpu_times()[:4])))


def told(folder: Path) -> str:
    """Files, bytes and rows of the parts, and a digest of all their content."""
    paths = sorted((folder / "parts").glob("*.parquet"))
    rows = sum(pq.read_metadata(path).num_rows for path in paths)
    digests = sorted(xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in paths)
    whole = xxhash.xxh3_64_hexdigest("".join(digests).encode())
    size = sum(path.stat().st_size for path in paths)
    return f"{len(paths)} files, {size:,} bytes, {rows:,} rows, content {whole}"


def main() -> None:
    """Print both ways, and tiny units in both cuts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--tiny", type=int, default=2000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        each = asked.rows // asked.files
        files = [str(root / f"{number:03d}.jsonl") for number in range(asked.files)]
        for number, file in enumerate(files):
            rows = range(number * each, number * each + each)
            lines = [{"query": f"ask {i}", "positive": f"answer {i} " * 20} for i in rows]
            Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
        connect()
        ways: dict[str, Callable[[list[str], Path], None]]
        ways = {"units": by_units, "stream": by_stream}
        for name, way in ways.items():
            way(files[:2], root / f"warm-{name}")  # workers start, modules are imported
        for name, way in ways.items():
            for run in ("first run", "again", "in another folder"):
                folder = root / (f"{name}-other" if "other" in run else name)
                with measured(f"{name}, {run}"):
                    way(files, folder)
                print(f"    {told(folder)}", flush=True)
        items = [File(str(number)) for number in range(asked.tiny)]
        cut: Any = on_ray.next_units
        for name, cuts in (("a task each", lambda left, *_: (left, 1)), ("grouped", cut)):
            on_ray.next_units = cuts
            began = time.process_time()
            with measured(f"{asked.tiny} units of nothing, {name}"):
                assert (
                    len(list(on_ray.execute_with_ray_data(Nothing(), items, "cpu"))) == asked.tiny
                )
            print(f"    of them in the driver {time.process_time() - began:.1f}", flush=True)


if __name__ == "__main__":
    main()
