"""The one table in its three forms."""

import io
import math

from rich.console import Console

from rayembed.display.tables import MISSING, WIDTH, Cell, Table, best_of, console, show

TABLE = Table(
    ["model", "a | b", "seconds"],
    [
        ["[plain]", Cell(0.50049), 12],
        ["better", Cell(0.7123456789, 0.2, best=True), 3.25],
        ["none", Cell(math.nan), ""],
    ],
    title="Scores",
    align="lr",
)


def printed(table, width=60, **given):
    out = io.StringIO()
    Console(file=out, width=width, **given).print(table)
    return out.getvalue()


def test_markdown_has_rounded_numbers_and_bars_that_end_no_cell():
    assert show(TABLE, "markdown").splitlines() == [
        "| model | a \\| b | seconds |",
        "| --- | ---: | ---: |",
        "| [plain] | 0.500 | 12 |",
        "| better | **0.712** (+0.200) | 3.25 |",
        f"| none | {MISSING} |  |",
    ]


def test_csv_has_numbers_in_full():
    assert show(TABLE, "csv").splitlines() == [
        "model,a | b,seconds",
        "[plain],0.50049,12",
        "better,0.7123456789,3.25",
        "none,nan,",
    ]
    assert show(Table(["a", "b"], [["x,y", Cell(None)]]), "csv") == 'a,b\n"x,y",\n'


def test_the_terminal_shows_texts_as_they_are_and_the_best_in_bold():
    text = printed(TABLE)
    for word in ("Scores", "[plain]", "0.500", "0.712 +0.200", "a | b", MISSING, "3.25"):
        assert word in text
    coloured = printed(TABLE, force_terminal=True, color_system="standard")
    assert "\x1b[1m0.712" in coloured
    assert "\x1b[1m0.500" not in coloured


def test_names_stand_whole_unless_they_may_be_broken():
    name = "a-name-of-thirty-characters-xx"
    rows = [[name, "words " * 20]]
    assert name in printed(Table(["n", "t"], rows), width=50)
    assert name not in printed(Table(["n", "t"], [[name * 2, "x" * 50]], folds=True), width=50)


def test_sections_are_bold_with_a_line_above_and_headless_tables_have_no_head():
    rows = [["first", "1"], [" x", "2"], ["second", "3"], [" y", "4"]]
    table = Table(["head", "n"], rows, look="open", align="lr", sections=(0, 2))
    lines = printed(table, force_terminal=True, color_system="standard").splitlines()
    bold = [line for line in lines if "\x1b[1mfirst" in line or "\x1b[1msecond" in line]
    assert len(bold) == 2
    assert printed(table).count("─" * 6) == 2, "below the head and above the second section"
    assert printed(Table(["head", "n"], rows, look="open")).count("─" * 6) == 1
    assert "head" not in printed(Table(["head", "n"], rows, has_head=False))


def test_numbers_that_print_alike_are_all_the_best():
    assert best_of([0.50012, 0.50038, None, math.nan], 3) == 0.5
    assert best_of([None], 3) is None


def test_a_console_that_is_no_terminal_is_as_wide_as_logs_are():
    out = io.StringIO()
    made = console(out)
    assert made.width == WIDTH
    made.print("[bold] 1")
    assert out.getvalue() == "[bold] 1\n"
