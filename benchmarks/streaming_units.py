"""Data steps two ways on Ray: as a streaming pipeline of Ray Data's own operators, which read,
compute and write, and as units of rayembed, whose tasks read and write themselves.

    python benchmarks/streaming_units.py [--rows 100000] [--files 16] [--vectors 1024] [--tiny 2000]

Conversion: both parse the same JSON lines and make the same records with the same functions. Told
are CPU seconds of all processes, the peak of their memory, files, rows after a first and a second
run, and whether two runs write the same bytes. Embedding: both have one actor that keeps the same
teacher, and one of the streams has Ray Data's checkpoints; told are also padded tokens, and the
texts embedded after a run that failed half-way. Then what Ray takes for tiny units, each a task and
grouped. A number of 0 leaves a comparison out.
"""

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data
import torch
import transformers
import xxhash
from ray.data.checkpoint import CheckpointConfig

from rayembed.config.mining import Teacher
from rayembed.data.engine import on_ray
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import (
    Part,
    PartItem,
    read_records,
    table_of,
    write_part,
    write_table,
)
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.records import Record
from rayembed.data.vectors.embed import EmbedPart, Vectors, embed_parts
from rayembed.data.vectors.teacher import Encoder, TeacherLoader, load_teacher, weights_of
from rayembed.models.contract import EmbeddingModel
from rayembed.pipeline.run.on_ray import connect


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
    peak, stop, seen = [0.0], threading.Event(), dict[psutil.Process, float]()

    def look() -> None:
        while not stop.wait(1.0):
            _cpu(seen)
            sizes = _of_all(lambda process: process.memory_full_info().pss)
            peak[0] = max(peak[0], sum(sizes.values()) / 2**20)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    before = _cpu(seen)
    yield
    stop.set()
    thread.join()
    spent = _cpu(seen) - before
    print(f"{what}: {spent:.1f} CPU-seconds, peak memory {peak[0]:,.0f} MiB", flush=True)


def _of_all(value: Callable[[psutil.Process], float]) -> dict[psutil.Process, float]:
    found = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.Error):
            found[process] = value(process)
    return found


def _cpu(seen: dict[psutil.Process, float]) -> float:
    # Of a process that has ended counts what was seen last: not all have a parent that tells.
    seen |= _of_all(lambda process: sum(process.cpu_times()[:2]))
    return sum(seen.values())


def told(folder: Path, kinds: tuple[str, ...] = ("*.parquet",)) -> str:
    """Files, bytes and rows of what is in a folder, and a digest of all its content."""
    paths = sorted(path for kind in kinds for path in folder.rglob(kind))
    rows = sum(pq.read_metadata(path).num_rows for path in paths if path.suffix == ".parquet")
    digests = sorted(xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in paths)
    whole = xxhash.xxh3_64_hexdigest("".join(digests).encode())
    size = sum(path.stat().st_size for path in paths)
    return f"{len(paths)} files, {size:,} bytes, {rows:,} rows, content {whole}"


_BATCH = 32
_WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in "aeiou" for c in "bdfgklmnprst"]


def write_teacher(folder: Path) -> Teacher:
    """A BERT of two layers of width 128 with random weights, whose tokens are words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=len(vocabulary), intermediate_size=512, **shape)
    transformers.BertModel(config).save_pretrained(folder)
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return Teacher(teacher=str(folder), max_length=256, dtype="float32")


def write_parts(folder: Path, rows: int, count: int) -> list[Part]:
    """Parts of made-up pairs; queries have about 8 words, documents 80, both with long tails."""
    rng = random.Random(0)

    def text(median: int) -> str:
        return " ".join(rng.choices(_WORDS, k=1 + int(median * rng.lognormvariate(0, 0.6))))

    records = [Record(f"own/{i:08d}", text(8), (text(80),), "own") for i in range(rows)]
    return [write_part(str(folder), records[i::count]) for i in range(count)]


class Work(NamedTuple):
    """What a teacher has done in all of its calls."""

    texts: int = 0
    tokens: int = 0
    with_padding: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class CountedTeacher:
    """Loads a teacher that notes its work, and fails when it has embedded so many texts."""

    notes: str
    fails_after: int | None = None

    def __call__(self, config: Teacher, weights: str, device: str) -> Encoder:
        """The encoder; a call is a line of the notes."""
        encoder = load_teacher(config, weights, device)

        def encode(texts: Any, role: Any) -> np.ndarray:
            if self.fails_after is not None and self.done().texts >= self.fails_after:
                raise RuntimeError("the teacher fails, as it was told to")
            began, seen = time.monotonic(), [0, 0]

            def see(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
                if isinstance(module, EmbeddingModel):
                    mask = given[0]["attention_mask"]
                    seen[0] += int(mask.sum())
                    seen[1] += mask.numel()

            with torch.nn.modules.module.register_module_forward_pre_hook(see):
                vectors = encoder(texts, role)
            with Path(self.notes).open("a") as notes:
                spent = round(time.monotonic() - began, 2)
                notes.write(json.dumps([len(texts), *seen, spent]) + "\n")
            return vectors

        return encode

    def done(self) -> Work:
        """Sum of the notes."""
        lines = Path(self.notes).read_text().splitlines() if Path(self.notes).exists() else []
        return Work(*map(sum, zip(*map(json.loads, lines), strict=True))) if lines else Work()


def vectors_by_units(
    parts: list[Part], folder: Path, config: Teacher, load: CountedTeacher
) -> None:
    """The vectors' files of rayembed."""
    loader = TeacherLoader(load)
    context = PipelineContext(str(folder), 0, on_ray.execute_with_ray_data, loader)
    embed_parts(context, "own", parts, config)


