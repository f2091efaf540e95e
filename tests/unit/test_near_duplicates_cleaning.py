"""Near-duplicates as a part of the cleaning, before texts of benchmarks; a data set's setting."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rows_to_clean import (
    check_killed,
    check_parts_and_order,
    dataset,
    ids,
    make,
    write_rows_to_clean,
)
from several_jobs import CHECKS, records_of

from rayembed.errors import ConfigError
from rayembed_extras.near_duplicates.settings import NearDuplicates

CLEANING = {"near_duplicates": {"threshold": 0.8}, "overlap": {"tasks": ["evaluation.txt"]}}


def test_every_row_is_there_or_dropped_for_a_reason(tmp_path: Path) -> None:
    root = write_rows_to_clean(tmp_path / "in")
    made = make(root, tmp_path / "out", dataset(cleaning=CLEANING))
    assert made.manifest["dropped"] == {
        "duplicate": 4,
        "near-duplicate": 6,
        "text of a benchmark": 4,
    }
    assert (made.manifest["rows_in"], made.manifest["rows_out"]) == (54, 40)
    listed = pq.read_table(Path(made.folder) / "removed").to_pylist()
    assert sorted(row["reason"] for row in listed) == (
        ["near-duplicate"] * 6 + ["text of a benchmark"] * 4
    )
    shown = made.manifest["removed"]
    assert {row["reason"] for row in shown} == set(made.manifest["dropped"]) - {"duplicate"}
    assert all(row in listed for row in shown)
    left = set(ids(made))
    assert len(left) == 40
    for row in listed:
        assert row["id"] not in left
        if row["reason"] == "near-duplicate":
            assert row["matched"] in left
    assert not list((tmp_path / "out").rglob("working"))
    # Without the setting these rows stay.
    plain = make(root, tmp_path / "out", dataset())
    assert plain.manifest["dropped"] == {"duplicate": 4, "text of a benchmark": 4}
    assert left < set(ids(plain))


def test_neither_parts_nor_order_nor_kills_change_the_outcome(tmp_path: Path) -> None:
    root = write_rows_to_clean(tmp_path / "in")
    config = dataset(cleaning=CLEANING)
    check_killed(root, tmp_path / "killed", config, least=10)
    check_parts_and_order(root, tmp_path, dataset(cleaning=CLEANING, num_samples=30))


@pytest.mark.parametrize("check", CHECKS)
def test_what_holds_for_every_step(check: Any, tmp_path: Path) -> None:
    near = {"threshold": 0.8, "ngram": 1, "of": "positive"}
    overlap = {"tasks": ["evaluation.txt"]}
    source = {"kind": "pairs", "path": "pairs"}
    check(records_of(source, {"near_duplicates": near, "overlap": overlap}), tmp_path)


def test_a_missing_library_is_named_before_rows_are_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(name: str) -> Any:
        return None if name == "datasketch" else find_spec(name)

    root = write_rows_to_clean(tmp_path / "in")
    monkeypatch.setattr("rayembed.errors.find_spec", without)
    with pytest.raises(ConfigError, match=r"cleaning\.near_duplicates needs datasketch.*install"):
        make(root, tmp_path / "out", dataset(cleaning=CLEANING))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr("rayembed.errors.find_spec", find_spec)
    NearDuplicates().check("data.datasets.pairs.cleaning.near_duplicates")
