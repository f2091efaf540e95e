"""Check the English of the code: `python tests/support/language.py`, part of `make check`.

First sentences of docstrings say in plain words what a thing does or is; names of public functions
and classes hold no riddles; a class name stands for one thing in all three packages.
"""

import ast
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
    for path in sorted(platform.rglob("*.py")):
        shown = path.relative_to(platform)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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


if __name__ == "__main__":
    found = list(problems())
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.exit(bool(found))
