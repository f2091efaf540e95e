"""docs/troubleshooting.md quotes messages: each still stands in the code."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import rayembed

PLATFORM = Path(rayembed.__file__).parent
PAGE = PLATFORM.parents[1] / "docs" / "troubleshooting.md"
GAP = "\0"


def literal(node):
    """The text of a string in the code, with a gap where a value is put in; None: no string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\(\w+\))?[-+.\d]*[sdrgf]", GAP, node.value)
    if isinstance(node, ast.JoinedStr):
        parts = (p.value if isinstance(p, ast.Constant) else GAP for p in node.values)
        return "".join(parts)
    return None


@cache
def messages():
    """Every text in the code but docstrings, its white space made single spaces."""
    found = set()
    for path in PLATFORM.parent.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        docs = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in (node for node in nodes if id(node) not in docs):
            if (text := literal(node)) is not None and len(text) > 20:
                found.add(" ".join(text.split()))
    return found


def stands_in_the_code(quoted):
    """Whether one message has the quoted words, in this order, around what `…` stands for."""
    words = [re.escape(part.strip()) for part in quoted.split("…") if part.strip()]
    return any(re.search(".*?".join(words), text) for text in messages())


OURS, _, _ = PAGE.read_text().partition("## Messages of other programs")
CELLS = re.findall(r"^\| (`.+?) \| ", OURS, re.MULTILINE)
QUOTED = [quoted for cell in CELLS for quoted in re.findall(r"`([^`]+)`", cell)]


def test_there_are_messages_of_all_kinds():
    assert len(QUOTED) >= 30
    assert len(set(QUOTED)) == len(QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_stands_in_the_code(quoted):
    assert stands_in_the_code(quoted)


@pytest.mark.parametrize(
    "quoted",
    [
        "no node is big enough for one worker",
        "was lost with its node or process:",
        "cannot fetch … from the wheel",  # both parts are there, not in one message
    ],
)
def test_a_message_that_is_gone_would_be_seen(quoted):
    assert not stands_in_the_code(quoted)


def test_a_message_with_values_is_found_around_them():
    assert literal(ast.parse('f"a {x!r} b {y}"').body[0].value) == f"a {GAP} b {GAP}"
    assert literal(ast.parse('"stage %s: %d of %.1f"').body[0].value) == (
        f"stage {GAP}: {GAP} of {GAP}"
    )
