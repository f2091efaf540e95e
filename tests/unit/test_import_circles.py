"""No module imports itself by way of others, whichever room they are in.

import-linter keeps the rooms in layers; this looks inside them. Imports for type checkers alone do
not count. Those inside functions close no circle that Python would trip over, but one that a reader
walks: they are refused in all rooms but a few.
"""

import ast
from pathlib import Path

import networkx
import pytest

import rayembed

PLATFORM = Path(rayembed.__file__).parents[1]


def modules(root):
    """File of each module under a folder, by dotted name."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }


def imports(node, *, of_functions=False):
    """Import statements that are executed when a module is read, and those of its functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imports(ast.Module([other], []), of_functions=of_functions)
        elif of_functions or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(child, of_functions=of_functions)


def imported(path, name, known, **options):
    """Modules of ours that a module names."""
    for statement in imports(ast.parse(path.read_text()), **options):
        if isinstance(statement, ast.Import):
            named = [alias.name for alias in statement.names]
        else:
            base = statement.module or ""
            if statement.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                parents = package[: len(package) - statement.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            parts = [f"{base}.{alias.name}" for alias in statement.names]
            named = [part if part in known else base for part in parts]
        yield from (one for one in named if one in known)


def circles(root, **options):
    """Sets of modules that need each other."""
    known = modules(root)
    graph = networkx.DiGraph()
    for name, path in known.items():
        graph.add_edges_from((name, other) for other in imported(path, name, known, **options))
    found = [sorted(one) for one in networkx.strongly_connected_components(graph) if len(one) > 1]
    return sorted(found + [[name] for name in graph if graph.has_edge(name, name)])


def test_no_modules_need_each_other():
    assert circles(PLATFORM) == []


def test_nor_do_functions_close_a_circle():
    assert circles(PLATFORM, of_functions=True) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from house.b import x\n", [["house.a", "house.b"]]),
        ("from house import b\n", [["house.a", "house.b"]]),
        ("from . import b\n", [["house.a", "house.b"]]),
        ("try:\n    import house.b\nexcept ImportError:\n    pass\n", [["house.a", "house.b"]]),
        ("class A:\n    from house.b import x\n", [["house.a", "house.b"]]),
        ("import house.a\n", [["house.a"]]),
        ("def later():\n    from house.b import x\n", []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.b\n", []),
        ("import house\n", []),
    ],
)
def test_a_circle_is_seen(tmp_path, text, expected):
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").touch()
    (tmp_path / "house" / "a.py").write_text(text)
    (tmp_path / "house" / "b.py").write_text("from house.a import later\n")
    assert circles(tmp_path) == expected
    if "later" in text:
        assert circles(tmp_path, of_functions=True) == [["house.a", "house.b"]], "the control"
