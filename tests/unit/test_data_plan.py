"""The batch plan: who reads does not change what stands in it."""

import collections
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_records import made_up_records
from s3_server import BUCKET, s3_server
from toy_model import ToyTokenizer

from rayembed.assets.array_files import load_arrays
from rayembed.assets.json_files import write_json
from rayembed.assets.storage import list_files
from rayembed.data.engine import index
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part, write_part
from rayembed.data.engine.work_items import Execute
from rayembed.data.plan import scratch as places_module
from rayembed.data.plan.audit import audit_dataset, plan_warnings
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.policies import blended, clustered, homogeneous
from rayembed.data.plan.sampling import DatasetRows, shares
from rayembed.data.plan.scratch import PartPlaces, PlaceWriter
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.plan.stream import PairSteps, prefetched
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record
from rayembed.errors import ArtifactError, DataError

POLICIES = ("blended", "homogeneous", "clustered")


def records(name: str, count: int, negatives: int = 3, languages: int = 1) -> list[Record]:
    return [
        Record(
            id=f"{name}/{i}",
            query=f"query {name} {i}",
            positives=(f"positive {name} {i}",),
            negatives=tuple(Negative(f"negative {name} {i} {j}", j, 0.5) for j in range(negatives)),
            dataset=name,
            language=f"l{i % languages}" if languages > 1 else None,
        )
        for i in range(count)
    ]


def sources() -> dict[str, list[Record]]:
    """Four batches of 12 rows of a in two languages, two of b."""
    return {"a": records("a", 48, languages=2), "b": records("b", 24)}


def parts_of(folder: Path, rows: list[Record], size: int = 7) -> list[Part]:
    return [write_part(str(folder), rows[i : i + size]) for i in range(0, len(rows), size)]


def config(**changes: object) -> PlanConfig:
    values = {
        "weights": {"a": 2.0, "b": 1.0},
        "global_pairs": 12,
        "num_negatives": 2,
        "num_steps": 12,
        "seed": 3,
        "in_batch_negatives": True,
        "key": "stage",
    }
    return PlanConfig(**(values | changes))


def write(
    folder: Path | str, parts: dict[str, list[Part]], settings: PlanConfig, **options: Any
) -> BatchPlan:
    """Every 12 rows of the data sets are a clustered batch, for the policy that looks at it."""
    return write_plan(str(folder), parts, settings, batch_pairs={"a": 12, "b": 12}, **options)


def rows_of(plan: BatchPlan) -> list[list[Record]]:
    return [plan.read(step) for step in range(plan.num_steps)]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Part]]:
    folder = tmp_path_factory.mktemp("parts")
    return {name: parts_of(folder / name, rows, 12) for name, rows in sources().items()}


@pytest.fixture(scope="module", params=POLICIES)
def plan(
    request: pytest.FixtureRequest,
    parts: dict[str, list[Part]],
    tmp_path_factory: pytest.TempPathFactory,
) -> BatchPlan:
    folder = tmp_path_factory.mktemp("plan") / "stage"
    # Small files and row groups, so that steps and slices cross both.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rayembed.data.plan.write.ROWS_PER_FILE", 40)
        patch.setattr("rayembed.data.plan.batch_plan.ROWS_PER_GROUP", 5)
        return write(folder, parts, config(policy=request.param))


def policy_of(plan: BatchPlan) -> str:
    return str(plan.manifest["policy"])


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayembed.data.plan.batch_plan.ROWS_PER_GROUP", 5)


