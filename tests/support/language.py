"""Check the English of the code: `python tests/support/language.py`, part of `make check`.

First sentences of docstrings say in plain words what a thing does or is; names of public functions
and classes hold no riddles; a class name stands for one thing in all three packages.

`--draw SEED` prints 60 first sentences and 60 messages instead, drawn by the seed, for a reader who
does not know the project to judge.
"""

import argparse
import ast
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PLATFORM = Path(__file__).resolve().parents[2] / "platform"

WORDS = re.compile(
    r"\b(told|tells?|anew|whoever|so many|asked|takes no part|there is one|of which|what is|"
    r"those of|the found)\b",
    re.IGNORECASE,
)
"""Words that a first sentence does without: they stand for a noun or a verb that would say more."""

NAMES = re.compile(r"(?:^|_)(told|found|asked|anew|whoever)(?:_|$)")
"""Parts of public names that say nothing of what a thing is."""

SHARED = {"Trial", "Job", "Report", "Text"}
"""Class names that several modules may have, since each is seen only beside its own."""


def first_sentence(docstring: str) -> str:
    """The docstring up to its first full stop, colon or semicolon before a space."""
    return re.split(r"(?<=[.:;!?])\s", " ".join(docstring.split()), maxsplit=1)[0]


def problems(platform: Path = PLATFORM) -> Iterator[str]:
    """One line for each place that breaks a rule, with its file and line."""
    classes = defaultdict(list)
    for shown, tree in _trees(platform):
        for node in ast.walk(tree):
            if not isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ):
                continue
            name, line = getattr(node, "name", ""), getattr(node, "lineno", 1)
            first = first_sentence(ast.get_docstring(node) or "")
            if match := WORDS.search(first):
                yield f"{shown}:{line}: {match[0]!r} in a first sentence: {first}"
            if name.startswith("_"):
                continue
            if match := NAMES.search(name):
                yield f"{shown}:{line}: {match[1]!r} in the name {name}"
            if isinstance(node, ast.ClassDef):
                classes[name].append(f"{shown}:{line}")
    for name, places in sorted(classes.items()):
        if len(places) > 1 and name not in SHARED:
            yield f"{places[1]}: the class name {name} is also that of {places[0]}"


LOGGERS = {"log", "logger", "_log", "_logger"}
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
_WORD = re.compile(r"(?<![\w{(.'\[])[A-Za-z]{2,}\b(?![^{}]*\})")
"""A word outside of braces."""


def sentences(platform: Path = PLATFORM) -> list[str]:
    """First sentences, up to a full stop, of all docstrings, with file, line and name."""
    return [
        f"{shown}:{getattr(node, 'lineno', 1)} {getattr(node, 'name', '')}: "
        + re.split(r"(?<=[.!?])\s", " ".join(text.split()), maxsplit=1)[0]
        for shown, tree in _trees(platform)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]


def messages(platform: Path = PLATFORM) -> list[str]:
    """Texts of logger calls and of raised errors with two words or more of their own."""
    return [
        f"{shown}:{call.lineno} {ast.unparse(call.func)}: {text}"
        for shown, tree in _trees(platform)
        for node in ast.walk(tree)
        if (call := _said(node)) and len(_WORD.findall(text := _text(call.args[0]))) > 1
    ]


def _trees(platform: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(platform.rglob("*.py")):
        yield path.relative_to(platform), ast.parse(path.read_text(encoding="utf-8"))


def _said(node: ast.AST) -> ast.Call | None:
    """The call that logs or makes a raised error, if it has arguments."""
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call) or not call.args:
        return None
    if isinstance(node, ast.Raise):
        return call
    logs = (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in LOGGERS
    )
    return call if logs else None


def _text(node: ast.expr) -> str:
    """The text of a constant, an f-string or a sum of them; expressions stand in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def drawn(seed: int, platform: Path = PLATFORM, count: int = 60) -> list[str]:
    """Random first sentences, then random messages: at most `count` of each."""
    draw = random.Random(seed)
    pools = sentences(platform), messages(platform)
    return [line for pool in pools for line in draw.sample(pool, min(count, len(pool)))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--draw", type=int, metavar="SEED", help="print a sample for a reader")
    seed = parser.parse_args().draw
    lines = list(problems()) if seed is None else drawn(seed)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.exit(seed is None and bool(lines))
