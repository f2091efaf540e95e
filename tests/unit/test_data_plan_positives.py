"""Every positive of a row is trained: one each time the row is drawn, in turn, with its score."""

import collections
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from toy_model import ToyTokenizer

from rayembed.data.engine.parts import read_table, write_part
from rayembed.data.plan import scratch as places_module
from rayembed.data.plan.audit import plan_warnings
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.files import with_next_positives
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.step_batch import make_step_batch
from rayembed.data.plan.stream import PairSteps
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record

POSITIVES = (1, 2, 3, 5)


def record(i: int, scored: bool = True) -> Record:
    texts = tuple(f"positive {i} {j}" for j in range(POSITIVES[i % len(POSITIVES)]))
    scores = tuple(round(0.9 - 0.1 * j, 3) for j in range(len(texts)))
    several = len(texts) > 1 and scored
    return Record(
        id=f"d/{i}",
        query=f"query {i}",
        positives=texts,
        dataset="d",
        negatives=(Negative(f"negative {i}", 3, 0.25, cross_score=0.125),),
        positive_score=0.9,
        positive_cross_score=0.8,
        positive_scores=scores if several else None,
        positive_cross_scores=tuple(s - 0.1 for s in scores) if several else None,
    )


def plan_of(folder: Path, rows: list[Record], size: int = 7, **changes: object) -> BatchPlan:
    parts = [write_part(str(folder / "parts"), rows[i : i + size]) for i in range(0, 40, size)]
    values = {"weights": {"d": 1.0}, "global_pairs": 8, "num_negatives": 1, "num_steps": 0}
    values |= {"seed": 1, "in_batch_negatives": True, "key": "stage"}
    values |= {"columns": ("positive_cross_score",)}
    config = PlanConfig(**(values | changes))
    return write_plan(str(folder / f"plan-{size}"), {"d": parts}, config, batch_pairs={"d": 8})


@pytest.mark.parametrize("policy", ["blended", "homogeneous", "clustered"])
@pytest.mark.parametrize("epochs", [1, 2, 5, 7.4])
def test_the_k_th_draw_of_a_row_trains_its_k_th_positive(policy, epochs, tmp_path, monkeypatch):
    rows = [record(i) for i in range(40)]
    # Places of a part stand in several work items.
    monkeypatch.setattr(places_module, "ROWS_PER_PART", 3)
    made = []
    for size in (7, 40):
        plan = plan_of(tmp_path, rows, size, policy=policy, epochs=epochs)
        steps = [plan.read(step) for step in range(plan.num_steps)]
        made.append([[one.positives for one in step] for step in steps])
        drawn: collections.Counter[str] = collections.Counter()
        trained = collections.defaultdict(set)
        for one in (one for step in steps for one in step):
            was = rows[int(one.id[2:])]
            turn = drawn[one.id] % len(was.positives)
            assert one.positives == was.positives[turn:] + was.positives[:turn]
            if was.positive_scores is not None:
                assert one.positive_score == pytest.approx(was.positive_scores[turn])
                assert one.positive_cross_score == pytest.approx(was.positive_cross_scores[turn])
            trained[one.id].add(one.positives[0])
            drawn[one.id] += 1
        counts = plan.manifest["datasets"]["d"]
        assert plan.num_steps == round(epochs * 40 / 8)
        assert counts["positives"] == {
            "all": sum(len(rows[int(name[2:])].positives) for name in drawn),
            "trained": sum(map(len, trained.values())),
        }
        told = [line for line in plan_warnings(plan) if "positives" in line]
        assert bool(told) == (epochs < 5), "after five epochs every one of five is trained"
    assert made[0] == made[1]


def test_a_step_trains_the_positive_of_its_turn_and_knows_the_others(tmp_path: Path) -> None:
    rows = [record(i) for i in range(40)]
    plan = plan_of(tmp_path, rows, epochs=3)
    tokenizer = ToyTokenizer()
    for step in range(plan.num_steps):
        whole = plan.read(step)
        batch = make_step_batch(step, whole, 1, tokenizer)
        slices = [PairSteps(plan, tokenizer, worker, 2)(step) for worker in range(2)]
        joined = np.concatenate([one.positive_hash for one in slices])
        assert joined.tolist() == batch.positive_hash.tolist()
        assert batch.positive_score.tolist() == pytest.approx(
            [one.positive_cross_score for one in whole]
        )
        for row, one in enumerate(whole):
            known = {*batch.not_negative_hash[row].tolist()}
            own = make_step_batch(0, [rows[int(one.id[2:])]], 1, tokenizer)
            assert {*own.not_negative_hash[0].tolist()} <= known


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("epochs", [1, 3])
def test_several_positives_at_once_are_those_from_the_turn_on(number, epochs, tmp_path):
    rows = [record(i) for i in range(40)]
    plan = plan_of(tmp_path, rows, epochs=epochs, num_positives=number)
    trained, drawn = collections.defaultdict(set), set()
    for step in range(plan.num_steps):
        records = plan.read(step)
        batch = PairSteps(plan, ToyTokenizer(), num_positives=number)(step)
        for one, further in zip(records, batch.further_positives, strict=True):
            trained[one.id] |= {*one.positives[:number]}
            drawn.add(one.id)
            assert (further >= 0).sum() == min(number, len(one.positives)) - 1
    assert plan.manifest["datasets"]["d"]["positives"] == {
        "all": sum(len(rows[int(name[2:])].positives) for name in drawn),
        "trained": sum(map(len, trained.values())),
    }
    told = [line for line in plan_warnings(plan) if "positives" in line]
    assert all(f"A row trains {number} of them" in line for line in told)
    assert bool(told) == (number + epochs - 1 < max(POSITIVES))
    assert plan.manifest["num_positives"] == number
    (tmp_path / "one").mkdir()
    assert "num_positives" not in plan_of(tmp_path / "one", rows, epochs=epochs).manifest


def test_a_positive_that_nothing_scored_has_no_score(tmp_path: Path) -> None:
    rows = [record(i, scored=False) for i in range(40)]
    plan = plan_of(tmp_path, rows, epochs=2)
    first = set()
    for one in (one for step in range(plan.num_steps) for one in plan.read(step)):
        of_first = one.positives[0] == rows[int(one.id[2:])].positives[0]
        assert (one.positive_score is not None) == of_first
        first.add(of_first)
    assert first == {True, False}


def test_rows_of_one_positive_stay_as_they_are(tmp_path: Path) -> None:
    rows = [record(4 * i) for i in range(10)]
    part = write_part(str(tmp_path), rows)
    table = pa.Table.from_pylist([{"positives": list(row.positives)} for row in rows])
    assert with_next_positives(table, np.arange(10)).equals(table)
    assert not {"positive_scores", "positive_cross_scores"} & {*read_table(part.path).column_names}
