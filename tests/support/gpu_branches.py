"""Conditions that look at a device, and what they came to while tests ran.

Those of `if`, `while`, conditional expressions and returned comparisons, each as a whole. Not
looked at are conditions that are assigned or passed on, filters of comprehensions and
`placement.on_gpu`.

As a plugin of pytest (`-p gpu_branches`) it has modules of the platform note the outcome of each
such condition and each call of `torch.cuda`, and writes them when the session ends.
"""

import ast
import importlib.abc
import importlib.machinery
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PLATFORM = Path(__file__).parents[2] / "platform"
FILE = "GPU_BRANCHES_FILE"
"""Environment variable that names the file of outcomes."""

_DEVICES = ("cuda", "cpu")
_NAME = "_note_branch_of_devices"


class Branch(NamedTuple):
    """A condition on a device, or a call of `torch.cuda`, by its place in the code."""

    module: str
    function: str
    code: str

    def __str__(self) -> str:
        return f"{self.module} {self.function}: {self.code}"


outcomes: defaultdict[Branch, set[str]] = defaultdict(set)
"""`True` and `False` of conditions, `called` of calls."""


def needed(branch: Branch) -> set[str]:
    """Outcomes that tests must have seen."""
    return {"called"} if branch.code.startswith("torch.cuda.") and "(" not in branch.code else {
        "True", "False"
    }  # fmt: skip


def branches() -> dict[Branch, ast.expr]:
    """All of the platform, by their code and not by line."""
    found = {}
    for file in sorted(PLATFORM.rglob("*.py")):
        finder = _Branches(_module(file))
        finder.visit(ast.parse(file.read_text()))
        found |= finder.found
    return found


def _module(file: Path) -> str:
    return file.relative_to(PLATFORM).as_posix()


def _dotted(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


def _on_a_device(condition: ast.expr) -> bool:
    """Whether a condition asks what a device is, or whether there is a GPU."""
    for node in ast.walk(condition):
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            return True
        kind = isinstance(node, ast.Attribute) and node.attr == "type"
        if kind and "device" in ast.unparse(node.value):
            return True
        if isinstance(node, ast.Constant) and node.value in _DEVICES:
            return True
        if _dotted(node).startswith("torch.cuda."):
            return True
    return False


class _Branches(ast.NodeTransformer):
    """Finds branches, and puts a note around each."""

    def __init__(self, module: str) -> None:
        self.module = module
        self.found: dict[Branch, ast.expr] = {}
        self._scopes: list[str] = []

    def _scope(self, node: Any) -> ast.AST:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _scope

    def _noted(self, node: ast.expr) -> ast.expr:
        branch = Branch(self.module, ".".join(self._scopes), ast.unparse(node))
        self.found[branch] = node
        arguments = [ast.Constant(part) for part in branch]
        noted = ast.Call(ast.Name(_NAME, ast.Load()), [node, *arguments], [])
        return ast.fix_missing_locations(ast.copy_location(noted, node))

    def _tested(self, node: Any) -> ast.AST:
        on_a_device, test = _on_a_device(node.test), node.test
        noted = self._noted(test) if on_a_device else None
        self.generic_visit(node)
        if noted is not None:
            noted.args[0] = node.test  # with the calls that are noted within
            node.test = noted
        return node

    visit_If = visit_IfExp = visit_While = _tested

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = node.value
        boolean = isinstance(value, ast.Compare | ast.BoolOp)
        noted = self._noted(value) if boolean and _on_a_device(value) else None
        self.generic_visit(node)
        if noted is not None:
            noted.args[0] = node.value
            node.value = noted
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if _dotted(node.func).startswith("torch.cuda."):
            node.func = self._noted(node.func)
        return node


def _note(value: Any, *branch: str) -> Any:
    outcomes[Branch(*branch)].add("called" if callable(value) else str(bool(value)))
    return value


class _Noting(importlib.machinery.SourceFileLoader):
    """Loads modules whose branches are noted."""

    def get_code(self, fullname: str) -> Any:
        path = Path(self.get_filename(fullname))
        tree = ast.parse(path.read_text())
        finder = _Branches(_module(path))
        return compile(finder.visit(tree), str(path), "exec", dont_inherit=True)

    def exec_module(self, module: Any) -> None:
        setattr(module, _NAME, _note)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in ("rayembed", "rayembed_papers"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        loader = None if spec is None else spec.loader
        if isinstance(loader, importlib.machinery.SourceFileLoader):
            module = _module(Path(loader.path))
            if any(branch.module == module for branch in _known()):
                spec.loader = _Noting(fullname, loader.path)
        return spec


_found: list[Branch] = []


def _known() -> Iterator[Branch]:
    if not _found:
        _found.extend(branches())
    return iter(_found)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Note branches of what is imported from here on."""
    assert "rayembed" not in sys.modules
    sys.meta_path.insert(0, _Finder())


def pytest_sessionfinish(session: Any) -> None:
    """Write the outcomes."""
    told = [[*branch, sorted(seen)] for branch, seen in outcomes.items()]
    Path(os.environ[FILE]).write_text(json.dumps(told))


def written(file: Path) -> dict[Branch, set[str]]:
    """Outcomes that a session wrote."""
    return {Branch(*branch): set(seen) for *branch, seen in json.loads(file.read_text())}
