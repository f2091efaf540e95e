"""The batch plan: who reads does not change what stands in it."""

import collections
import dataclasses
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_records import made_up_records
from toy_model import ToyTokenizer

from rayembed.data.parts import Part, write_part
from rayembed.data.plan import files as plan_files
from rayembed.data.plan.batch_plan import BatchPlan, PlanConfig, write_plan
from rayembed.data.plan.blended import Rows, blended
from rayembed.data.plan.stream import read_steps
from rayembed.data.records import Negative, Record
from rayembed.errors import ArtifactError, DataError


def records(name: str, count: int, negatives: int = 3, same_query: int = 0) -> list[Record]:
    return [
        Record(
            id=f"{name}/{i}",
            query="same" if i < same_query else f"query {name} {i}",
            positives=(f"positive {name} {i}",),
            negatives=tuple(Negative(f"negative {name} {i} {j}", j, 0.5) for j in range(negatives)),
            dataset=name,
        )
        for i in range(count)
    ]


def parts_of(folder: Path, rows: list[Record], size: int = 7) -> list[Part]:
    return [write_part(str(folder), rows[i : i + size]) for i in range(0, len(rows), size)]


def config(**changes: object) -> PlanConfig:
    values = {
        "weights": {"a": 2.0, "b": 1.0},
        "global_pairs": 12,
        "num_negatives": 2,
        "num_steps": 10,
        "seed": 3,
        "in_batch_negatives": True,
        "key": "stage",
    }
    return PlanConfig(**(values | changes))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Part]]:
    folder = tmp_path_factory.mktemp("parts")
    return {
        "a": parts_of(folder / "a", records("a", 40)),
        "b": parts_of(folder / "b", records("b", 20)),
    }


@pytest.fixture(scope="module")
def plan(parts: dict[str, list[Part]], tmp_path_factory: pytest.TempPathFactory) -> BatchPlan:
    folder = tmp_path_factory.mktemp("plan") / "stage"
    # Small files and row groups, so that steps and slices cross both.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayembed.data.plan.batch_plan.ROWS_PER_FILE", 40)
        patch.setattr(plan_files, "ROWS_PER_GROUP", 5)
        patch.setattr("rayembed.data.plan.batch_plan.ROWS_PER_GROUP", 5)
        return write_plan(str(folder), parts, config())


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayembed.data.plan.batch_plan.ROWS_PER_GROUP", 5)
    monkeypatch.setattr(plan_files, "ROWS_PER_GROUP", 5)