class EmbedBatch:
    """Actor of the stream; keeps the teacher."""

    def __init__(self, config: Teacher, weights: str, load: CountedTeacher) -> None:
        self.encoder = load(config, weights, "cpu")

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Ids, and the vectors of a batch's queries and documents."""
        documents = [positives[0] for positives in batch["positives"].to_pylist()]
        queries = self.encoder(batch["query"].to_pylist(), "query")
        made = {"query": queries, "document": self.encoder(documents, "document")}
        columns = {
            name: pa.FixedSizeListArray.from_arrays(
                pa.array(vectors.astype(np.float16).ravel()), vectors.shape[1]
            )
            for name, vectors in made.items()
        }
        return pa.table({"id": batch["id"], **columns})


def vectors_by_stream(
    parts: list[Part],
    folder: Path,
    config: Teacher,
    load: CountedTeacher,
    *,
    batch_size: int,
    checkpoints: bool = False,
) -> None:
    """Parquet files of vectors by Ray Data's own operators, and an actor that is kept."""
    context = ray.data.DataContext.get_current()
    if checkpoints:
        context.checkpoint_config = CheckpointConfig(
            "id", str(folder / "checkpoints"), delete_checkpoint_on_success=False
        )
    try:
        paths, columns = [part.path for part in parts], ["id", "query", "positives"]
        rows = ray.data.read_parquet(paths, columns=columns, override_num_blocks=len(paths))
        made = rows.map_batches(
            EmbedBatch,
            fn_constructor_args=(config, weights_of(config.teacher), load),
            batch_size=batch_size,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(size=1),
            num_cpus=0,  # of two CPUs the actor that looks for checkpointed rows takes the other
        )
        made.write_parquet(str(folder / "vectors"))
    finally:
        context.checkpoint_config = None


def compare_vectors(root: Path, rows: int, files: int) -> None:
    """Print embedding all ways, and how far their vectors are apart."""
    (root / "teacher").mkdir(parents=True)
    config = write_teacher(root / "teacher")
    parts = write_parts(root / "records", rows, files)
    whole = parts[0].rows
    ways: dict[str, Callable[..., None]] = {
        "units": vectors_by_units,
        f"stream-in-{_BATCH}": partial(vectors_by_stream, batch_size=_BATCH),
        "stream-in-parts": partial(vectors_by_stream, batch_size=whole),
        "stream-with-checkpoints": partial(vectors_by_stream, batch_size=whole, checkpoints=True),
    }
    warm = CountedTeacher(str(root / "warm.json"))
    for name, way in ways.items():
        way(parts[:1], root / "warm" / name, config, warm)
    apart = {"in another folder": "other", "fails half-way": "cut", "goes on": "cut"}
    for name, way in ways.items():
        for run in ("first run", "again", *apart):
            folder = root / f"{name}-{apart.get(run, 'first')}"
            fails = rows + whole if "fails" in run else None
            load = CountedTeacher(f"{folder}.{run}.json", fails)
            began = time.monotonic()
            failing = suppress(Exception) if fails else nullcontext()
            with measured(f"embedding by {name}, {run}"), failing:
                way(parts, folder, config, load)
            done = load.done()
            assert fails is None or fails <= done.texts < 2 * rows
            print(f"    {time.monotonic() - began:.1f} s, {done}", flush=True)
            print(f"    {told(folder, ('vectors/**/*.np?', 'vectors/**/*.parquet'))}", flush=True)
    wanted = vectors_of_units(parts, root / "units-first")
    for name in [*ways][1:]:
        print(f"{name}: {apart_from(wanted, root / f'{name}-other')}", flush=True)


