"""How texts are cut into micro-batches: at the least cost, within the budget, each text once."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rayembed.machine.hardware import pass_cost_tokens
from rayembed.models.passes.micro_batches import cut_by_length, padded_tokens

LENGTHS = st.lists(st.integers(1, 50), max_size=60)
PASS_COST = st.integers(1, 100)


def sized(num_parameters):
    """A model of so many parameters that takes no memory."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.empty(num_parameters, device="meta"))
    return model


GPU_7B = pass_cost_tokens("cuda", sized(7_000_000_000))
CPU = pass_cost_tokens("cpu", sized(1))


def total(lengths, cuts, pass_cost):
    return padded_tokens(lengths, cuts) + pass_cost * len(cuts)


def all_ways(lengths, budget):
    """Every way to cut the texts, sorted by length, into runs that the budget holds."""
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    for chosen in itertools.product((False, True), repeat=max(len(lengths) - 1, 0)):
        ends = [i + 1 for i, is_end in enumerate(chosen) if is_end] + [len(lengths)]
        cuts = [order[i:j] for i, j in itertools.pairwise([0, *ends])]
        if all(len(cut) == 1 or len(cut) * lengths[cut[0]] <= budget for cut in cuts):
            yield cuts


def filled_up(lengths, budget):
    """Micro-batches that take texts for as long as the budget holds."""
    cuts = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if cuts and (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] <= budget:
            cuts[-1].append(place)
        else:
            cuts.append([place])
    return cuts


@given(LENGTHS, st.integers(1, 200), PASS_COST)
def test_each_text_once_within_the_budget_longest_first(lengths, budget, pass_cost):
    cuts = cut_by_length(lengths, budget, pass_cost)
    assert sorted(i for cut in cuts for i in cut) == list(range(len(lengths)))
    for cut in cuts:
        assert len(cut) == 1 or len(cut) * max(lengths[i] for i in cut) <= budget
    places = [i for cut in cuts for i in cut]
    assert places == sorted(places, key=lambda i: (-lengths[i], i))
    assert cut_by_length(lengths, budget, pass_cost) == cuts


@given(st.lists(st.integers(1, 30), min_size=1, max_size=9), st.integers(1, 120), PASS_COST)
def test_no_other_way_to_cut_costs_less(lengths, budget, pass_cost):
    cuts = cut_by_length(lengths, budget, pass_cost)
    least = min(total(lengths, way, pass_cost) for way in all_ways(lengths, budget))
    assert total(lengths, cuts, pass_cost) == least


@given(LENGTHS, st.integers(1, 200), PASS_COST)
def test_filled_micro_batches_cost_as_much_or_more(lengths, budget, pass_cost):
    cuts, filled = cut_by_length(lengths, budget, pass_cost), filled_up(lengths, budget)
    assert total(lengths, cuts, pass_cost) <= total(lengths, filled, pass_cost)
    # Passes that cost more than all padding leave as few of them as there can be.
    assert len(cut_by_length(lengths, budget, 10_000)) == len(filled)


def test_a_pass_of_a_larger_model_is_worth_fewer_of_its_tokens_on_a_gpu():
    assert GPU_7B == 500
    assert pass_cost_tokens("cuda", sized(1_300_000_000)) == 2692
    assert pass_cost_tokens("cuda", sized(22_000_000)) == 16_384
    assert pass_cost_tokens("cuda", sized(70_000_000_000)) == 256
    assert pass_cost_tokens("cpu", sized(22_000_000)) == CPU == 48


def test_what_a_pass_costs_decides_where_the_texts_are_cut():
    lengths = [3, 50, 4, 4, 9, 8, 1]
    assert cut_by_length(lengths, 60, 1) == [[1], [4, 5], [2, 3, 0], [6]]
    assert cut_by_length(lengths, 60, 10) == [[1], [4, 5], [2, 3, 0, 6]]
    assert cut_by_length(lengths, 60, 100) == [[1], [4, 5, 2, 3, 0, 6]]
    assert filled_up(lengths, 60) == cut_by_length(lengths, 60, 100)
    # Filled ones are not the best ones: what the tests above compare with can fail.
    assert total(lengths, filled_up(lengths, 60), 1) > total(
        lengths, cut_by_length(lengths, 60, 1), 1
    )


@pytest.mark.parametrize(
    ("texts", "budget", "pass_cost", "most", "passes", "filled_share"),
    [
        (144, 16_384, GPU_7B, 1.2, 8, 2.2),
        (36, 16_384, GPU_7B, 1.35, 4, 3.9),
        (144, 1024, CPU, 1.05, 22, 1.09),
    ],
    ids=["8 workers", "32 workers", "CPU"],
)
def test_padded_tokens_for_each_real_one(texts, budget, pass_cost, most, passes, filled_share):
    """Of 144 or 36 texts with log-normal lengths, as of 128 pairs with 7 negatives on workers."""
    rng = np.random.default_rng(0)
    shares, filled, counts = [], [], []
    for _ in range(50):
        drawn = np.exp(rng.normal(np.log(64), 0.9, texts))
        lengths = np.clip(drawn.round(), 8, 512).astype(int).tolist()
        cuts = cut_by_length(lengths, budget, pass_cost)
        shares.append(padded_tokens(lengths, cuts) / sum(lengths))
        counts.append(len(cuts))
        filled.append(padded_tokens(lengths, filled_up(lengths, budget)) / sum(lengths))
    assert np.mean(shares) < most
    assert np.mean(counts) < passes
    assert np.mean(filled) > filled_share
