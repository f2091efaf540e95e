"""What the core imports is what it depends on; what only an optional part needs is its extra."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from rayembed import errors
from rayembed.errors import ConfigError, require_packages

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

NOT_IMPORTED = {
    "fsspec": "pyarrow reads the hub's file system by it",
    "gguf": "transformers reads GGUF files by it",
}
"""Dependencies of the core that libraries import for it."""

BROUGHT = {
    "alembic": "mlflow's store raises its errors",
    "sqlalchemy": "mlflow's store raises its errors",
    "mlflow-skinny": "a part of mlflow",
    "mlflow-tracing": "a part of mlflow",
    "triton": "a part of torch for GPUs",
}
"""Packages that another one consists of, or whose errors it raises."""


def name_of(requirement):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()


def names_in(requirements):
    return {name_of(one) for one in requirements}


HARD = names_in(PROJECT["dependencies"])
EXTRAS = {
    name: names_in(own) for name, own in PROJECT["optional-dependencies"].items() if name != "dev"
}


def statements(node, *, at_start):
    """Imports below a node; of those `at_start` none of functions and of type checkers alone."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not at_start or not (
            isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        ):
            yield from statements(child, at_start=at_start)


OWN = {"rayembed", "rayembed_extras", "rayembed_papers"}


def imported(package, *, at_start=False):
    """Distributions that the modules of a package of ours import."""
    known = packages_distributions()
    found = set()
    for path in (ROOT / "platform" / package).rglob("*.py"):
        for one in statements(ast.parse(path.read_text()), at_start=at_start):
            names = [a.name for a in one.names] if isinstance(one, ast.Import) else [one.module]
            tops = {name.split(".")[0] for name in names}
            for top in tops - set(sys.stdlib_module_names) - OWN:
                found |= {name_of(own) for own in known.get(top, [top])}
    return found


def test_the_core_needs_what_it_imports_and_imports_what_it_needs():
    found = imported("rayembed")
    optional = set().union(*EXTRAS.values())
    assert found - HARD - optional == set(BROUGHT) & found, "declare it, not what brings it along"
    assert HARD - found == set(NOT_IMPORTED), "nothing of the core needs it"


def test_no_module_of_the_core_needs_an_extra_when_it_is_loaded():
    at_start = imported("rayembed", at_start=True)
    assert "torch" in at_start, "the control"
    assert not at_start & (set().union(*EXTRAS.values()) - HARD)


def test_developers_have_all_extras():
    dev = next(one for one in PROJECT["optional-dependencies"]["dev"] if "rayembed[" in one)
    assert set(re.search(r"\[(.*)\]", dev)[1].split(",")) == set(EXTRAS) - {"cpu", "gpu"}


def without(monkeypatch, module):
    found = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == module else found(name))


def test_what_is_not_installed_is_named_with_its_extra(monkeypatch):
    require_packages("a house", "compress", "ast", "json")
    without(monkeypatch, "json")
    with pytest.raises(
        ConfigError, match=r"^a house needs json, .*in the checkout, pip install '\.\[door\]'"
    ):
        require_packages("a house", "door", "ast", "json")
