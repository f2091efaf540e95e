"""Rows of a batch in an order that gives every worker about as much to do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayembed.data.engine.parts import write_part
from rayembed.data.plan.files import balanced
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.data.records import Negative, Record


def rows_of_nine_texts(count, draw):
    """Tokens of rows of nine texts, half of them long: lognormal, from 8 to 512 a text."""
    median = np.where(draw.random(count) < 0.5, 130, 45)
    texts = median[:, None] * np.exp(draw.normal(0, 0.8, (count, 9)))
    return texts.clip(8, 512).sum(axis=1)


def slowest(costs, workers):
    shares = np.asarray(costs).reshape(workers, -1).sum(axis=1)
    return shares.max() / shares.mean()


@pytest.mark.parametrize(
    ("rows", "workers", "before", "after"),
    [(128, 8, 1.15, 1.01), (128, 32, 1.5, 1.05), (1024, 32, 1.12, 1.01), (384, 24, 1.2, 1.08)],
)
def test_the_slowest_worker_is_near_the_mean(rows, workers, before, after):
    draw = np.random.default_rng(0)
    drawn, dealt = [], []
    for _ in range(50):
        costs = rows_of_nine_texts(rows, draw)
        drawn.append(slowest(costs, workers))
        dealt.append(slowest(costs[balanced(costs.tolist())], workers))
    assert np.mean(drawn) > before
    assert np.mean(dealt) < after


@given(st.lists(st.integers(0, 100), max_size=40))
def test_every_row_has_one_place_and_the_costs_alone_decide(costs):
    order = balanced(costs)
    assert sorted(order) == list(range(len(costs)))
    assert order == balanced(costs)
    if len(costs) % 2 == 0:
        dealt = np.array(costs, dtype=int)[np.array(order, dtype=int)]
        half = len(costs) // 2
        assert abs(dealt[:half].sum() - dealt[half:].sum()) <= max(costs, default=0)


def test_shares_of_a_plan_are_balanced_and_its_rows_the_same(tmp_path):
    draw = np.random.default_rng(1)

    def text(name, number):
        return f"{name} {number} ".ljust(int(20 * np.exp(draw.normal(0, 0.7))), "x")

    rows = [
        Record(
            id=str(i),
            query=text("q", i),
            positives=(text("p", i), "x" * 1000),
            negatives=tuple(Negative(text(f"n{k}", i)) for k in range(i % 3)),
            dataset="d",
        )
        for i in range(64)
    ]
    parts = {"d": [write_part(str(tmp_path / "parts"), rows)]}
    plan = write_plan(str(tmp_path / "plan"), parts, PlanConfig({"d": 1.0}, 32, 2, 2, 0, True))

    def size(record):
        texts = [record.query, record.positives[0], *(n.text for n in record.negatives)]
        return sum(min(len(text), 2048) for text in texts)

    seen = []
    for step in range(2):
        shares = [sum(size(r) for r in plan.read(step, worker, 4)) for worker in range(4)]
        assert max(shares) < 1.05 * np.mean(shares)
        seen += [record.id for record in plan.read(step)]
    assert sorted(seen) == sorted(record.id for record in rows)