@given(step=st.integers(0, 11), num_workers=st.sampled_from([1, 2, 3, 4, 6, 12]))
@settings(deadline=None, max_examples=30, database=None)
def test_slices_of_any_number_of_workers_are_the_global_batch(step, num_workers, plan) -> None:
    whole = plan.read(step)
    assert len(whole) == 12
    slices = [plan.read(step, worker, num_workers) for worker in range(num_workers)]
    assert [r for part in slices for r in part] == whole
    assert {len(part) for part in slices} == {12 // num_workers}


def test_workers_that_come_and_go_train_the_batches_of_one_worker(plan: BatchPlan) -> None:
    numbers = [1, 1, 2, 2, 4, 4, 2, 1, 3, 3, 1, 1]
    alone = rows_of(plan)
    seen = [
        [r for worker in range(workers) for r in plan.read(step, worker, workers)]
        for step, workers in enumerate(numbers)
    ]
    assert seen == alone
    # The control: workers that keep a batch size of their own take other batches.
    rows = iter([r for batch in alone for r in batch] * 4)
    grown = [[next(rows) for _ in range(12 * workers)] for workers in numbers]
    assert [g == a for g, a in zip(grown, alone, strict=True)] == [True, True] + [False] * 10


def test_rows_are_those_of_the_sources_with_trimmed_negatives(plan: BatchPlan) -> None:
    by_id = {r.id: r for rows in sources().values() for r in rows}
    seen = [r for rows in rows_of(plan) for r in rows]
    for r in seen:
        assert r == dataclasses.replace(by_id[r.id], negatives=by_id[r.id].negatives[:2])
    counts = collections.Counter(r.id for r in seen)
    # 96 draws of 48 rows of a and 48 draws of 24 rows of b: each exactly twice.
    assert set(counts.values()) == {2}
    assert len(counts) == 72
    told = plan.manifest["datasets"]
    assert {name: of["drawn"] for name, of in told.items()} == {"a": 96, "b": 48}
    assert {name: of["epochs"] for name, of in told.items()} == {"a": 2.0, "b": 2.0}


def test_plan_does_not_depend_on_parts_or_reading_order(plan: BatchPlan, tmp_path: Path) -> None:
    rows = sources()
    if policy_of(plan) == "clustered":  # batches are given and keep their rows
        orders = {"a": [36, 0, 24, 12], "b": [12, 0]}
        shuffled = {
            name: [r for i in orders[name] for r in rows[name][i : i + 12]] for name in rows
        }
        sizes = {"b": 24, "a": 12}
    else:
        shuffled = {"b": rows["b"][::-1], "a": rows["a"][13:] + rows["a"][:13]}
        sizes = {"b": 6, "a": 11}
    parts = {name: parts_of(tmp_path / name, shuffled[name], sizes[name]) for name in sizes}
    other = write(tmp_path / "plan", parts, config(policy=policy_of(plan)))
    assert other.fingerprint == plan.fingerprint
    assert rows_of(other) == rows_of(plan)


def test_what_a_policy_puts_into_a_batch(plan: BatchPlan, tmp_path: Path) -> None:
    steps = rows_of(plan)
    kinds = [{(r.dataset, r.language) for r in rows} for rows in steps]
    told = plan.manifest["datasets"]
    match policy_of(plan):
        case "blended":
            assert all({name for name, _ in kind} == {"a", "b"} for kind in kinds)
            assert "steps" not in told["a"]
        case "homogeneous":
            assert all(len(kind) == 1 for kind in kinds)
            counts = collections.Counter(next(iter(kind)) for kind in kinds)
            assert counts == {("a", "l0"): 4, ("a", "l1"): 4, ("b", None): 4}
            languages = sorted(told["a"]["languages"], key=lambda of: of["language"])
            assert languages == [{"language": f"l{i}", "rows": 24, "steps": 4} for i in range(2)]
            assert told["b"]["languages"] == [{"language": None, "rows": 24, "steps": 4}]
        case "clustered":
            given_ = [
                frozenset(r.id for r in rows[i : i + 12])
                for rows in sources().values()
                for i in range(0, len(rows), 12)
            ]
            seen = [frozenset(r.id for r in rows) for rows in steps]
            assert collections.Counter(seen) == dict.fromkeys(given_, 2)
            # Of a data set none comes again before all others came; rows are mixed over slots.
            of_a = [ids for ids in seen if next(iter(ids)).startswith("a")]
            assert len(set(of_a[:4])) == len(set(of_a[4:])) == 4
            places = [[int(r.id.split("/")[1]) for r in rows] for rows in steps]
            assert all(found != sorted(found) for found in places)
            assert (told["a"]["steps"], told["b"]["steps"]) == (8, 4)
    if policy_of(plan) != "blended":
        runs = [rows[0].dataset for rows in steps]
        assert runs != sorted(runs), "steps of a data set do not come in one run"


@pytest.mark.parametrize("changes", [{"seed": 4}, {"key": "other"}, {"weights": {"a": 1, "b": 1}}])
def test_seed_stage_and_weights_change_the_plan(changes, parts, plan, tmp_path: Path) -> None:
    other = write(tmp_path / "plan", parts, config(policy=policy_of(plan), **changes))
    assert other.fingerprint != plan.fingerprint


def test_same_plan_in_another_process(parts, plan: BatchPlan, tmp_path: Path) -> None:
    script = (
        "import pickle, sys\n"
        "from rayembed.data.plan.write import write_plan\n"
        "parts, config, folder = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
        "pairs = {'a': 12, 'b': 12}\n"
        "print(write_plan(folder, parts, config, batch_pairs=pairs).fingerprint)\n"
    )
    settings = config(policy=policy_of(plan))
    given_ = pickle.dumps((parts, settings, str(tmp_path / "plan"))).hex()
    run = subprocess.run(
        [sys.executable, "-c", script, given_],
        env=os.environ | {"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == plan.fingerprint


def test_longer_blended_plan_starts_with_the_shorter_one(parts, tmp_path: Path) -> None:
    short = write(tmp_path / "short", parts, config())
    longer = write(tmp_path / "longer", parts, config(num_steps=17))
    assert rows_of(longer)[:12] == rows_of(short)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    pairs=st.integers(1, 40),
    steps=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_blended_shares_are_exact_and_epochs_are_whole(weights, pairs, steps, seed) -> None:
    rng = np.random.default_rng(seed)
    rows = [DatasetRows(f"d{i}", w, rng.integers(0, 10**9, 50 + i)) for i, w in enumerate(weights)]
    batches = list(blended(rows, pairs, steps, seed, "k"))
    for i, w in enumerate(weights):
        drawn = np.concatenate([b.row[b.dataset == i] for b in batches])
        assert abs(len(drawn) - w / sum(weights) * pairs * steps) <= 1 + 1e-6
        counts = np.bincount(drawn, minlength=50 + i)
        assert counts.max() - counts.min() <= 1


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from([homogeneous, clustered]),
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=5),
    temperature=st.sampled_from([None, 0.5, 1.0, 3.0]),
    steps=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_steps_are_exact_and_epochs_are_whole(policy, weights, temperature, steps, seed) -> None:
    rng = np.random.default_rng(seed)
    pairs = 6
    rows = []
    for i, w in enumerate(weights):
        sizes = rng.integers(1, 5, 3) * pairs  # of three languages
        rows_of = dict(zip([0, 7, 9], sizes.tolist(), strict=True))
        rows.append(DatasetRows(f"d{i}", w, rng.integers(0, 10**9, sizes.sum()), rows_of))
    power = 0.0 if temperature is None else 1 / temperature
    share = np.array([w * len(r.query_hash) ** power for w, r in zip(weights, rows, strict=True)])
    share /= share.sum()
    batches = list(policy(rows, pairs, steps, seed, "k", temperature))
    assert len(batches) == steps
    for i, r in enumerate(rows):
        mine = [b.row for b in batches if b.dataset[0] == i]
        assert all((b.dataset == b.dataset[0]).all() for b in batches)
        assert abs(len(mine) - share[i] * steps) < 1
        drawn = np.concatenate([np.empty(0, np.int64), *mine])
        if policy is clustered:
            assert all(len(set((row // pairs).tolist())) == 1 for row in mine)
            counts = np.bincount(drawn, minlength=len(r.query_hash))
            assert counts.max() - counts.min() <= 1
            continue
        languages = np.repeat(list(r.rows_of), list(r.rows_of.values()))
        in_language = np.bincount(languages)[[0, 7, 9]] ** (1 / (temperature or 1.0))
        for language, part in zip([0, 7, 9], in_language / in_language.sum(), strict=True):
            of = [row for row in mine if languages[row[0]] == language]
            assert all((languages[row] == language).all() for row in of)
            assert abs(len(of) - part * len(mine)) < 1
            counts = np.bincount(drawn, minlength=len(r.query_hash))[languages == language]
            assert counts.max() - counts.min() <= 1


def test_temperature_shares_by_rows_to_the_power_of_its_inverse() -> None:
    np.testing.assert_allclose(shares([1, 1], [100, 900], 2.0), [0.25, 0.75])
    np.testing.assert_allclose(shares([3, 1], [100, 900], 2.0), [0.5, 0.5])
    np.testing.assert_allclose(shares([3, 1], [100, 900], None), [0.75, 0.25])
    np.testing.assert_allclose(shares([1, 1], [10, 10**9], 1e-3), [0, 1])
    rows = [DatasetRows("a", 1, np.arange(100)), DatasetRows("b", 1, np.arange(1000, 1900))]
    drawn = np.concatenate([b.dataset for b in blended(rows, 8, 10, 0, "k", temperature=2.0)])
    assert np.bincount(drawn).tolist() == [20, 60]


def test_a_homogeneous_batch_has_a_query_text_once_where_that_can_be() -> None:
    hashes = np.array([7] * 6 + list(range(100, 124)))
    rows = [DatasetRows("d", 1, hashes, {0: 30})]
    twice = [
        sum(int((hashes[b.row] == 7).sum() > 1) for b in homogeneous(rows, 6, 10, seed, "k"))
        for seed in range(20)
    ]
    assert max(twice) <= 2, "only the rest of an epoch may hold them together"


def test_a_query_text_stands_once_in_a_batch_where_that_can_be() -> None:
    # 6 of 30 queries are the same text; 10 batches of 6 are two epochs with 12 of them.
    hashes = np.array([7] * 6 + list(range(100, 124)))
    for seed in range(20):
        batches = list(blended([DatasetRows("d", 1, hashes)], 6, 10, seed, "k"))
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
    rows = [DatasetRows("a", 1, np.arange(20)), DatasetRows("b", 1, np.arange(20))]
    for batch in blended(rows, 8, 4, 0, "k"):
        hashes = batch.row  # the hash is the row's number in both
        assert len(set(hashes.tolist())) == 8


def test_errors_before_anything_is_written(tmp_path: Path, parts) -> None:
    few = {"a": parts_of(tmp_path / "few", records("a", 5))}
    target = tmp_path / "plan"
    with pytest.raises(DataError, match="5 rows in all, fewer than one global batch of 12"):
        write(target, few, config(weights={"a": 1}))
    with pytest.raises(
        DataError, match=r"'a' has 5 rows, but each batch of 12 pairs takes up to 8"
    ):
        write(target, {"a": few["a"], "b": parts["b"]}, config())
    for policy in POLICIES:
        with pytest.raises(DataError, match="data set 'a' is empty"):
            write(target, {"a": []}, config(weights={"a": 1}, policy=policy))
    bare = {"a": parts_of(tmp_path / "bare", records("a", 48, negatives=0))}
    with pytest.raises(DataError, match=r"'a': 48 of 48 rows have no hard negatives"):
        write(target, bare, config(weights={"a": 1}, in_batch_negatives=False))
    many = {"a": parts_of(tmp_path / "many", records("a", 48, languages=5)), "b": parts["b"]}
    with pytest.raises(
        DataError, match=r"one language .* no language has that many rows \(.*: 'a' 48\)"
    ):
        write(target, {"a": many["a"]}, config(weights={"a": 1}, policy="homogeneous"))
    settings = config(policy="clustered")
    with pytest.raises(DataError, match=r"'a' has no clusters; set clusters.batch_pairs=12"):
        write_plan(str(target), parts, settings, batch_pairs={"b": 12})
    with pytest.raises(DataError, match=r"'b' has batches of 6 pairs; set clusters.batch_pairs=12"):
        write_plan(str(target), parts, settings, batch_pairs={"a": 12, "b": 6})
    with pytest.raises(
        DataError,
        match=r"asks for 2 hard negatives .* none of its rows has any \(0 of 48 rows of a\).*"
        r"stages\.stage\.batch\.num_negatives=0",
    ):
        write(target, bare, config(weights={"a": 1}))
    assert not [p for p in tmp_path.glob("plan*") if p.name != "plan.lock"]
    assert write(target, bare, config(weights={"a": 1}, num_negatives=0)).num_steps == 12


def test_rows_with_fewer_negatives_than_asked_for_are_counted_and_told(tmp_path: Path) -> None:
    rows = records("a", 6, negatives=0) + [
        dataclasses.replace(r, id=f"{r.id}/{n}") for n in (1, 2, 3) for r in records("a", 10, n)
    ]
    parts = {"a": parts_of(tmp_path / "a", rows), "b": parts_of(tmp_path / "b", records("b", 24))}
    made = write(tmp_path / "plan", parts, config())
    of_a = made.manifest["datasets"]["a"]["negatives"]
    assert of_a == {"none": 6, "fewer": 10, "enough": 20}
    assert plan_warnings(made)[0] == (
        "stage stage asks for 2 hard negatives of each query and not all rows have them: "
        "a 6 without any and 10 with fewer of 36 rows"
    )
    manifest = {"rows_in": 36, "rejected": {}, "dropped": {}}
    page = audit_dataset("a", made.manifest, manifest, rows)
    assert "2 of each query are asked for; 20 rows have them, 10 fewer, 6 none" in page
    # Controls: all rows have them, or none is asked for.
    one = write(tmp_path / "one", {"b": parts["b"]}, config(weights={"b": 1}))
    assert one.manifest["datasets"]["b"]["negatives"] == {"none": 0, "fewer": 0, "enough": 24}
    none = write(tmp_path / "0", parts, config(num_negatives=0))
    assert not [line for plan in (one, none) for line in plan_warnings(plan) if "hard" in line]


def test_small_languages_are_rejected_and_counted(tmp_path: Path, caplog) -> None:
    rows = records("a", 30, languages=2) + [
        dataclasses.replace(r, dataset="a", language=language)
        for language, count in (("fr", 11), ("es", 3), (None, 12))
        for r in records(f"a{language}", count)
    ]
    parts = {"a": parts_of(tmp_path / "p", rows)}
    made = write(tmp_path / "plan", parts, config(weights={"a": 1}, policy="homogeneous"))
    told = made.manifest["datasets"]["a"]
    assert told["rejected"] == {"fewer rows of its language than a batch": 14}
    assert told["rows"] == 30 + 12
    assert {of["language"] for of in told["languages"]} == {"l0", "l1", None}
    assert (
        "14 rows of data set a are in languages with fewer rows than a batch of 12" in caplog.text
    )
    assert "es, fr" in caplog.text
    assert {r.language for rows in rows_of(made) for r in rows} == {"l0", "l1", None}


@pytest.mark.parametrize("temperature", [None, 1.0])
def test_a_data_set_without_a_large_language_is_out_and_others_go_on(
    tmp_path: Path, parts, caplog, temperature
) -> None:
    """As among the many languages of a web corpus: a plan of all others must come about."""
    small = parts_of(tmp_path / "small", records("a", 48, languages=5))
    settings = config(policy="homogeneous", temperature=temperature)
    made = write(tmp_path / "plan", {"a": small, "b": parts["b"]}, settings)
    assert "48 rows of data set a are in languages with fewer rows" in caplog.text
    told = made.manifest["datasets"]["a"]
    assert (told["rows"], told["drawn"], told["epochs"], told["steps"]) == (0, 0, 0.0, 0)
    assert told["rejected"] == {"fewer rows of its language than a batch": 48}
    alone = write(
        tmp_path / "alone",
        {"b": parts["b"]},
        config(weights={"b": 1}, policy="homogeneous", temperature=temperature),
    )
    assert {r.dataset for rows in rows_of(made) for r in rows} == {"b"}
    assert made.num_steps == alone.num_steps


def test_clustered_batches_keep_rows_that_learn_from_nothing(tmp_path: Path, caplog) -> None:
    rows = records("a", 24, negatives=0)
    rows[5] = dataclasses.replace(rows[5], in_batch=False)
    parts = {"a": parts_of(tmp_path / "p", rows, 12)}
    settings = config(weights={"a": 1}, policy="clustered", num_negatives=0)
    made = write(tmp_path / "plan", parts, settings)
    assert {r.id for rows in rows_of(made) for r in rows} == {r.id for r in rows}
    assert "1 of 24 rows of data set a have no hard negatives and give no training" in caplog.text


def test_a_data_set_without_steps_is_told(tmp_path: Path, parts, caplog) -> None:
    settings = config(weights={"a": 100, "b": 1}, policy="homogeneous")
    made = write(tmp_path / "plan", parts, settings)
    assert made.manifest["datasets"]["b"]["drawn"] == 0
    assert "12 steps draw no row of data set b" in caplog.text


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
    with pytest.raises(DataError, match="steps 0 to 11, but step 12 was requested"):
        plan.read(12)
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
    assert [p.name for p in folder.iterdir()] == ["working"]
    done = []

    def counts(task, units, needs="cpu"):
        for unit in units:
            done.append(unit)
            yield task(unit)

    made = write_plan(str(folder), parts, config(), execute=counts)
    num_parts = len(parts["a"]) + len(parts["b"])
    assert len(done) == num_parts - 3 + 1, "three parts were scattered before, one block to gather"
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "steps-000000000.parquet"]
    done.clear()
    assert write_plan(str(folder), parts, config(), execute=counts) == made
    assert not done
    with pytest.raises(ArtifactError, match="other data or settings"):
        write_plan(str(folder), parts, config(seed=9))
    write_json(str(folder / "manifest.json"), {"code": 0})
    with pytest.raises(ArtifactError, match="layout version 0"):
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
    assert len(made["second"].read(11)) == 12


@pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])
def test_two_runs_that_write_one_plan_to_object_storage_both_end_well(
    parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever one is, the other writes the whole plan before it goes on."""

    wanted = write_plan(str(tmp_path / "plan"), parts, config()).fingerprint
    every = len(parts["a"]) + len(parts["b"])

    def after(number: int, folder: str) -> Execute:
        left = [number]

        def execute(task, units, needs="cpu"):
            for unit in units:
                yield task(unit)
                left[0] -= 1
                if left[0] == 0:
                    others.append(write_plan(folder, parts, config()))

        return execute

    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for number in (1, every, every + 1):
            others: list[BatchPlan] = []
            folder = f"s3://{BUCKET}/plans/{number}"
            made = write_plan(folder, parts, config(), execute=after(number, folder))
            assert [made] == others
            assert made.fingerprint == wanted
            assert sorted(list_files(folder, recursive=True)) == [
                "manifest.json",
                "steps-000000000.parquet",
            ]


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
                prefetched(PairSteps(plan, tokenizer, worker, num_workers), 4, plan.num_steps)
            )
            assert [b.step for b in steps] == list(range(4, 12))
            for batch in steps:
                expected = plan.read(batch.step, worker, num_workers)
                first = ToyTokenizer()([expected[0].query], "query")[0]["input_ids"]
                np.testing.assert_array_equal(batch.tokens[batch.query[0]]["input_ids"], first)
                assert batch.dataset == [r.dataset for r in expected]
                assert batch.negatives.shape == (12 // num_workers, 2)


def test_stream_ends_its_thread_and_hands_errors_on(plan: BatchPlan) -> None:
    steps = prefetched(PairSteps(plan, ToyTokenizer()), 0, plan.num_steps, read_ahead=1)
    next(steps)
    steps.close()
    assert not [t for t in threading.enumerate() if t.name == "done-ahead"]

    class Refuses(ToyTokenizer):
        calls = 0

        def __call__(self, texts, role, instructions=None):
            Refuses.calls += 1
            if Refuses.calls > 4:
                raise DataError("the text '\\u200b' has no tokens")
            return super().__call__(texts, role, instructions)

    got = []
    steps = prefetched(PairSteps(plan, Refuses()), 0, plan.num_steps)
    with pytest.raises(DataError, match="has no tokens"):
        got.extend(batch.step for batch in steps)
    assert not [t for t in threading.enumerate() if t.name == "done-ahead"]


def test_places_come_by_part_and_are_cut_at_the_limit(tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(0)
    parts = [Part(str(tmp_path / f"part-{n}.parquet"), 10) for n in range(7)]
    row, position = rng.integers(0, 69, 90), rng.permutation(90)
    row[row // 10 == 4] = 69  # the fifth part has none
    monkeypatch.setattr("rayembed.data.plan.scratch._PARTS_OF_FILE", 2)
    monkeypatch.setattr("rayembed.data.plan.scratch._BUFFERED", 13)

    def written(most: int | None) -> list[PartPlaces]:
        scratch = tmp_path / f"scratch {most}"
        scratch.mkdir()
        places = PlaceWriter(scratch, str(tmp_path), parts, most)
        for some in np.split(np.arange(90), [40, 43]):
            places.add(row[some], position[some])
        return places.finish()

    whole, cut = written(90), written(4)
    assert [item.part for item in whole] == [p for p in parts if p is not parts[4]]
    for item in whole:
        mine = np.flatnonzero(row // 10 == parts.index(item.part))
        mine = mine[np.argsort(row[mine], kind="stable")]
        found = item.read()
        assert found[0].tolist() == (row[mine] % 10).tolist()
        assert found[1].tolist() == position[mine].tolist()
    assert max(len(item.read()[0]) for item in cut) == 4
    for side in (0, 1):
        both = (np.concatenate([item.read()[side] for item in items]) for items in (whole, cut))
        np.testing.assert_array_equal(*both)
    assert len({item.key for item in cut}) == len(cut) > len(whole)
    # Without a limit a task takes as many places as a part has rows, however often each is drawn.
    monkeypatch.setattr(places_module, "ROWS_PER_PART", 10)
    repeated = np.repeat(np.arange(10), 7)
    scratch = tmp_path / "repeated"
    scratch.mkdir()
    places = PlaceWriter(scratch, str(tmp_path), parts)
    places.add(repeated, np.arange(70))
    assert [len(item.read()[0]) for item in places.finish()] == [10] * 7


def test_index_files_are_read_many_at_a_time_in_their_order(tmp_path, monkeypatch) -> None:
    parts = parts_of(tmp_path, records("a", 56))
    alone = [read_column([part], "id_hash") for part in parts]
    together = threading.Barrier(len(parts), timeout=10)

    def loaded(path: str, remedy: str) -> dict[str, np.ndarray]:
        together.wait()  # for as many as there are parts
        return load_arrays(path, remedy)

    monkeypatch.setattr(index, "load_arrays", loaded)
    assert np.array_equal(read_column(parts, "id_hash"), np.concatenate(alone))


def test_a_step_reads_all_columns_that_it_needs(tmp_path: Path) -> None:
    rows = [
        dataclasses.replace(
            row,
            label=f"l{i % 3}",
            in_batch=i % 2 == 0,
            query_instruction="Find it",
            document_instruction="It is",
            positive_score=i / 8,
            false_negatives=(i, i + 1),
            origin=("file#1",),
        )
        for i, row in enumerate(records("a", 24))
    ]
    plan = write(tmp_path / "plan", {"a": parts_of(tmp_path, rows)}, config(weights={"a": 1.0}))
    whole = make_step_batch(1, plan.read(1), plan.num_negatives, ToyTokenizer())
    found = PairSteps(plan, ToyTokenizer())(1)
    for name, value in vars(whole).items():
        np.testing.assert_equal(getattr(found, name), value, err_msg=name)
    assert plan.read(1)[0].origin, "the control: what no step needs is there"
