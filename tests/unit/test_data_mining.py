"""Mining against its definition, for every rule and whatever the number of parts."""

from functools import partial

import mining_by_hand as by_hand
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mining_step import configured, dataset_of, mine, pipeline_context, prepared, told

from rayembed.data.engine.parts import read_records
from rayembed.data.mining.candidates import OPEN, MinedCandidates, stratified_order
from rayembed.data.mining.mine import make_mined
from rayembed.data.mining.tasks import MineParts
from rayembed.data.records import Negative, Record
from rayembed.data.sources.tasks import HeldOut

RULES = [
    {"kind": "top_k"},
    {"kind": "top_k_perc_pos", "max_relative_score": 0.8},
    {"kind": "top_k_margin_pos", "margin": 1.0},
    {"kind": "top_k_abs", "max_score": 1.0},
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["kind"])
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    labels=st.booleans(),
    negatives=st.booleans(),
    near=st.sampled_from([None, 0.5, 0.8]),
    window=st.sampled_from([(0, 100), (0, 9), (5, 20)]),
)
def test_every_rule_equals_its_definition_with_1_2_and_3_parts(
    rule, seed, labels, negatives, near, window, tmp_path_factory
) -> None:
    rows = by_hand.made_up_rows(30, seed, labels=labels, given=negatives)
    config = configured(rule=rule, near_duplicate=near, skip=window[0], candidates=window[1])
    wanted = by_hand.mined(rows, config)
    for parts in (1, 2, 3):
        found, manifest = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert [r.id for r in found] == [r.id for r in rows]
        assert told(found) == wanted
        kept = [{n.text for n in r.negatives} - by_hand.positives_of(r, rows) for r in rows]
        assert manifest["mined"] == sum(len(n) for n, _ in wanted) - sum(map(len, kept))
        given_ones = sum(len(r.negatives) for r in rows)
        dropped = manifest["refused"].get("given, but a positive", 0)
        assert dropped == given_ones - sum(map(len, kept))
        assert manifest["short"] == sum(len(n) < 4 for n, _ in wanted)
        assert manifest["without_negatives"] == sum(not n for n, _ in wanted)


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": {"kind": "top_k_perc_pos", "max_relative_score": 1.0}},
        {"rule": {"kind": "top_k"}},
        {"near_duplicate": None},
        {"near_duplicate": 0.99},
        {"skip": 5},
        {"candidates": 12},
        {"further_teachers": [{"teacher": "b"}]},
        {"teacher": "b"},
    ],
    ids=str,
)
def test_every_setting_changes_what_the_definition_gives(changes) -> None:
    """The control of the tests by definition: a step that ignored a setting would fail them."""
    rows = by_hand.made_up_rows(30, 1, labels=True)
    usual = {"near_duplicate": 0.5, "rule": RULES[1]}
    without = by_hand.mined(rows, configured(**usual))
    assert by_hand.mined(rows, configured(**(usual | changes))) != without


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), rule=st.sampled_from(RULES), count=st.sampled_from([3, 20]))
def test_teachers_take_turns(seed, rule, count, tmp_path_factory) -> None:
    rows = by_hand.made_up_rows(20, seed, labels=True)
    others = [{"teacher": "b"}, {"teacher": "c", "max_length": 7}]
    config = configured(further_teachers=others, rule=rule, num_negatives=count)
    wanted = by_hand.mined(rows, config)
    for parts in (1, 3):
        found, manifest = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert told(found) == wanted
    assert [one["weights"] for one in manifest["teachers"]] == [f"weights of {t}" for t in "abc"]
    assert len(manifest["histograms"]) == 3
    for record in found:
        texts = [n.text for n in record.negatives]
        assert len(set(texts)) == len(texts)


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 10_000), rule=st.sampled_from(RULES), labels=st.booleans())
def test_given_negatives_are_filtered(seed, rule, labels, tmp_path_factory) -> None:
    rows = by_hand.made_up_rows(30, seed, labels=labels, given=True)
    config = configured(pool="given", rule=rule, num_negatives=2)
    wanted = by_hand.mined(rows, config)
    for parts in (1, 2, 3):
        found, manifest = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert told(found) == wanted
    assert manifest["candidates"] == sum(len(r.negatives) for r in rows)


@pytest.mark.parametrize("pool", ["corpus", "given"])
def test_every_positive_of_a_row_has_its_scores(pool, tmp_path, monkeypatch) -> None:
    rows = by_hand.made_up_rows(30, 5, given=True)
    config = configured(pool=pool, rescoring={"model": "reranker"})
    task = partial(MineParts, load_cross_encoder=by_hand.load_cross_encoder)
    monkeypatch.setattr("rayembed.data.mining.mine.MineParts", task)
    found, _ = mine(tmp_path, rows, config, 3)
    several = [row for row in found if len(row.positives) > 1]
    assert several
    for row in found:
        query = by_hand.vectors_of([row.query])
        scores = (query @ by_hand.vectors_of(row.positives).T)[0].tolist()
        crossed = [by_hand.cross_score(row.query, text) for text in row.positives]
        assert row.positive_score == scores[0]
        assert row.positive_cross_score == by_hand.as_float32(crossed[0])
        if row in several:
            assert list(row.positive_scores) == scores
            assert list(row.positive_cross_scores) == [by_hand.as_float32(s) for s in crossed]
        else:
            assert row.positive_scores is row.positive_cross_scores is None