def vectors_of_units(parts: list[Part], folder: Path) -> dict[str, np.ndarray]:
    """Vectors (2, D) of each row's query and document by its id."""
    (settings,) = (folder / "data" / "vectors").iterdir()
    vectors, found = Vectors(str(settings), ""), {}
    for part in parts:
        documents = vectors.documents(part)[vectors.texts(part).place]
        both = np.stack([vectors.queries(part), documents], axis=1)
        found |= {record.id: two for record, two in zip(read_records(part.path), both, strict=True)}
    return found


def apart_from(wanted: dict[str, np.ndarray], folder: Path) -> str:
    """How far a stream's vectors are from those of the units; they must agree but for rounding."""
    table = pq.read_table(folder / "vectors")
    assert sorted(table["id"].to_pylist()) == sorted(wanted)
    of_units = np.stack([wanted[name] for name in table["id"].to_pylist()]).astype(np.float32)
    columns = [table[name].combine_chunks() for name in table.column_names[1:]]
    of_stream = [column.flatten().to_numpy() for column in columns]
    both = np.stack([flat.reshape(len(table), -1) for flat in of_stream], axis=1).astype(np.float32)
    most = np.abs(both - of_units).max()
    assert most < 1e-3, most
    return f"equal in {np.mean(both == of_units):.1%} of numbers, largest difference {most:.1e}"


def beside_the_teacher(root: Path, rows: int, width: int) -> float:
    """Seconds in which the actor of units reads and writes a part, and the teacher waits."""
    (part,) = write_parts(root / f"beside-{width}", rows, 1)
    made = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
    task = EmbedPart(
        Vectors(str(root / f"beside-{width}"), ""),
        Teacher(teacher="made up", dtype="float32"),
        lambda *_: lambda texts, role: made[: len(texts)],
    )
    began = time.monotonic()
    task(PartItem(part))
    return time.monotonic() - began


def compare_conversion(root: Path, rows: int, count: int) -> None:
    """Print conversion both ways."""
    each = rows // count
    files = [str(root / f"{number:03d}.jsonl") for number in range(count)]
    for number, file in enumerate(files):
        lines = [
            {"query": f"ask {i}", "positive": f"answer {i} " * 20}
            for i in range(number * each, number * each + each)
        ]
        Path(file).write_text("".join(json.dumps(line) + "\n" for line in lines))
    ways: dict[str, Callable[..., None]] = {"units": by_units, "stream": by_stream}
    for name, way in ways.items():
        way(files[:2], root / f"warm-{name}")  # workers start, modules are imported
    for name, way in ways.items():
        for run in ("first run", "again", "in another folder"):
            folder = root / (f"{name}-other" if "other" in run else name)
            with measured(f"{name}, {run}"):
                way(files, folder)
            print(f"    {told(folder / 'parts')}", flush=True)


def compare_tiny(count: int) -> None:
    """Print what units of nothing take in both cuts."""
    items = [File(str(number)) for number in range(count)]
    cut: Any = on_ray.next_units
    for name, cuts in (("a task each", lambda left, *_: (left, 1)), ("grouped", cut)):
        on_ray.next_units = cuts
        began = time.process_time()
        with measured(f"{count} units of nothing, {name}"):
            done = list(on_ray.execute_with_ray_data(Nothing(), items, "cpu"))
        assert len(done) == count
        print(f"    of them in the driver {time.process_time() - began:.1f}", flush=True)


def main() -> None:
    """Print all comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=16)
    parser.add_argument("--vectors", type=int, default=1024, help="rows that are embedded")
    parser.add_argument("--tiny", type=int, default=2000)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        connect()
        if asked.rows:
            compare_conversion(root, asked.rows, asked.files)
        if asked.vectors:
            compare_vectors(root / "embedding", asked.vectors, asked.files)
            for width in (384, 4096):
                beside = beside_the_teacher(root, 8192, width)
                print(
                    f"a part of 8,192 rows beside the teacher, {width} dimensions: {beside:.2f} s"
                )
        if asked.tiny:
            compare_tiny(asked.tiny)


if __name__ == "__main__":
    main()