@given(step=st.integers(0, 9), num_workers=st.sampled_from([1, 2, 3, 4, 6, 12]))
@settings(deadline=None, max_examples=30, database=None)
def test_slices_of_any_number_of_workers_are_the_global_batch(step, num_workers, plan) -> None:
    whole = plan.read(step)
    assert len(whole) == 12
    slices = [plan.read(step, worker, num_workers) for worker in range(num_workers)]
    assert [r for part in slices for r in part] == whole
    assert {len(part) for part in slices} == {12 // num_workers}


def test_rows_are_those_of_the_sources_with_trimmed_negatives(plan: BatchPlan) -> None:
    sources = {r.id: r for r in records("a", 40) + records("b", 20)}
    seen = [r for step in range(10) for r in plan.read(step)]
    for r in seen:
        source = sources[r.id]
        assert r.query == source.query
        assert r.negatives == source.negatives[:2]
        assert r.positives == source.positives
    counts = collections.Counter(r.id for r in seen)
    # 80 draws of 40 rows of a and 40 draws of 20 rows of b: each exactly twice.
    assert set(counts.values()) == {2}
    assert len(counts) == 60
    assert sum(r.dataset == "a" for r in seen) == 80


def test_plan_does_not_depend_on_parts_or_reading_order(plan: BatchPlan, tmp_path: Path) -> None:
    shuffled = {
        "b": parts_of(tmp_path / "b", records("b", 20)[::-1], 6),
        "a": parts_of(tmp_path / "a", records("a", 40)[13:] + records("a", 40)[:13], 11),
    }
    other = write_plan(str(tmp_path / "plan"), shuffled, config())
    assert other.fingerprint == plan.fingerprint
    assert [other.read(s) for s in range(10)] == [plan.read(s) for s in range(10)]


@pytest.mark.parametrize("changes", [{"seed": 4}, {"key": "other"}, {"weights": {"a": 1, "b": 1}}])
def test_seed_stage_and_weights_change_the_plan(changes, parts, plan, tmp_path: Path) -> None:
    other = write_plan(str(tmp_path / "plan"), parts, config(**changes))
    assert other.fingerprint != plan.fingerprint


def test_same_plan_in_another_process(parts, plan: BatchPlan, tmp_path: Path) -> None:
    script = (
        "import pickle, sys\n"
        "from rayembed.data.plan.batch_plan import write_plan\n"
        "parts, config, folder = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "print(write_plan(folder, parts, config).fingerprint)\n"
    )
    given_ = pickle.dumps((parts, config(), str(tmp_path / "plan"))).hex()
    run = subprocess.run(
        [sys.executable, "-c", script, given_],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == plan.fingerprint


def test_longer_plan_starts_with_the_shorter_one(parts, plan: BatchPlan, tmp_path: Path) -> None:
    longer = write_plan(str(tmp_path / "plan"), parts, config(num_steps=15))
    assert [longer.read(s) for s in range(10)] == [plan.read(s) for s in range(10)]


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    pairs=st.integers(1, 40),
    steps=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_shares_are_exact_and_epochs_are_whole(weights, pairs, steps, seed) -> None:
    rng = np.random.default_rng(seed)
    rows = [Rows(f"d{i}", w, rng.integers(0, 10**9, 50 + i)) for i, w in enumerate(weights)]
    batches = list(blended(rows, pairs, steps, seed, "k"))
    for i, w in enumerate(weights):
        drawn = np.concatenate([b.row[b.dataset == i] for b in batches])
        assert abs(len(drawn) - w / sum(weights) * pairs * steps) <= 1 + 1e-6
        counts = np.bincount(drawn, minlength=50 + i)
        assert counts.max() - counts.min() <= 1


def test_a_query_text_stands_once_in_a_batch_where_that_can_be() -> None:
    # 6 of 30 queries are the same text; 10 batches of 6 are two epochs with 12 of them.
    hashes = np.array([7] * 6 + list(range(100, 124)))
    for seed in range(20):
        batches = list(blended([Rows("d", 1, hashes)], 6, 10, seed, "k"))
        drawn = np.concatenate([b.row for b in batches])
        assert set(np.bincount(drawn).tolist()) == {2}
        twice = sum(int((hashes[b.row] == 7).sum() > 1) for b in batches)
        free = [len(set(b.row.tolist())) for b in batches]
        assert free == [6] * 10
        assert twice <= 2, seed  # only the rest of an epoch may hold them together
    # Control: walking on without waiting puts them together much more often.
    plain = np.random.default_rng(0).permutation(30).reshape(5, 6)
    assert sum(int((hashes[b] == 7).sum() > 1) for b in plain) >= 1


def test_same_query_in_two_data_sets_is_kept_apart() -> None:
    rows = [Rows("a", 1, np.arange(20)), Rows("b", 1, np.arange(20))]
    for batch in blended(rows, 8, 4, 0, "k"):
        hashes = batch.row  # the hash is the row's number in both
        assert len(set(hashes.tolist())) == 8


def test_errors_before_anything_is_written(tmp_path: Path, parts) -> None:
    few = {"a": parts_of(tmp_path / "few", records("a", 5))}
    target = str(tmp_path / "plan")
    with pytest.raises(DataError, match="5 rows in all, fewer than one global batch of 12"):
        write_plan(target, few, config(weights={"a": 1}))
    with pytest.raises(
        DataError, match=r"'a' has 5 rows, but each batch of 12 pairs takes up to 8"
    ):
        write_plan(target, {"a": few["a"], "b": parts["b"]}, config())
    with pytest.raises(DataError, match="data set 'a' is empty"):
        write_plan(target, {"a": []}, config(weights={"a": 1}))
    bare = {"a": parts_of(tmp_path / "bare", records("a", 40, negatives=0))}
    with pytest.raises(DataError, match=r"'a': 40 of 40 rows have no hard negatives"):
        write_plan(target, bare, config(weights={"a": 1}, in_batch_negatives=False))
    assert not [p for p in tmp_path.glob("plan*") if p.name != "plan.lock"]
    assert write_plan(target, bare, config(weights={"a": 1})).num_steps == 10


def test_few_rows_without_negatives_are_rejected_and_counted(tmp_path: Path) -> None:
    rows = records("a", 199) + records("b", 1, negatives=0)
    parts = {"a": parts_of(tmp_path / "p", rows, 100)}
    made = write_plan(
        str(tmp_path / "plan"), parts, config(weights={"a": 1}, in_batch_negatives=False)
    )
    assert made.manifest["datasets"]["a"]["rejected"] == {"no negative": 1}
    assert made.manifest["datasets"]["a"]["rows"] == 199


def test_workers_must_divide_the_batch_and_steps_exist(plan: BatchPlan) -> None:
    with pytest.raises(DataError, match="5 workers cannot share batches of 12"):
        plan.read(0, 0, 5)
    with pytest.raises(DataError, match="steps 0 to 9 and was asked for step 10"):
        plan.read(10)
    with pytest.raises(DataError, match="worker 2 of 2"):
        plan.read(0, 2, 2)


def test_finished_plans_are_taken_and_unfinished_ones_are_not(parts, tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    with pytest.raises(ArtifactError, match="no finished batch plan"):
        BatchPlan.open(str(folder))

    def dies(task, units, needs="cpu"):
        for number, unit in enumerate(units):
            if number == 3:
                raise KeyboardInterrupt
            yield task(unit)

    with pytest.raises(KeyboardInterrupt):
        write_plan(str(folder), parts, config(), execute=dies)
    assert not folder.exists()
    done = []

    def counts(task, units, needs="cpu"):
        for unit in units:
            done.append(unit)
            yield task(unit)

    made = write_plan(str(folder), parts, config(), execute=counts)
    num_parts = len(parts["a"]) + len(parts["b"])
    assert len(done) == num_parts - 3 + 1, "three parts were scattered before, one block to gather"
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "steps-000000000.parquet"]
    assert not list(tmp_path.glob("*.partial"))
    done.clear()
    assert write_plan(str(folder), parts, config(), execute=counts) == made
    assert not done
    with pytest.raises(ArtifactError, match="other data or settings"):
        write_plan(str(folder), parts, config(seed=9))
    (folder / "manifest.json").write_text(json.dumps({"version": 0}))
    with pytest.raises(ArtifactError, match="layout 0"):
        BatchPlan.open(str(folder))


def test_of_two_runs_that_want_one_plan_the_second_waits_and_opens_it(
    parts, tmp_path: Path
) -> None:
    folder = str(tmp_path / "plans" / "plan")
    inside, go = threading.Event(), threading.Event()
    done: list[str] = []
    made: dict[str, BatchPlan] = {}

    def waits(task, units, needs="cpu"):
        for unit in units:
            done.append(threading.current_thread().name)
            inside.set()
            assert go.wait(60)
            yield task(unit)

    def make() -> None:
        plan = write_plan(folder, parts, config(), execute=waits)
        made[threading.current_thread().name] = plan

    runs = [threading.Thread(target=make, name=name) for name in ("first", "second")]
    runs[0].start()
    assert inside.wait(60)
    runs[1].start()
    runs[1].join(0.5)
    assert runs[1].is_alive(), "it waits for the first"
    go.set()
    for run in runs:
        run.join(60)
    assert set(done) == {"first"}
    assert made["first"] == made["second"] == BatchPlan.open(folder)
    assert len(made["second"].read(9)) == 12


def test_short_lists_and_classes_survive(tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(r, dataset="a")
        for r in made_up_records(50, seed=1)
        if r.positives[0] != r.query
    ]
    parts = {"a": parts_of(tmp_path / "p", rows, 20)}
    size = len(rows)
    made = write_plan(
        str(tmp_path / "plan"), parts, config(weights={"a": 1}, global_pairs=size, num_steps=1)
    )
    by_id = {r.id: r for r in made.read(0)}
    assert by_id == {r.id: r for r in rows}
    none = write_plan(
        str(tmp_path / "none"),
        {"a": parts_of(tmp_path / "q", [dataclasses.replace(r, in_batch=True) for r in rows])},
        config(weights={"a": 1}, global_pairs=size, num_steps=1, num_negatives=0),
    )
    assert all(r.negatives == () for r in none.read(0))


def test_stream_gives_every_step_from_the_middle(plan: BatchPlan) -> None:
    tokenizer = ToyTokenizer()
    for num_workers in (1, 2):
        for worker in range(num_workers):
            steps = list(
                read_steps(plan, tokenizer, worker=worker, num_workers=num_workers, start_step=4)
            )
            assert [b.step for b in steps] == [4, 5, 6, 7, 8, 9]
            for batch in steps:
                expected = plan.read(batch.step, worker, num_workers)
                first = ToyTokenizer()([expected[0].query], "query")[0]["input_ids"]
                np.testing.assert_array_equal(batch.tokens[batch.query[0]]["input_ids"], first)
                assert batch.dataset == [r.dataset for r in expected]
                assert batch.negatives.shape == (12 // num_workers, 2)


def test_stream_ends_its_thread_and_hands_errors_on(plan: BatchPlan) -> None:
    steps = read_steps(plan, ToyTokenizer(), read_ahead=1)
    next(steps)
    steps.close()
    assert not [t for t in threading.enumerate() if t.name == "read-steps"]

    class Refuses(ToyTokenizer):
        calls = 0

        def __call__(self, texts, role, instructions=None):
            Refuses.calls += 1
            if Refuses.calls > 4:
                raise DataError("the text '\\u200b' has no tokens")
            return super().__call__(texts, role, instructions)

    got = []
    with pytest.raises(DataError, match="has no tokens"):
        got.extend(batch.step for batch in read_steps(plan, Refuses()))
    assert not [t for t in threading.enumerate() if t.name == "read-steps"]