def test_given_negatives_are_taken_from_no_one_else(tmp_path) -> None:
    rows = [
        Record("1", "q", ("p",), "d", (Negative("x"), Negative("y"))),
        Record("2", "r", ("s",), "d"),
    ]
    config = configured(pool="given", rule={"kind": "top_k"})
    found, manifest = mine(tmp_path, rows, config)
    assert sorted(n.text for n in found[0].negatives) == ["x", "y"]
    assert {n.rule for n in found[0].negatives} == {"top_k"}
    assert found[1].negatives == ()
    assert (manifest["short"], manifest["without_negatives"]) == (2, 1)


@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    rule=st.sampled_from(
        [RULES[0], {"kind": "top_k_perc_pos"}, {"kind": "top_k_margin_pos"}, {"kind": "top_k_abs"}]
    ),
    pool=st.sampled_from(["corpus", "given"]),
    near=st.sampled_from([None, 0.5]),
)
def test_a_cross_encoder_decides(seed, rule, pool, near, tmp_path_factory) -> None:
    rows = by_hand.made_up_rows(20, seed, given=True)
    config = configured(
        rule=rule,
        pool=pool,
        near_duplicate=near,
        candidates=30,
        rescoring={"model": "reranker"},
        further_teachers=[{"teacher": "b"}],
    )
    wanted = by_hand.mined(rows, config)
    task = partial(MineParts, load_cross_encoder=by_hand.load_cross_encoder)
    for parts in (1, 3):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rayembed.data.mining.mine.MineParts", task)
            patch.setattr("rayembed.data.mining.rescoring._QUERIES_AT_A_TIME", 7)
            found, _ = mine(tmp_path_factory.mktemp("mining"), rows, config, parts)
        assert told(found) == wanted


def test_uniform_sampling_draws_from_all_that_the_rule_leaves(tmp_path) -> None:
    rows = by_hand.made_up_rows(40, 3, labels=True)
    config = configured(sampling="uniform", rule=RULES[1], num_negatives=2, near_duplicate=0.5)
    left = [[one[0] for one in kept] for kept, _ in by_hand.allowed(rows, config, "a")]
    seen: dict[int, list[tuple[str, ...]]] = {}
    for seed in range(8):
        found = [
            told(mine(tmp_path / f"{seed} {n}", rows, config, n, seed=seed)[0]) for n in (1, 3)
        ]
        assert found[0] == found[1], "other draws with other parts"
        for row, (negatives, _) in enumerate(found[0]):
            texts = tuple(text for text, *_ in negatives)
            assert set(texts) <= set(left[row])
            assert len(texts) == min(2, len(left[row]))
            seen.setdefault(row, []).append(texts)
    assert sum(len(set(draws)) > 4 for draws in seen.values()) > 30, "seeds draw alike"
    # Of 640 draws as many come from the better half of what is left as from the other.
    better = [
        left[row].index(text) < len(left[row]) / 2
        for row, draws in seen.items()
        for texts in draws
        for text in texts
    ]
    assert len(better) > 500
    assert 0.42 < np.mean(better) < 0.58  # four standard deviations


def test_stratified_sampling_takes_one_of_each_share_of_the_ranking(tmp_path) -> None:
    rows = by_hand.made_up_rows(40, 3, labels=True)
    config = configured(sampling="stratified", rule=RULES[1], num_negatives=3, near_duplicate=None)
    left = [[one[0] for one in kept] for kept, _ in by_hand.allowed(rows, config, "a")]
    assert sum(len(texts) > 5 for texts in left) > 20, "something to draw from"
    seen: dict[int, set[tuple[str, ...]]] = {}
    for seed in range(4):
        found = [
            told(mine(tmp_path / f"{seed} {n}", rows, config, n, seed=seed)[0]) for n in (1, 3)
        ]
        assert found[0] == found[1], "other draws with other parts"
        for row, (negatives, _) in enumerate(found[0]):
            places = [left[row].index(text) for text, *_ in negatives]
            assert len(places) == min(3, len(left[row]))
            if len(left[row]) >= 3:
                assert [place * 3 // len(left[row]) for place in places] == [0, 1, 2]
            seen.setdefault(row, set()).add(tuple(places))
    assert sum(len(draws) > 1 for draws in seen.values()) > 20, "seeds draw alike"


def test_strata_are_gone_through_in_turn() -> None:
    """Seven open candidates of nine in three shares: one of each, then another of each."""
    status = np.full((1, 9), OPEN, dtype=np.int8)
    status[0, [1, 4]] = OPEN + 1
    scores = np.array([[0.9, 0.85, 0.8, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3]], dtype=np.float32)
    ids = np.arange(9)[None]
    hashes = np.random.default_rng(0).integers(1, 2**62, (1, 9))
    candidates = MinedCandidates(scores, ids, hashes, status)
    share = {0: 0, 2: 0, 3: 0, 5: 1, 6: 1, 7: 2, 8: 2}
    orders = set()
    for salt in range(8):
        (order,) = stratified_order(candidates, scores, np.array([salt], dtype=np.uint64), 3)
        assert [share[int(column)] for column in order[:7]] == [0, 1, 2, 0, 1, 2, 0]
        assert sorted(order.tolist()) == list(range(9))
        orders.add(tuple(order.tolist()))
    assert len(orders) > 3


def test_a_seed_decides_nothing_where_nothing_is_drawn(tmp_path) -> None:
    rows = by_hand.made_up_rows(10, 0)
    first, _ = mine(tmp_path, rows, configured(), seed=0)
    again = make_mined(
        pipeline_context(tmp_path, 1),
        dataset_of(configured()),
        prepared(tmp_path, rows, 1),
        HeldOut(),
    )
    assert len(list((tmp_path / "out/data/mined").iterdir())) == 1
    assert [r for part in again.parts for r in read_records(part.path)] == first
