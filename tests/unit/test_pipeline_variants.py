"""Variants: made and scored in turn, one chosen by its scores, all in one table."""

import math
from types import SimpleNamespace

import pytest

from rayembed.display.tables import show
from rayembed.pipeline.evaluate.variants import Variant, choose, report_tables, score_all


def scored(labels, means):
    """Variants with such scores of two tasks."""
    variants = [
        Variant(label, lambda mean=mean: mean) for label, mean in zip(labels, means, strict=True)
    ]
    return list(
        score_all(variants, lambda _, mean: SimpleNamespace(scores={"one": mean, "two": mean}))
    )


@pytest.mark.parametrize("labels", ["abc", "cba", ["stage 1", "untrained", "stage 2"], "aaa"])
def test_the_choice_is_by_scores_whatever_the_labels_say(labels):
    found = scored(labels, [0.7, 0.72, 0.715])
    assert choose(found, lambda one: one.mean) is found[1]
    cheap = choose(
        found,
        lambda one: one.mean,
        near=lambda best, other: other.mean >= 0.99 * best.mean,
        cost=lambda one: found.index(one) != 2,
    )
    assert cheap is found[2]


def test_of_equal_gains_the_first_is_chosen_and_none_is_below_all():
    for means, place in (
        ([0.5, 0.7, 0.7 + 1e-12], 1),
        ([math.nan, 0.1], 1),
        ([None, -0.1], 1),
        ([None, math.nan], 0),
    ):
        candidates = [SimpleNamespace(gain=mean) for mean in means]
        assert choose(candidates, lambda one: one.gain) is candidates[place]


def test_each_variant_is_scored_before_the_next_is_made():
    seen = []

    def make(name):
        seen.append(f"made {name}")
        return name

    def score(label, made):
        seen.append(f"scored {made} as {label}")

    variants = [Variant(name.upper(), lambda name=name: make(name)) for name in "ab"]
    assert [one.mean for one in score_all(variants, score)] == [None, None]
    assert seen == ["made a", "scored a as A", "made b", "scored b as B"]


def test_the_table_compares_with_the_first_and_names_what_is_kept():
    found = scored(["whole", "half", "none"], [0.8, 0.4, math.nan])
    table, tasks = report_tables("Title", found, lambda mean: {"figure": 2 * mean}, kept=found[1])
    lines = show(table, "csv").splitlines()
    assert lines[0] == "variant,figure,mean,of whole,"
    assert lines[1] == "whole,1.6,0.8,100.0%,"
    assert lines[2] == "half,0.8,0.4,50.0%,kept"
    assert lines[3].endswith("–,")
    assert "0.400 (-0.400)" in show(tasks, "markdown")
