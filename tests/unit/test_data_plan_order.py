"""The order of a plan's rows: what it is, and what it takes of the driver's memory."""

import hashlib
import json
import tempfile
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rayembed.assets.array_files import save_arrays
from rayembed.data.engine import index
from rayembed.data.engine.parts import Part, index_path, write_part
from rayembed.data.plan.order import PlanConfig, draw_rows, usable_rows
from rayembed.data.plan.sampling import generator
from rayembed.data.plan.scratch import PlaceWriter, scratch_folder
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record
from rayembed.errors import StorageFullError


def parts_of(folder: Path, rows: list[Record], size: int) -> list[Part]:
    return [write_part(str(folder), rows[i : i + size]) for i in range(0, len(rows), size)]


ORDERS = {
    "blended 0 - 23": "83cf316de2",
    "blended 0 2.0 40": "21f9165f39",
    "blended 1 - 23": "ffa6d65482",
    "blended 1 2.0 40": "ff595901f9",
    "homogeneous 0 - 23": "5576b97f9a",
    "homogeneous 0 2.0 40": "76cad3230b",
    "homogeneous 1 - 23": "db8e2109c5",
    "homogeneous 1 2.0 40": "4d91ae2bd4",
    "clustered 0 - 23": "ccd8793644",
    "clustered 0 2.0 40": "7d4adecfb1",
    "clustered 1 - 23": "ba2223aeb1",
    "clustered 1 2.0 40": "1291632d49",
}
"""Hashes of plans, of an implementation that had a query once in each batch, whatever its rows."""


