"""Cleaning as a part of the first step: what goes for which reason, reuse, kills, parts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.cleaning.rows import drawn, first_of_each
from rayembed.data.engine import parts
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut
from rayembed.errors import DataError

EVALUATION = [
    " ".join(f"{word}{i}" for word in ("which", "river", "flows", "through", "the", "old", "town"))
    for i in range(5)
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Forty rows of their own, copies, near-copies, and rows with evaluation texts."""
    folder = tmp_path / "in"
    folder.mkdir()
    rng = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, 2000, count))

    rows = [{"query": text(8), "positive": text(40)} for _ in range(40)]
    near = [
        {"query": row["query"], "positive": row["positive"].rsplit(" ", 1)[0]} for row in rows[:6]
    ]
    evaluated = [
        {"query": text.upper(), "positive": f"it is w{i}"} for i, text in enumerate(EVALUATION[:3])
    ]
    evaluated.append({"query": "which one", "positive": EVALUATION[3] + " today"})
    rows += [*rows[:4], *near, *evaluated]
    order = rng.permutation(len(rows))
    (folder / "pairs.jsonl").write_text("\n".join(json.dumps(rows[i]) for i in order))
    (folder / "evaluation.txt").write_text("\n".join(EVALUATION))
    return folder


def dataset(**changes: Any) -> DatasetConfig:
    cleaning = {
        "near_duplicates": {"threshold": 0.8},
        "overlap": {"tasks": ["evaluation.txt"]},
    }
    values = {
        "name": "own",
        "source": {"kind": "pairs", "path": "pairs.jsonl"},
        "cleaning": cleaning,
    }
    return parse(DatasetConfig, values | changes)


def make(
    root: Path, storage: Path, config: DatasetConfig, execute: Execute = in_process
) -> DatasetArtifact:
    pipeline_context = PipelineContext(str(storage), 0, execute, root=str(root))
    return make_records(pipeline_context, check_source(config, str(root)), HeldOut())


def ids(prepared: DatasetArtifact) -> list[str]:
    return [record.id for part in prepared.parts for record in read_records(part.path)]


def test_every_row_is_there_or_dropped_for_a_reason(root: Path, tmp_path: Path) -> None:
    made = make(root, tmp_path / "out", dataset())
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
    assert some.manifest["dropped"]["not drawn (num_samples)"] == 15
    assert some.manifest["rows_out"] == 25
    assert set(ids(some)) < set(ids(clean))


def test_the_outcome_is_the_same_in_other_parts_and_another_order(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make(root, tmp_path / "a", dataset(num_samples=30))
    monkeypatch.setattr("rayembed.data.engine.parts.ROWS_PER_PART", 7)
    lines = (root / "pairs.jsonl").read_text().splitlines()
    (root / "pairs.jsonl").write_text("\n".join(lines[::-1]))
    cut = make(root, tmp_path / "b", dataset(num_samples=30))
    assert len(cut.parts) > len(whole.parts) == 1
    assert sorted(ids(cut)) == sorted(ids(whole))
    assert cut.manifest["dropped"] == whole.manifest["dropped"]


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


def test_a_killed_cleaning_goes_on_and_ends_the_same(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayembed.data.engine.parts.ROWS_PER_PART", 20)
    whole = make(root, tmp_path / "a", dataset())
    calls = 0

    def dies(task, units, needs):
        nonlocal calls
        for number, unit in enumerate(units):
            if number == 1:
                raise KeyboardInterrupt
            calls += 1
            yield task(unit)

    for _ in range(60):
        try:
            found = make(root, tmp_path / "b", dataset(), dies)
        except KeyboardInterrupt:
            continue
        break
    assert calls > 10
    assert found.manifest["parts"] == whole.manifest["parts"]
    assert found.manifest["dropped"] == whole.manifest["dropped"]
    calls = 0
    again = make(root, tmp_path / "b", dataset(), dies)
    assert (again.folder, again.manifest, again.reused) == (found.folder, found.manifest, True)
    assert calls == 0


def test_what_the_benchmarks_hold_decides_and_not_where_it_lies(root: Path, tmp_path: Path) -> None:
    first = make(root, tmp_path, dataset())
    moved = tmp_path / "elsewhere" / "evaluation.txt"
    moved.parent.mkdir()
    moved.write_text((root / "evaluation.txt").read_text())
    absolute = dataset(
        cleaning={
            "near_duplicates": {"threshold": 0.8},
            "overlap": {"tasks": [str(moved)]},
        }
    )
    assert make(root, tmp_path, absolute).folder == first.folder
    (root / "evaluation.txt").write_text(EVALUATION[0])
    other = make(root, tmp_path, dataset())
    assert other.folder != first.folder
    assert other.manifest["dropped"]["text of a benchmark"] == 1


def test_a_data_set_of_which_nothing_stays_is_an_error(root: Path, tmp_path: Path) -> None:
    rows = [json.dumps({"query": text, "positive": "anything"}) for text in EVALUATION]
    (root / "pairs.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"'own': cleaning leaves none of its 5 rows \(5 × text of"):
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
