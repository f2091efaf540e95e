"""The language of search spaces: what it reads, what it refuses, which values it gives."""

import math
import random

import pytest
from tiny_job import make_run

from rayembed.errors import ConfigError
from rayembed_extras.sweeps.space import (
    Domain,
    all_values,
    apply,
    check_paths,
    corners,
    draws,
    is_domain,
    parse_domain,
    parse_space,
)

RATE = "stages.retrieval.optimizer.learning_rate"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("grid(1, 2)", ("1", "2")),
        ("choice(eos)", ("eos",)),
        ("grid([a, b], [c])", ("[a, b]", "[c]")),
        ("grid({kind: mean, x: (1,2)}, null)", ("{kind: mean, x: (1,2)}", "null")),
        ("choice('a, b', \"c\", d e)", ("a, b", "c", "d e")),
        (" grid( 1e-3 ,2 ) ", ("1e-3", "2")),
    ],
)
def test_values_are_divided_by_commas_outside_brackets_and_quotes(text, values):
    assert parse_domain("x", text).values == values


def test_limits_are_numbers():
    assert parse_domain("x", "loguniform(1e-5, 1e-3)") == Domain("loguniform", (), 1e-5, 1e-3)
    assert parse_domain("x", "integers(1, 8)").ends == ("1", "8")
    assert parse_domain("x", "uniform(0, 0.5)").ends == ("0.0", "0.5")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid()", "empty search space"),
        ("grid(a, , b)", "empty value"),
        ("choice(a, a)", "twice"),
        ("choices(a, b)", "did you mean 'choice'"),
        ("grid(a, [b)", r"'\]' is missing"),
        ("grid('a)", '"\'" is missing'),
        ("uniform(1)", "two limits"),
        ("uniform(a, b)", "must be numbers"),
        ("uniform(2, 1)", "must be below"),
        ("uniform(0, inf)", "must be below"),
        ("loguniform(0, 1)", "above 0"),
        ("integers(0.5, 2)", "whole numbers"),
        ("0.5", "expected one of grid"),
    ],
)
def test_what_is_no_domain_is_refused_with_the_reason(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_domain("x", text)


def test_only_domains_are_taken_for_domains():
    assert is_domain("choice(a)")
    assert not is_domain("choose(a)")
    assert not is_domain("Given a text (of any kind)")


def test_entries_are_texts_and_lists():
    space = parse_space({RATE: "loguniform(1e-5, 1e-3)", "model.mask": ["causal", "bidirectional"]})
    assert space[RATE].kind == "loguniform"
    assert space["model.mask"] == Domain("grid", ("causal", "bidirectional"))
    with pytest.raises(ConfigError, match="empty search space"):
        parse_space({"model.mask": []})


def test_lists_and_nulls_of_a_file_reach_the_settings(tmp_path):
    space = parse_space(
        {"model.lora.target_modules": [["q_proj"], ["q_proj", "v_proj"]], "model.lora": [None]}
    )
    run = make_run(tmp_path)
    modules = space["model.lora.target_modules"].values[1]
    changed = apply(run, {"model.lora.target_modules": modules})
    assert changed.model.lora.target_modules == ("q_proj", "v_proj")
    assert apply(run, {"model.lora": space["model.lora"].values[0]}).model.lora is None


def test_a_grid_is_the_whole_product_and_needs_an_end():
    space = parse_space({"a": "grid(1, 2)", "b": "choice(x, y, z)"})
    found = list(all_values(space))
    assert len(found) == 6
    assert len({tuple(values.items()) for values in found}) == 6
    assert found[0] == {"a": "1", "b": "x"}
    with pytest.raises(ConfigError, match="infinitely many values"):
        list(all_values(parse_space({"a": "uniform(0, 1)"})))


def test_draws_stay_within_limits_and_more_of_them_go_on_from_the_same():
    space = parse_space(
        {
            "a": "loguniform(1e-6, 1e-2)",
            "b": "integers(2, 4)",
            "c": "choice(x, y)",
            "g": "grid(1, 2)",
        }
    )
    few, many = list(draws(space, 3, seed=5)), list(draws(space, 200, seed=5))
    assert many[: len(few)] == few
    assert len(many) == 400  # each draw with every value of the grid
    rates = [float(values["a"]) for values in many]
    assert all(1e-6 <= rate <= 1e-2 for rate in rates)
    below = sum(rate < 1e-4 for rate in rates) / len(rates)
    assert 0.35 < below < 0.65, "half of the logarithms lie below the middle one"
    assert {values["b"] for values in many} == {"2", "3", "4"}
    assert many[0] | {"g": ""} == many[1] | {"g": ""}
    assert list(draws(space, 3, seed=6)) != few


def test_a_number_is_read_back_as_it_was_drawn():
    domain = parse_domain("x", "loguniform(1e-6, 1e-2)")
    generator = random.Random(0)
    for _ in range(50):
        text = domain.draw(generator)
        assert domain.text(float(text)) == text
        assert math.isfinite(float(text))


def test_corners_are_all_ends_or_one_setting_at_a_time():
    space = parse_space({"a": "uniform(0, 1)", "b": "grid(x, y, z)"})
    assert len(list(corners(space, 6))) == 6
    few = list(corners(space, 5))
    assert few[0] == {"a": "0.0", "b": "x"}
    assert [sum(one[p] != few[0][p] for p in one) for one in few[1:]] == [1, 1, 1]


def test_values_that_the_run_refuses_are_told_with_their_combination(tmp_path):
    run = make_run(tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)learning_rat=1.*did you mean 'learning_rate'"):
        apply(run, {"stages.retrieval.optimizer.learning_rat": "1"})
    with pytest.raises(ConfigError, match=r"(?s)model.mask=both, .*must be 'bidirectional'"):
        apply(run, {"model.mask": "both", RATE: "0.1"})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({}, "empty search space"),
        ({"placement.workers": "grid(1, 2)"}, "changes none of its weights"),
        ({"name": "grid(a, b)"}, "a name of its own"),
        ({"model.lora": "grid(null)", "model.lora.rank": "grid(2, 4)"}, "is part of model.lora"),
    ],
)
def test_spaces_that_compare_nothing_are_refused(space, message):
    with pytest.raises(ConfigError, match=message):
        check_paths(parse_space(space))
