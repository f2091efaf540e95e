"""Tables of scores taken several times."""

import csv
import io
import math

import pytest
from rich.console import Console

from rayembed_papers.spread import (
    MEAN,
    SpreadTable,
    shown,
    spread_csv,
    spread_markdown,
    spread_table,
)

TABLE = SpreadTable(
    {
        "plain": {"A": (0.5, 0.7), "B": (0.1, 0.3)},
        "better": {"A": (0.6, 0.9), "B": (0.2, 0.3)},
        "part": {"A": (0.4, 0.4)},
    },
    base="plain",
)


def test_means_and_deviations():
    assert shown((0.5, 0.7)) == "0.600 ± 0.141"
    assert shown((0.5,)) == "0.500"
    assert shown((0.125, -0.125), signed=True) == "+0.000 ± 0.177"
    assert shown(()) == shown((0.5, math.nan)) == "–"


def test_the_mean_over_tasks_is_taken_each_time_and_only_of_whole_rows():
    assert TABLE.columns == ("A", "B", MEAN)
    assert TABLE.scores("plain", MEAN) == pytest.approx((0.3, 0.5))
    assert TABLE.scores("part", MEAN) == ()
    assert SpreadTable({"one": {"A": (1.0,)}}).columns == ("A",)


def test_gains_are_of_one_seed():
    assert TABLE.gains("better", "A") == pytest.approx((0.1, 0.2))
    assert TABLE.gains("better", MEAN) == pytest.approx((0.1, 0.1))
    assert TABLE.gains("plain", "A") == TABLE.gains("part", "B") == ()


def test_markdown_csv_and_terminal():
    lines = spread_markdown(TABLE, "row").splitlines()
    assert lines[0] == "| row | A | B | Mean |"
    assert lines[2] == "| plain | 0.600 ± 0.141 | 0.200 ± 0.141 | 0.400 ± 0.141 |"
    assert lines[-2] == "| better | +0.150 ± 0.071 | +0.050 ± 0.071 | +0.100 ± 0.000 |"
    assert lines[-1] == "| part | -0.200 ± 0.141 | – | – |"
    rows = list(csv.DictReader(io.StringIO(spread_csv(TABLE, "row"))))
    assert len(rows) == 10
    assert rows[5] == {"row": "better", "task": "A", "time": "1", "score": "0.9"}
    out = io.StringIO()
    Console(file=out, width=100).print(spread_table(TABLE, "row", title="t"))
    assert "0.750 ± 0.212" in out.getvalue()
    assert "+0.150 ± 0.071" in out.getvalue()