def made_up_rows(name: str, count: int) -> list[Record]:
    """Queries that come twice, three languages or none, rows without negatives."""
    return [
        Record(
            id=f"{name}/{i}",
            query=f"query {i % (count // 2)}",
            positives=(f"positive {name} {i}",),
            negatives=tuple(Negative(f"negative {i} {j}") for j in range(i % 4)),
            dataset=name,
            in_batch=i % 11 != 0,
            language=[None, "fr", "es", "fr", "de"][i % 5 if i % 30 else 4],
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("runs", ["one run", "many runs"])
def test_the_order_of_rows_is_what_it_always_was(runs: str, tmp_path: Path, monkeypatch) -> None:
    if runs == "many runs":  # of rows that are sorted, of their places, of shuffled rows
        monkeypatch.setattr("rayembed.data.plan.scratch.ROWS_OF_RUN", 30)
        monkeypatch.setattr("rayembed.data.plan.scratch._PARTS_OF_FILE", 3)
        monkeypatch.setattr("rayembed.data.plan.write.ROWS_PER_FILE", 24)
        monkeypatch.setattr("rayembed.data.engine.shuffle.FAN_OUT", 3)
        monkeypatch.setattr(index, "PARTS_OF_CHUNK", 4)
    size = 60 if runs == "one run" else 30
    parts = {
        name: parts_of(tmp_path / name, made_up_rows(name, count), size)
        for name, count in (("a", 240), ("b", 132), ("c", 96))
    }
    found = {}
    for case in list(ORDERS) if runs == "one run" else list(ORDERS)[1::4]:
        policy, seed, temperature, steps = case.split()
        settings = PlanConfig(
            {"a": 2.0, "b": 1.0, "c": 0.5},
            global_pairs=12,
            num_negatives=2,
            num_steps=int(steps),
            seed=int(seed),
            in_batch_negatives=True,
            key="stage",
            policy=policy,
            temperature=None if temperature == "-" else float(temperature),
        )
        pairs = dict.fromkeys(parts, 12)
        plan = write_plan(str(tmp_path / case), parts, settings, batch_pairs=pairs)
        told = json.dumps([plan.fingerprint, plan.manifest["datasets"]], sort_keys=True)
        found[case] = hashlib.sha256(told.encode()).hexdigest()[:10]
    assert found == {case: ORDERS[case] for case in found}


def made_up_indexes(folder: Path, rows: int, rows_per_part: int = 4000) -> list[Part]:
    """Parts that have an index and no rows."""
    rng = np.random.default_rng(0)
    parts = []
    for first in range(0, rows, rows_per_part):
        part = Part(str(folder / f"part-{first:09d}.parquet"), rows_per_part)
        save_arrays(
            index_path(part.path),
            id_hash=rng.integers(-(2**62), 2**62, part.rows),
            query_hash=rng.integers(-(2**62), 2**62, part.rows),
            num_negatives=np.ones(part.rows, np.int32),
            in_batch=np.ones(part.rows, bool),
            language_hash=np.arange(part.rows) % 3,
        )
        parts.append(part)
    return parts


@pytest.mark.parametrize("policy", ["blended", "homogeneous"])
def test_the_driver_holds_few_bytes_a_row(policy: str, tmp_path: Path, monkeypatch) -> None:
    """More rows are more files, and four bytes of an epoch's permutation."""
    monkeypatch.setattr("rayembed.data.plan.scratch.ROWS_OF_RUN", 4000)
    monkeypatch.setattr("rayembed.data.plan.scratch._PARTS_OF_FILE", 1)
    monkeypatch.setattr("rayembed.data.plan.scratch._BUFFERED", 4000)
    monkeypatch.setattr(index, "PARTS_OF_CHUNK", 1)
    peaks = {}
    for rows in (40_000, 160_000):
        folder = tmp_path / str(rows)
        folder.mkdir()
        parts = made_up_indexes(folder, rows)
        config = PlanConfig({"d": 1.0}, 500, 1, rows // 500, 0, True, policy=policy)
        tracemalloc.start()
        with scratch_folder("test", 0) as scratch:
            usable = usable_rows({"d": parts}, config, {}, scratch)
            places = PlaceWriter(scratch, str(folder), parts)
            draw_rows(usable, config, places.add)
            items = places.finish()
        peaks[rows] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(items) == len(parts)
    assert (peaks[160_000] - peaks[40_000]) / 120_000 < 6


@pytest.mark.parametrize("count", [0, 1, 2, 1000, 70_001])
def test_a_shuffle_of_short_numbers_is_the_permutation(count: int) -> None:
    """What halves the memory of an epoch: NumPy's draws do not look at the type."""
    order = np.arange(count, dtype=np.int32)
    generator(3, "key", "name", 1).shuffle(order)
    assert np.array_equal(order, generator(3, "key", "name", 1).permutation(count))


def test_scratch_of_a_killed_process_is_removed_and_that_of_a_living_one_stays(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = tmp_path / "rayembed-rows-killed"
    killed.mkdir()
    killed.with_suffix(".lock").touch()
    (killed / "run-0").write_bytes(b"rows")
    with scratch_folder("first", 0) as first:
        assert not killed.exists()
        with scratch_folder("second", 0) as second:
            assert first.exists()
            assert second.exists()
    assert not list(tmp_path.iterdir())


def test_processes_that_sweep_while_others_end_harm_nobody(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def come_and_go(number: int) -> None:
        for _ in range(100):
            with scratch_folder("test", 0) as scratch:
                (scratch / "run-0").write_bytes(b"rows")
                assert (scratch / "run-0").exists()

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(come_and_go, range(8))) == [None] * 8
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_too_little_scratch_is_told_before_work(tmp_path: Path, monkeypatch) -> None:
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr("rayembed.data.plan.scratch.shutil.disk_usage", lambda path: usage)
    parts = parts_of(tmp_path, made_up_rows("a", 24), 24)
    config = PlanConfig({"a": 1.0}, 12, 2, 2, 0, True, "stage")
    told = r"the order of stage 'stage' needs [\d,]+ bytes .* has only 1,000 bytes free.*set TMPDIR"
    with pytest.raises(StorageFullError, match=told):
        write_plan(str(tmp_path / "plan"), {"a": parts}, config)
    assert not (tmp_path / "plan").exists()
