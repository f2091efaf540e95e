"""The batch plan: what stands in each global batch, decided before training and kept in files.

The plan knows no workers: worker r of W reads the slots [r·G/W, (r+1)·G/W) of each step, so the
batches are the same for every W, and the plan can be read from any step with any W; so training may
go on with another number of workers than wrote its checkpoint.
G rows of a global batch.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from filelock import FileLock

from rayembed.assets.storage import exists, is_remote, join, open_storage, read_bytes, write_atomic
from rayembed.config.run import fingerprint
from rayembed.data.parts import Part, PartIndex, read_index
from rayembed.data.plan.blended import Rows, blended
from rayembed.data.plan.files import (
    ROWS_PER_FILE,
    ROWS_PER_GROUP,
    Block,
    Gather,
    PartPlaces,
    Scatter,
    file_name,
    part_places,
)
from rayembed.data.records import SCHEMA, Record
from rayembed.data.units import Execute, in_process, run_units
from rayembed.errors import ArtifactError, DataError

log = logging.getLogger(__name__)

VERSION = 1
"""Of the layout on disk; a plan of another version is made again."""

MAX_SHARE_WITHOUT_NEGATIVES = 0.5
"""Where rows learn from hard negatives alone, those that have none are left out and counted: of
Wikipedia's descriptions 3, of its sentences 7 percent have a positive that scores so low that all
100 candidates exceed the limit. More of them than this share are a mistake in the settings."""

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class PlanConfig:
    """What decides a plan, beside the rows."""

    weights: Mapping[str, float]
    """Share of each data set."""
    global_pairs: int
    num_negatives: int
    num_steps: int
    seed: int
    in_batch_negatives: bool
    """Whether the stage uses in-batch negatives at all; otherwise every row needs hard ones."""
    key: str = ""
    """Names the stage, so that two stages with one seed draw differently."""
    policy: str = "blended"
    temperature: float | None = None


@dataclass(frozen=True)
class BatchPlan:
    """A finished plan on disk. Picklable; files are opened when they are read."""

    folder: str
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, folder: str) -> "BatchPlan":
        """The plan in the folder (a local path, `s3://…` or `gs://…`).

        Raises:
            ArtifactError: no finished plan of this version there.
        """
        path = join(folder, MANIFEST)
        if not exists(path):
            raise ArtifactError(f"there is no finished batch plan in {folder!r}: no {MANIFEST}")
        manifest = json.loads(read_bytes(path))
        if manifest.get("version") != VERSION:
            raise ArtifactError(
                f"the batch plan {folder!r} has the layout {manifest.get('version')!r}, this code "
                f"reads {VERSION}; prepare the data again"
            )
        return cls(folder, manifest)

    @property
    def num_steps(self) -> int:
        """Steps of the plan."""
        return int(self.manifest["num_steps"])

    @property
    def global_pairs(self) -> int:
        """Rows of each step, over all workers."""
        return int(self.manifest["global_pairs"])

    @property
    def num_negatives(self) -> int:
        """Most hard negatives of a row."""
        return int(self.manifest["num_negatives"])

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits of the content: every row at its place."""
        return str(self.manifest["fingerprint"])

    def read(self, step: int, worker: int = 0, num_workers: int = 1) -> list[Record]:
        """The records of one worker in one step, in slot order.

        Raises:
            DataError: no such step or worker, or the workers cannot share the batch equally.
            ArtifactError: a file of the plan is missing or broken.
        """
        if self.global_pairs % num_workers:
            raise DataError(
                f"{num_workers} workers cannot share batches of {self.global_pairs} pairs equally; "
                f"take a number of workers that divides {self.global_pairs}"
            )
        if not (0 <= step < self.num_steps and 0 <= worker < num_workers):
            raise DataError(
                f"the plan {self.folder!r} has steps 0 to {self.num_steps - 1} and was asked for "
                f"step {step}, worker {worker} of {num_workers}"
            )
        rows = self.global_pairs // num_workers
        first, last = worker * rows, (worker + 1) * rows
        place = step % self._steps_per_file
        groups_per_step = -(-self.global_pairs // ROWS_PER_GROUP)
        groups = range(first // ROWS_PER_GROUP, -(-last // ROWS_PER_GROUP))
        path = join(self.folder, file_name(step - place))
        filesystem, inside = open_storage(path)
        try:
            with filesystem.open_input_file(inside) as file:
                reader = pq.ParquetFile(file, metadata=self._footers.get(path))
                self._footers.clear()  # steps are read in order: one footer is enough
                self._footers[path] = reader.metadata
                wanted = [place * groups_per_step + group for group in groups]
                table = reader.read_row_groups(wanted)
        except (OSError, pa.ArrowException) as error:
            raise ArtifactError(f"cannot read the batch plan {path!r}: {error}") from error
        table = table.slice(first - groups[0] * ROWS_PER_GROUP, rows)
        slots = table["slot"].to_numpy()
        if not np.array_equal(slots, np.arange(first, last)) or set(table["step"].to_pylist()) != {
            step
        }:
            raise ArtifactError(f"the batch plan {path!r} does not hold step {step} where it must")
        return [Record.from_row(row) for row in table.select(SCHEMA.names).to_pylist()]

    def query_instructions(self) -> set[tuple[str, str]]:
        """The distinct pairs of a data set's name and a query instruction of its rows.

        Reads two columns of all files.

        Raises:
            ArtifactError: a file of the plan is missing or broken.
        """
        found: set[tuple[str, str]] = set()
        names = ["dataset", "query_instruction"]
        for first in range(0, self.num_steps, self._steps_per_file):
            path = join(self.folder, file_name(first))
            filesystem, inside = open_storage(path)
            try:
                with filesystem.open_input_file(inside) as file:
                    table = pq.ParquetFile(file).read(columns=names)
            except (OSError, pa.ArrowException) as error:
                raise ArtifactError(f"cannot read the batch plan {path!r}: {error}") from error
            distinct = table.group_by(names).aggregate([])
            found |= set(zip(*(distinct[name].to_pylist() for name in names), strict=True))
        return found

    @property
    def _steps_per_file(self) -> int:
        return int(self.manifest["steps_per_file"])

    @cached_property
    def _footers(self) -> dict[str, pq.FileMetaData]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "manifest": self.manifest}


def write_plan(
    folder: str,
    parts: Mapping[str, Sequence[Part]],
    config: PlanConfig,
    *,
    inputs: Mapping[str, str] | None = None,
    execute: Execute = in_process,
) -> BatchPlan:
    """The finished plan in `folder`; one that is there with the same inputs is taken as it is.

    Locally the folder appears when it is complete, and a lock beside it lets one run at a time
    make it: others that want the same plan wait and open what is there then. In object storage the
    manifest is written last and nothing is locked: let one run finish a plan before others start.

    Args:
        parts: of each data set that `config.weights` names.
        inputs: what the parts were made of, for the manifest and to know the plan again.

    Raises:
        DataError: a data set is empty, has too few rows for a batch, or has rows that could learn
            from nothing; before any file but the lock is written.
    """
    datasets = sorted(config.weights)
    wanted = fingerprint(
        {
            "version": VERSION,
            "config": _plain(config),
            "parts": {name: [part.digest for part in parts[name]] for name in datasets},
            "inputs": dict(inputs or {}),
        }
    )
    if (found := _finished(folder, wanted)) is not None:
        return found
    if is_remote(folder):
        return _write(folder, parts, config, inputs, execute, wanted)
    lock = Path(f"{open_storage(folder)[1].rstrip('/')}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock):
        if (found := _finished(folder, wanted)) is not None:
            return found
        return _write(folder, parts, config, inputs, execute, wanted)


def _finished(folder: str, wanted: str) -> BatchPlan | None:
    if not exists(join(folder, MANIFEST)):
        return None
    found = BatchPlan.open(folder)
    if found.manifest["made_of"] != wanted:
        raise ArtifactError(f"{folder!r} holds a plan of other data or settings; remove it")
    return found


def _write(
    folder: str,
    parts: Mapping[str, Sequence[Part]],
    config: PlanConfig,
    inputs: Mapping[str, str] | None,
    execute: Execute,
    wanted: str,
) -> BatchPlan:
    datasets = sorted(config.weights)
    began = time.monotonic()
    work = folder if is_remote(folder) else f"{folder.rstrip('/')}.{wanted}.partial"
    steps_per_file = max(1, ROWS_PER_FILE // config.global_pairs)
    rows, rejected = _usable_rows(datasets, parts, config)
    places = _all_places(datasets, parts, rows, config)
    scatter = Scatter(work, steps_per_file, config.num_negatives)
    scattered = run_units(work, f"plan {config.key} scatter", scatter, places, execute)
    files: dict[int, list[str]] = {}
    for result in scattered:
        for block, path in result["files"].items():
            files.setdefault(int(block), []).append(path)
    blocks = [
        Block(
            number,
            number * steps_per_file,
            min(steps_per_file, config.num_steps - number * steps_per_file),
            tuple(files[number]),
        )
        for number in sorted(files)
    ]
    gather = Gather(work, config.global_pairs)
    gathered = run_units(work, f"plan {config.key} gather", gather, blocks, execute)
    steps = [step for result in gathered for step in result["steps"]]
    drawn = {
        name: sum(int(result["rows_by_dataset"].get(name, 0)) for result in gathered)
        for name in datasets
    }
    assert len(steps) == config.num_steps
    assert sum(drawn.values()) == config.num_steps * config.global_pairs
    manifest = {
        "version": VERSION,
        **_plain(config),
        "steps_per_file": steps_per_file,
        "fingerprint": hashlib.sha256("".join(steps).encode()).hexdigest()[:12],
        "made_of": wanted,
        "inputs": dict(inputs or {}),
        "datasets": {
            name: {
                "rows": len(rows[name][1]),
                "rejected": rejected[name],
                "drawn": drawn[name],
                "epochs": round(drawn[name] / len(rows[name][1]), 3),
            }
            for name in datasets
        },
        "seconds": round(time.monotonic() - began, 3),
    }
    return _finish(folder, work, manifest)


def _finish(folder: str, work: str, manifest: Mapping[str, Any]) -> BatchPlan:
    filesystem, inside = open_storage(work)
    for rest in ("scattered", "units"):
        info = filesystem.get_file_info(join(inside, rest))
        if info.type == pyarrow.fs.FileType.Directory:
            filesystem.delete_dir(info.path)
    content = json.dumps(manifest, indent=1, ensure_ascii=False).encode()
    write_atomic(join(work, MANIFEST), content)
    if work != folder:
        filesystem.move(inside, open_storage(folder)[1])
    log.info("batch plan %s: %d steps", manifest["fingerprint"], manifest["num_steps"])
    return BatchPlan.open(folder)


def _plain(config: PlanConfig) -> dict[str, Any]:
    return {**vars(config), "weights": dict(sorted(config.weights.items()))}


def _usable_rows(
    datasets: Sequence[str], parts: Mapping[str, Sequence[Part]], config: PlanConfig
) -> tuple[dict[str, tuple[PartIndex, np.ndarray]], dict[str, dict[str, int]]]:
    """Of each data set the index and its usable rows, in the order of their ids' hashes."""
    rows: dict[str, tuple[PartIndex, np.ndarray]] = {}
    rejected: dict[str, dict[str, int]] = {}
    for name in datasets:
        index = read_index(parts[name])
        count = len(index.id_hash)
        if count == 0:
            raise DataError(f"data set {name!r} is empty: it has no usable row")
        negatives = np.minimum(index.num_negatives, config.num_negatives)
        learns = (index.in_batch & config.in_batch_negatives) | (negatives > 0)
        missing = int((~learns).sum())
        if missing > MAX_SHARE_WITHOUT_NEGATIVES * count:
            raise DataError(
                f"data set {name!r}: {missing} of {count} rows have no hard negatives, and "
                f"in-batch negatives are off for them in stage {config.key!r}, so they could learn "
                "from nothing; set mining for the data set, name its negatives column, or set "
                "in_batch_negatives=true for the stage and the data set"
            )
        if missing:
            log.warning(
                "stage %s: %d of %d rows of %s have no hard negatives and are left out",
                *(config.key, missing, count, name),
            )
        order = np.lexsort((np.arange(count), index.id_hash))
        rows[name] = index, order[learns[order]]
        rejected[name] = {"no negative": missing} if missing else {}
    total = sum(len(usable) for _, usable in rows.values())
    if total < config.global_pairs:
        raise DataError(
            f"stage {config.key!r}: its data sets have {total} rows in all, fewer than one global "
            f"batch of {config.global_pairs} pairs; lower batch.global_pairs or add rows"
        )
    return rows, rejected


def _all_places(
    datasets: Sequence[str],
    parts: Mapping[str, Sequence[Part]],
    rows: Mapping[str, tuple[PartIndex, np.ndarray]],
    config: PlanConfig,
) -> list[PartPlaces]:
    """The places of every part's rows, over all data sets."""
    order = [
        Rows(name, config.weights[name], rows[name][0].query_hash[rows[name][1]])
        for name in datasets
    ]
    shape = (config.num_steps, config.global_pairs)
    dataset, row = np.empty(shape, np.int32), np.empty(shape, np.int64)
    batches = blended(order, config.global_pairs, config.num_steps, config.seed, config.key)
    for number, batch in enumerate(batches):
        dataset[number], row[number] = batch.dataset, batch.row
    places: list[PartPlaces] = []
    for number, name in enumerate(datasets):
        step, slot = np.nonzero(dataset == number)
        chosen = rows[name][1][row[step, slot]]
        paths = [part.path for part in parts[name]]
        counts = [part.rows for part in parts[name]]
        places += part_places(paths, counts, chosen, step, slot.astype(np.int32))
    return places
