"""Cleaning as a part of the first step: what goes for which reason, reuse, kills, parts."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rows_to_clean import (
    EVALUATION,
    check_killed,
    check_parts_and_order,
    dataset,
    ids,
    make,
    write_rows_to_clean,
)

from rayembed.data.cleaning.rows import drawn, first_of_each
from rayembed.data.engine import parts
from rayembed.data.engine.parts import read_records
from rayembed.errors import DataError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_rows_to_clean(tmp_path / "in")


def test_every_row_is_there_or_dropped_for_a_reason(root: Path, tmp_path: Path) -> None:
    made = make(root, tmp_path / "out", dataset())
    assert made.manifest["dropped"] == {"duplicate": 4, "text of a benchmark": 4}
    assert (made.manifest["rows_in"], made.manifest["rows_out"]) == (54, 46)
    listed = pq.read_table(Path(made.folder) / "removed").to_pylist()
    assert [row["reason"] for row in listed] == ["text of a benchmark"] * 4
    shown = made.manifest["removed"]
    assert {row["reason"] for row in shown} == set(made.manifest["dropped"]) - {"duplicate"}
    assert all(row in listed for row in shown)
    left = set(ids(made))
    assert len(left) == 46
    for row in listed:
        assert row["id"] not in left
    assert not list((tmp_path / "out").rglob("working"))
    # Without the settings these rows stay.
    plain = make(root, tmp_path / "out", dataset(cleaning={}))
    assert plain.manifest["dropped"] == {"duplicate": 4}
    assert left < set(ids(plain))
    assert not (Path(plain.folder) / "removed").exists()


def test_negatives_with_evaluation_texts_go_from_rows_that_stay(root: Path, tmp_path: Path) -> None:
    long = " ".join(f"v{i}" for i in range(30))
    rows = [json.loads(line) for line in (root / "pairs.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["negatives"] = [f"bad {i}", f"{long} {EVALUATION[i % 5]} {long}", f"worse {i}"]
    (root / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overlap = {"tasks": ["evaluation.txt"], "contained": {"shortest": 7}, "negatives": True}
    source = {"kind": "pairs", "path": "pairs.jsonl", "negatives": "negatives"}
    config = dataset(source=source, cleaning={"overlap": overlap}, num_samples=30)
    made = make(root, tmp_path / "out", config)
    records = [record for part in made.parts for record in read_records(part.path)]
    assert (len(records), made.manifest["negatives_overlap"]) == (30, 30)
    for record in records:
        first, second = (negative.text for negative in record.negatives)
        assert (first.split()[0], second.split()[0]) == ("bad", "worse")
        assert first.split()[1] == second.split()[1], "the same row's"
    plain = make(root, tmp_path / "out", dataset(source=source, cleaning={}, num_samples=30))
    assert {len(r.negatives) for p in plain.parts for r in read_records(p.path)} == {3}
    assert "negatives_overlap" not in plain.manifest


def test_samples_are_drawn_of_what_is_clean(root: Path, tmp_path: Path) -> None:
    clean = make(root, tmp_path, dataset())
    some = make(root, tmp_path, dataset(num_samples=25))
    assert some.manifest["dropped"]["not drawn (num_samples)"] == 21
    assert some.manifest["rows_out"] == 25
    assert set(ids(some)) < set(ids(clean))


def test_the_outcome_is_the_same_in_other_parts_and_another_order(
    root: Path, tmp_path: Path
) -> None:
    check_parts_and_order(root, tmp_path, dataset(num_samples=30))


def test_parts_of_a_large_source_have_more_rows_and_the_same_outcome(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [parts.rows_per_part(millions << 20) for millions in (0, 31, 32, 63, 64, 9999)] == [
        *(8192, 8192, 16_384, 16_384, 32_768, 32_768)
    ]
    monkeypatch.setattr(parts, "ROWS_PER_PART", 7)
    usual = make(root, tmp_path / "a", dataset())
    size = (root / "pairs.jsonl").stat().st_size
    monkeypatch.setattr(parts, "MANY_ROWS", size // 1024 // 2)
    larger = make(root, tmp_path / "b", dataset())
    assert -(-len(usual.parts) // 4) == len(larger.parts) < len(usual.parts)
    assert ids(larger) == ids(usual)
    assert larger.manifest["dropped"] == usual.manifest["dropped"]


def test_a_killed_cleaning_goes_on_and_ends_the_same(root: Path, tmp_path: Path) -> None:
    check_killed(root, tmp_path, dataset(), least=4)


def test_what_the_benchmarks_hold_decides_and_not_where_it_lies(root: Path, tmp_path: Path) -> None:
    first = make(root, tmp_path, dataset())
    moved = tmp_path / "elsewhere" / "evaluation.txt"
    moved.parent.mkdir()
    moved.write_text((root / "evaluation.txt").read_text())
    absolute = dataset(cleaning={"overlap": {"tasks": [str(moved)]}})
    assert make(root, tmp_path, absolute).folder == first.folder
    (root / "evaluation.txt").write_text(EVALUATION[0])
    other = make(root, tmp_path, dataset())
    assert other.folder != first.folder
    assert other.manifest["dropped"]["text of a benchmark"] == 1


def test_a_data_set_of_which_nothing_stays_is_an_error(root: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"query": text, "positive": "anything"}) for text in EVALUATION]
    (root / "pairs.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"'own': cleaning removes all of its 5 rows \(5 × text of"):
        make(root, tmp_path, dataset(cleaning={"overlap": {"tasks": ["evaluation.txt"]}}))


@pytest.mark.parametrize("rows_of_run", [100, 10**6])
def test_duplicates_and_samples_depend_on_ids_alone(
    rows_of_run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayembed.data.plan.scratch.ROWS_OF_RUN", rows_of_run)
    monkeypatch.setattr("rayembed.data.cleaning.rows._ROWS_AT_ONCE", 70)
    rng = np.random.default_rng(0)
    hashes = rng.integers(-(2**63), 2**63 - 1, 1000)
    twice = np.concatenate([hashes, hashes[:50]])
    keep = first_of_each(twice, tmp_path)
    assert keep.tolist() == [True] * 1000 + [False] * 50
    chosen = drawn(twice, keep, 300, 0)
    assert chosen.sum() == 300
    assert (keep | ~chosen).all()
    order = rng.permutation(1050)
    again = drawn(twice[order], first_of_each(twice[order], tmp_path), 300, 0)
    assert sorted(twice[order][again]) == sorted(twice[chosen])
    assert sorted(twice[drawn(twice, keep, 300, 1)]) != sorted(twice[chosen])
    assert 100 < (twice[chosen] > 0).sum() < 200, "drawn evenly over ids"
    assert (drawn(twice, keep, 2000, 0) == keep).all()
