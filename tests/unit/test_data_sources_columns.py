"""Columns of rows: names, paths into nested cells, joined fields."""

from typing import Any

import pytest

from rayembed.data.sources.cells import level_of, read_column

ROW: dict[str, Any] = {
    "query": "q",
    "answers": {"text": ["a", "b"], "start": [1, 2]},
    "passages": [{"title": "T", "text": "one"}, {"title": "", "text": "two"}, {"title": None}],
    "columns": {"title": ["T", "U"], "text": ["one", "two"], "more": ["x"]},
    "deep": [{"in": [{"x": "1"}, {"x": "2"}]}, {"in": [{"x": "3"}]}, {"in": []}],
    "title": "T",
    "texts": ["one", "two"],
    "a.b": "literal",
    "a": {"b": "nested", "c.d": "dotted"},
    "c+d": "plus",
    "number": 7,
    "set": ["first", "second", ["third"]],
    "translation": {"de": "eins", "en": "one"},
    "page": "  Title \n\n first\nsecond ",
    "line": "alone",
    "pages": ["A\nb", "C\nd"],
}


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("query", "q"),
        ("none", None),
        ("query.text", None),
        ("answers.text", ["a", "b"]),
        ("answers.none", None),
        ("translation.en", "one"),
        ("passages.text", ["one", "two", None]),
        ("passages.title+text", ["T one", "two", None]),
        ("columns.title+text", ["T one", "U two"]),
        ("deep.in.x", ["1", "2", "3"]),
        ("deep.0.in.x", ["1", "2"]),
        ("deep.1.in.0.x", "3"),
        ("title+query", "T q"),
        ("title+none", "T"),
        ("none+nothing", None),
        ("title+texts", ["T one", "T two"]),
        ("a.b", "literal"),
        ("a.c.d", "dotted"),
        ("c+d", "plus"),
        ("page.first_line", "Title"),
        ("page.other_lines", "first\nsecond"),
        ("line.other_lines", None),
        ("pages.other_lines", ["b", "d"]),
        ("set.1", "second"),
        ("set.9", None),
        ("title+number", 7),
        ("columns.title+more", {"title": ["T", "U"], "more": ["x"]}),
    ],
)
def test_what_a_column_reads(column: str, value: Any) -> None:
    assert read_column(ROW, column) == value


def test_the_names_that_stand_beside_a_missing_column() -> None:
    assert level_of(ROW, "queries") == (["queries"], ROW)
    names, level = level_of(ROW, "passages.heading+text")
    assert names == ["heading", "text"]
    assert set(level) == {"title", "text"}
    assert level_of(ROW, "query.text") == (["query.text"], ROW), "a text has nothing below it"
    assert level_of(ROW, "page.first_line") == (["page"], ROW), "but its lines"
    assert level_of(ROW, "texts.0") == (["texts"], ROW), "an element of a list"
    assert level_of({"a": []}, "a.b") == ([], {"a": []}), "an empty list does not tell"
    assert level_of({"b": 1}, "a.b") == (["a"], {"b": 1})
    assert set(level_of(ROW, "deep.in.y")[1]) == {"x"}
