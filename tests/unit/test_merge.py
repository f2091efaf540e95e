"""Merging of models: the arithmetic by hand, what cannot be merged."""

import math
import weakref

import pytest
import torch

from rayembed.errors import ConfigError
from rayembed.models.saving.merge import check_density, check_shares, merge


def weights(*values, places=(1, 2)):
    return {"w": torch.tensor(values), "places": torch.tensor(places)}


def test_linear_is_the_weighted_mean_and_keeps_whole_numbers():
    found = merge("linear", [weights(1.0, 2.0), weights(5.0, 0.0, places=(9, 9))], (0.25, 0.75))
    assert found["w"].tolist() == [4.0, 0.5]
    assert found["places"].tolist() == [1, 2]


def test_no_model_is_held_while_the_next_one_is_read():
    alive = []

    def models():
        for value in (1.0, 2.0, 3.0):
            model = weights(value, value)
            alive.append(weakref.ref(model["w"]))
            assert [one() is not None for one in alive[:-1]] == [False] * (len(alive) - 1)
            yield model
            del model

    found = merge("linear", models(), (0.5, 0.25, 0.25))
    assert found["w"].tolist() == [1.75, 1.75]


def test_task_arithmetic_adds_changes_to_the_base():
    models = [weights(1.0, 1.0), weights(2.0, 1.0), weights(1.0, 4.0)]
    found = merge("task_arithmetic", models, (0.5, 2.0))
    assert found["w"].tolist() == [1.5, 7.0]


def test_an_arc_keeps_the_norm_which_a_line_does_not():
    one, other = weights(2.0, 0.0), weights(0.0, 2.0)
    found = merge("slerp", [one, other], (1 / 3,))["w"]
    expected = torch.tensor([2 * math.cos(math.pi / 6), 2 * math.sin(math.pi / 6)])
    torch.testing.assert_close(found, expected)
    assert merge("linear", [one, other], (0.5, 0.5))["w"].norm() < 1.5
    longer = merge("slerp", [one, weights(0.0, 6.0)], (0.5,))["w"]
    torch.testing.assert_close(longer, torch.tensor([2 * math.sqrt(2), 2 * math.sqrt(2)]))


@pytest.mark.parametrize("other", [weights(4.0, 0.0), weights(-4.0, 0.0), weights(0.0, 0.0)])
def test_directions_without_an_arc_are_merged_in_a_line(other):
    found = merge("slerp", [weights(2.0, 0.0), other], (0.5,))["w"]
    torch.testing.assert_close(found, (weights(2.0, 0.0)["w"] + other["w"]) / 2)


def test_ties_of_three_changes_by_hand():
    """The largest four of ten changes of each model stay, and the elected sign has the mean."""
    base = {"a": torch.zeros(4), "b": torch.ones(2, 3)}
    changes = [
        {"a": [5.0, -4.0, 0.1, 0.0], "b": [[0.1, 0.2, -3.0], [2.0, 0.0, 0.0]]},
        {"a": [-1.0, -6.0, 0.1, 3.0], "b": [[0.1, 0.2, 0.3], [4.0, 0.0, 0.5]]},
        {"a": [2.0, 7.0, 0.1, 3.0], "b": [[0.1, 0.2, -1.0], [0.0, 0.0, 0.5]]},
    ]
    models = [{n: base[n] + torch.tensor(value) for n, value in one.items()} for one in changes]
    found = merge("ties", [base, *models], (0.5, 0.5, 0.5), 0.4)
    # Kept: 5 -4 . . | . . -3 2 . ., -1 -6 . 3 | . . . 4 . ., 2 7 . 3 | . . -1 . . .
    apart = torch.tensor([3.5, -5.0, 0.0, 3.0]), torch.tensor([[0, 0, -2.0], [3.0, 0, 0]])
    torch.testing.assert_close(found["a"], 1.5 * apart[0])
    torch.testing.assert_close(found["b"], 1 + 1.5 * apart[1])


def test_ties_that_keeps_all_of_one_model_is_its_line():
    models = [weights(1.0, 4.0), weights(2.0, 1.0)]
    line = merge("task_arithmetic", models, (0.3,))["w"]
    torch.testing.assert_close(merge("ties", models, (0.3,), 1.0)["w"], line)
    torch.testing.assert_close(merge("dare", models, (0.3,), 1.0)["w"], line)
    largest = merge("ties", models, (0.3,), 0.5)["w"]
    torch.testing.assert_close(largest, torch.tensor([1.0, 4.0 - 0.9]))


def test_dare_keeps_a_random_part_and_the_mean_of_the_changes():
    draw = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(100, 100, generator=draw), "v": torch.zeros(10_000)}
    models = [{n: value + 1 + k for n, value in base.items()} for k in range(2)]
    found = merge("dare", [base, *models], (0.5, 0.25), 0.2)
    again = merge("dare", [base, *models], (0.5, 0.25), 0.2)
    of_w, of_v = (found["w"] - base["w"]).flatten(), found["v"]
    assert torch.equal(found["w"], again["w"])
    for apart in (of_w, of_v):
        # Either model's change is there, five times as large, or none: 0, 2.5, 2.5, 5.
        assert set(apart.round(decimals=3).tolist()) == {0.0, 2.5, 5.0}
        assert (apart == 0).float().mean().item() == pytest.approx(0.64, abs=0.03)
        assert apart.mean().item() == pytest.approx(1.0, abs=0.05)
    assert not torch.equal(of_w.round(decimals=3), of_v.round(decimals=3))


def test_a_density_is_checked():
    with pytest.raises(ConfigError, match=r"density=0\.5 has no effect.*'linear'"):
        check_density("linear", 0.5)
    with pytest.raises(ConfigError, match=r"above 0 and at most 1, but is 1\.5"):
        check_density("ties", 1.5)
    assert check_density("dare", None) == 0.2


def test_sums_of_bfloat16_are_taken_in_float32():
    models = [{"w": torch.full((1,), 1 + i / 128).bfloat16()} for i in (0, 1)]
    found = merge("linear", models, (0.5, 0.5))["w"]
    assert found.dtype == torch.float32
    assert found.item() == 1 + 1 / 256


@pytest.mark.parametrize(
    ("method", "number", "shares", "words"),
    [
        ("linear", 1, None, "at least two models, but 1"),
        ("slerp", 3, None, "exactly two models, but 3"),
        ("linear", 2, (0.5,), r"needs 2 shares \(one of each model\), but 1"),
        ("linear", 2, (0.5, 0.6), "must sum to 1, but sum to 1.1"),
        ("slerp", 2, (1.5,), "must be between 0 and 1, but is 1.5"),
        ("task_arithmetic", 2, (0.5, 0.5), "after the base, which comes first"),
        ("ties", 3, (0.5,), "after the base, which comes first"),
        ("ties", 3, (0.5, -0.5), "must be above 0, but one is -0.5"),
    ],
)
def test_wrong_shares_are_refused(method, number, shares, words):
    with pytest.raises(ConfigError, match=words):
        check_shares(method, number, shares)


def test_without_shares_they_are_equal():
    assert check_shares("linear", 4, None) == (0.25,) * 4
    assert check_shares("slerp", 2, None) == (0.5,)
    assert check_shares("task_arithmetic", 3, None) == (0.5, 0.5)
