"""Bars in groups, as all pictures of scores draw them."""

import pytest

from rayembed.display.figures import COLOURS, grouped_bars, new_figure, png_of, set_title


def drawn(heights):
    figure, axes = new_figure(width=6.0)
    colours = {label: COLOURS[i] for i, label in enumerate(heights)}
    lowest = grouped_bars(axes, heights, colours, "{:.1f}".format, width=0.8)
    places = {
        c.get_label(): [(bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in c]
        for c in axes.containers
    }
    return figure, axes, places, lowest


def test_bars_of_a_group_stand_side_by_side_and_a_missing_one_leaves_no_gap():
    _, axes, places, lowest = drawn({"a": [0.5, 0.25], "b": [0.75, None], "c": [-0.5, 1.0]})
    third = 0.8 / 3
    assert places["a"] == [pytest.approx((-third, 0.5)), pytest.approx((1 - third / 2, 0.25))]
    assert places["b"] == [pytest.approx((0.0, 0.75))]
    assert places["c"] == [pytest.approx((third, -0.5)), pytest.approx((1 + third / 2, 1.0))]
    assert lowest == -0.5
    assert sorted(text.get_text() for text in axes.texts) == ["-0.5", "0.2", "0.5", "0.8", "1.0"]


def test_no_bars_and_several_axes():
    figure, axes, places, lowest = drawn({})
    assert (places, lowest) == ({}, 0.0)
    set_title(axes, "Nothing")
    assert axes.get_title(loc="left") == "Nothing"
    assert png_of(figure).startswith(b"\x89PNG")
    assert new_figure(width=6.0, columns=2)[1].shape == (2,)
    assert new_figure(width=6.0, rows=(2.0, 1.0))[1].shape == (2,)
