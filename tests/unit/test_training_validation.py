"""What validation scores decide: pure functions, compared with a plain reading of the rule."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.config.run_evaluation import EarlyStoppingConfig
from rayembed.training.validation.decision import (
    choose,
    promoted_step,
    still_needed,
    validated_steps,
)

scores_of_steps = st.lists(
    st.one_of(st.none(), st.integers(0, 6).map(lambda n: n / 10)), min_size=1, max_size=14
)
stoppings = st.one_of(
    st.none(),
    st.builds(
        EarlyStoppingConfig, patience=st.integers(1, 4), min_delta=st.sampled_from([0.0, 0.05, 0.2])
    ),
)


def by_hand(values: list, stopping: EarlyStoppingConfig | None):
    """Best step and step of the end (steps 10, 20, …), from the definition."""
    end = None
    if stopping is not None:
        scored = [i for i, value in enumerate(values) if value is not None]
        improved: list[int] = []
        for i in scored:
            if not improved or values[i] > values[improved[-1]] + stopping.min_delta:
                improved.append(i)
        for number in range(stopping.patience, len(scored) + 1):
            row = scored[number - stopping.patience : number]
            if not set(row) & set(improved):
                end = row[-1] + 1
                break
    seen = [(value, -i) for i, value in enumerate(values[:end]) if value is not None]
    best = 10 * (1 - max(seen)[1]) if seen else None
    return best, None if end is None else 10 * end


@settings(max_examples=400, deadline=None)
@given(scores_of_steps, stoppings)
def test_choice_is_that_of_the_definition(values, stopping):
    steps = [10 * (i + 1) for i in range(len(values))]
    choice = choose(dict(zip(steps, values, strict=True)), steps, stopping)
    best, ends_at = by_hand(values, stopping)
    assert (choice.step, choice.ends_at) == (best, ends_at)
    assert choice.settled


@settings(max_examples=300, deadline=None)
@given(scores_of_steps, stoppings, st.randoms(use_true_random=False))
def test_order_of_arrival_changes_no_decision(values, stopping, chance: random.Random):
    """Whatever arrives when: a stage never ends by another step, nor hands on another one."""
    steps = [10 * (i + 1) for i in range(len(values))]
    whole = dict(zip(steps, values, strict=True))
    final = choose(whole, steps, stopping)
    arrived = list(whole.items())
    chance.shuffle(arrived)
    for number in range(len(arrived) + 1):
        now = choose(dict(arrived[:number]), steps, stopping)
        assert now.ends_at in (None, final.ends_at)
        if now.settled:
            assert now == final


def test_deciding_in_the_order_of_arrival_would_depend_on_it():
    """The control: the usual counter, fed as scores come."""

    def naive(arrived):
        highest, best, in_a_row = float("-inf"), None, 0
        for step, score in arrived:
            in_a_row = 0 if score > highest else in_a_row + 1
            highest, best = max((highest, best), (score, step), key=lambda pair: pair[0])
            if in_a_row == 2:
                break
        return best

    scores = {10: 0.5, 20: 0.7, 30: 0.6, 40: 0.3}
    in_order, mixed = list(scores.items()), [(30, 0.6), (10, 0.5), (40, 0.3), (20, 0.7)]
    assert (naive(in_order), naive(mixed)) == (20, 30)
    stopping = EarlyStoppingConfig(patience=2)
    assert choose(dict(in_order), scores, stopping) == choose(dict(mixed), scores, stopping)


@settings(max_examples=200, deadline=None)
@given(scores_of_steps, stoppings, st.randoms(use_true_random=False))
def test_what_is_handed_on_is_never_removed_on_the_way(values, stopping, chance):
    """Weights come step by step, scores in any order behind them, and tidying whenever it likes."""
    steps = [10 * (i + 1) for i in range(len(values))]
    whole = dict(zip(steps, values, strict=True))
    there, scores, coming = set(), {}, list(steps)
    while coming or (there - scores.keys()):
        waiting = sorted(there - scores.keys())
        if coming and (not waiting or chance.random() < 0.5):
            there.add(coming.pop(0))
        else:
            step = chance.choice(waiting)
            scores[step] = whole[step]
        if chance.random() < 0.7:
            there &= still_needed(there, scores, steps, stopping, "best")
        if choose(scores, steps, stopping).ends_at is not None:
            break
    final = choose(whole, steps, stopping)
    assert choose(scores, steps, stopping) == final
    assert promoted_step(final, steps, "best") in there


def test_ties_gaps_and_small_improvements():
    steps = [10, 20, 30, 40]
    assert choose({10: 0.5, 20: 0.5, 30: 0.4, 40: None}, steps).step == 10
    stopping = EarlyStoppingConfig(patience=2, min_delta=0.1)
    creeping = {10: 0.5, 20: 0.55, 30: 0.58, 40: 0.9}
    choice = choose(creeping, steps, stopping)
    assert (choice.step, choice.ends_at) == (30, 30)  # best of those up to the end; 40 is not seen
    gap = {10: 0.5, 20: None, 30: 0.5, 40: 0.4}
    assert choose(gap, steps, stopping).ends_at == 40  # the failed one counts neither way
    assert choose({20: 0.9, 30: 0.1, 40: 0.1}, steps, stopping).step is None  # 10 is to come


def test_without_any_score_the_last_weights_are_handed_on():
    steps = [10, 20]
    choice = choose({10: None, 20: None}, steps, EarlyStoppingConfig(patience=1))
    assert (choice.step, choice.ends_at, choice.settled) == (None, None, True)
    assert promoted_step(choice, steps, "best") == 20
    assert still_needed({10, 20}, {10: None, 20: None}, steps, None, "best") == {20}


@pytest.mark.parametrize(
    ("num_steps", "every", "expected"),
    [(10, 3, (3, 6, 9, 10)), (10, 5, (5, 10)), (4, 9, (4,)), (3, 1, (1, 2, 3))],
)
def test_the_last_step_is_always_scored(num_steps, every, expected):
    assert validated_steps(num_steps, every) == expected
