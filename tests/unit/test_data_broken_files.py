"""Files of data that are damaged, gone or do not fit: told with path and remedy, never misread."""

import errno
import io
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_up_records import made_up_records

from rayembed.assets.array_files import load_array, save_array
from rayembed.assets.store import Entry
from rayembed.data.engine.index import index_chunks
from rayembed.data.engine.parts import SCHEMA, Part, read_records, read_table, write_part
from rayembed.data.engine.shuffle import read_bucket, write_buckets
from rayembed.data.given_rows import rows_file
from rayembed.data.plan.batch_plan import BatchPlan, finish
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Record
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import read_rows
from rayembed.data.vectors.embed import Vectors, texts_of
from rayembed.errors import ArtifactError, DataError, StorageError, StorageFullError

ROWS, STEPS, BATCH = 96, 6, 16
STEP_FILE = "steps-000000000.parquet"


@pytest.fixture
def part(tmp_path) -> Part:
    return write_part(str(tmp_path / "data" / "records" / "own-1" / "parts"), own_records())


def own_records() -> list[Record]:
    return [replace(record, dataset="own") for record in made_up_records(ROWS)]


def planned(part: Part, folder: Path | str) -> BatchPlan:
    settings = PlanConfig({"own": 1.0}, BATCH, 2, STEPS, 0, True)
    return write_plan(str(folder), {"own": [part]}, settings)


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def readers(part: Part, folder: Path) -> dict[str, tuple[Path, Callable[[], Any]]]:
    """Files of each kind, and what reads all of them."""
    plan = planned(part, folder / "plans" / "own-1")
    buckets, vectors = str(folder / "rows.arrow"), str(folder / "vectors.npy")
    table = read_table(part.path, ["id", "query"])
    write_buckets(buckets, table, np.arange(ROWS) % 4, 4)
    save_array(vectors, np.random.default_rng(0).normal(size=(ROWS, 8)).astype(np.float16))

    def read_plan() -> list[Any]:
        fresh = BatchPlan(plan.folder, plan.manifest)  # no footer is kept from earlier
        return [record for step in range(STEPS) for record in fresh.read(step)]

    def read_buckets() -> list[Any]:
        tables = [table for number in range(4) for table in read_bucket([buckets], number)]
        return [None if table is None else table.to_pylist() for table in tables]

    return {
        "part": (Path(part.path), lambda: read_records(part.path)),
        "columns": (Path(part.path), lambda: read_table(part.path, ["language"]).to_pylist()),
        "index": (
            Path(part.path).with_suffix(".index.npz"),
            lambda: [array.tobytes() for array in vars(next(index_chunks([part]))).values()],
        ),
        "plan": (Path(plan.folder, STEP_FILE), read_plan),
        "buckets": (Path(buckets), read_buckets),
        "vectors": (Path(vectors), lambda: load_array(vectors).tobytes()),
    }


@pytest.mark.parametrize("name", ["part", "columns", "index", "plan", "buckets", "vectors"])
def test_no_flipped_bit_is_read_as_another_value(part, tmp_path, name):
    path, read = readers(part, tmp_path)[name]
    content, wanted = path.read_bytes(), read()
    rng = random.Random(0)
    # The footer, and what else stands at the end, is a small share of large files.
    bits = [rng.randrange(8 * len(content)) for _ in range(40)]
    bits += [8 * len(content) - 1 - rng.randrange(8 * 1000) for _ in range(20)]
    errors = []
    for bit in bits:
        path.write_bytes(flipped(content, bit))
        try:
            assert read() == wanted, bit
        except ArtifactError as error:
            errors.append(error)
    assert len(errors) >= (10 if name == "columns" else 40)
    assert {type(error) for error in errors} == {ArtifactError}, "no later try helps"
    assert all(str(path) in str(error) and "Remove" in str(error) for error in errors)
    path.write_bytes(content)
    assert read() == wanted


def test_without_checksums_flipped_bits_are_read_as_other_records():
    """The control: what the test above does not find is there to be found."""
    table = pa.Table.from_pylist([r.to_row() for r in own_records()], SCHEMA)
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    content, rng, others = buffer.getvalue(), random.Random(0), 0
    for _ in range(60):
        changed = flipped(content, rng.randrange(8 * len(content)))
        try:
            others += not pq.ParquetFile(pa.BufferReader(changed)).read().equals(table)
        except (OSError, ValueError):
            continue
    assert others > 0


ROWS_GIVEN = [(f"ask {i}", f"answer {i}") for i in range(60)]


@pytest.mark.parametrize("sealed", [True, False])
def test_no_flipped_bit_of_rows_in_memory_gives_other_rows(tmp_path, sealed):
    """Which a job reads as files of others, of whose footers nothing is known: the control."""
    path = Path(rows_file(ROWS_GIVEN, str(tmp_path)))
    if not sealed:
        pq.write_table(pq.read_table(path), path, write_page_checksum=True)
    content, rng, others, refused = path.read_bytes(), random.Random(0), 0, 0

    def read() -> list[Any]:
        pieces = list_pieces(str(path), versions=False)
        return [row.values for piece in pieces for row in read_rows(piece)]

    wanted = read()
    for bit in (8 * len(content) - 1 - rng.randrange(8 * 1000) for _ in range(400)):
        path.write_bytes(flipped(content, bit))
        try:
            others += read() != wanted
        except (ArtifactError, DataError):
            refused += 1
    assert refused > 200
    assert (others == 0) == sealed
    assert rows_file(ROWS_GIVEN, str(tmp_path)) == str(path), "and the next call writes it anew"
    assert read() == wanted


@pytest.mark.parametrize("damage", ["gone", "cut", "unsealed"])
def test_a_part_that_is_gone_or_no_longer_whole_is_told_with_the_folder_to_remove(
    part, tmp_path, damage
):
    path = Path(part.path)
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    else:
        pq.write_table(pq.read_table(path), path)
    folder = tmp_path / "data" / "records" / "own-1"
    told = rf"{path.name}.*Remove the folder '{folder}' and start the job again"
    with pytest.raises(ArtifactError, match=told) as caught:
        planned(part, tmp_path / "plan")
    assert not isinstance(caught.value, StorageError)


def test_a_read_that_fails_once_is_made_again(part, monkeypatch):
    wanted = read_records(part.path)
    monkeypatch.setattr(
        "rayembed.assets.arrow_files._sealed_footer", fails_once("curlCode: 56", _footer_of(part))
    )
    assert read_records(part.path) == wanted


def _footer_of(part: Part) -> Callable[[Any], pq.FileMetaData]:
    return lambda file: pq.read_metadata(part.path)


def fails_once(message: str, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
    left = [OSError(message)]

    def call(argument: Any) -> Any:
        if left:
            raise left.pop()
        return work(argument)

    return call


def test_a_plan_whose_manifest_is_cut_off_is_told_with_the_folder_to_remove(part, tmp_path):
    folder = tmp_path / "plans" / "stage-1"
    planned(part, folder)
    manifest = folder / "manifest.json"
    whole = manifest.read_bytes()
    for content in (whole[:100], b"[]", b""):
        manifest.write_bytes(content)
        told = rf"file '{manifest}' is broken: .*Remove the folder '{folder}'"
        with pytest.raises(ArtifactError, match=told):
            BatchPlan.open(str(folder))
        with pytest.raises(ArtifactError, match=told):
            planned(part, folder)
    manifest.write_bytes(whole)
    assert planned(part, folder).num_steps == STEPS


@pytest.mark.parametrize("damage", ["gone", "renamed", "cut"])
def test_a_file_of_a_finished_plan_is_missed_before_a_step_is_read(part, tmp_path, damage):
    folder = tmp_path / "plans" / "stage-1"
    planned(part, folder)
    assert planned(part, folder).num_steps == STEPS, "the control"
    path = folder / STEP_FILE
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "renamed":
        path.rename(folder / "steps-000000001.parquet")
    else:
        path.write_bytes(content[:-1])
    seen = f"has {len(content) - 1:,} of" if damage == "cut" else "is missing"
    told = rf"file '{path}' of the batch plan {seen}.*Remove the folder '{folder}'"
    with pytest.raises(ArtifactError, match=told):
        planned(part, folder)


def test_no_plan_is_finished_without_one_of_its_files(part, tmp_path):
    folder = tmp_path / "plans" / "stage-1"
    manifest = planned(part, folder).manifest
    size = (folder / STEP_FILE).stat().st_size
    assert manifest["files"] == {STEP_FILE: size}
    (folder / "manifest.json").unlink()
    (folder / STEP_FILE).unlink()
    told = rf"missing, for .*{STEP_FILE}'.*Remove the folder '{folder}'"
    with pytest.raises(ArtifactError, match=told):
        finish(Entry(str(folder)), manifest)
    assert not (folder / "manifest.json").exists()


def test_a_plan_without_its_manifest_is_made_again(part, tmp_path):
    folder = tmp_path / "plans" / "stage-1"
    wanted = planned(part, folder).fingerprint
    (folder / "manifest.json").unlink()
    assert planned(part, folder).fingerprint == wanted


def test_vectors_with_nan_on_disk_are_refused(part, tmp_path):
    vectors = Vectors(str(tmp_path / "vectors"), "weights")
    records = read_records(part.path)
    texts, known = texts_of(records)
    queries, documents = np.ones((len(records), 4)), np.ones((len(texts), 4))
    vectors.save(part, queries, documents, known)
    assert np.isfinite(vectors.documents(part)).all(), "the control"
    documents[7] = np.nan
    vectors.save(part, queries, documents, known)
    with pytest.raises(
        ArtifactError, match=r"has NaN or infinity in 1 of .* Remove the file and start"
    ):
        vectors.documents(part)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_is_told_and_the_job_goes_on_when_there_is_room(
    part, tmp_path, monkeypatch, number
):
    folder = tmp_path / "plans" / "stage-1"
    left = [3]
    real = os.fsync

    def fills_up(handle: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fills_up)
        with pytest.raises(StorageFullError, match=rf"'{folder}/.*Make room"):
            planned(part, folder)
    assert left[0] < 0
    assert not (folder / "manifest.json").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    again = planned(part, folder)
    assert again.fingerprint == planned(part, tmp_path / "undisturbed").fingerprint
