"""No module imports itself by way of others, whichever room they are in, and files stay small.

import-linter keeps the rooms in layers; this looks inside them. Every import counts: those inside
functions and those for type checkers alone close no circle that Python would trip over, but one
that a reader walks.
"""

import ast
from pathlib import Path

import networkx
import pytest

import rayembed
from rayembed.config.table import COMPANIONS

PLATFORM = Path(rayembed.__file__).parents[1]


def modules(root):
    """File of each module under a folder, by dotted name."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in root.rglob("*.py")
    }


def imported(path, name, known):
    """Modules of ours that a module names, each with the line."""
    for statement in ast.walk(ast.parse(path.read_text())):
        if isinstance(statement, ast.Import):
            named = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            base = statement.module or ""
            if statement.level:
                package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                parents = package[: len(package) - statement.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            parts = [f"{base}.{alias.name}" for alias in statement.names]
            named = [part if part in known else base for part in parts]
        else:
            continue
        yield from ((one, statement.lineno) for one in named if one in known)


def circles(root):
    """Shortest circle of each set of modules that need each other: `importer:line → imported`."""
    known = modules(root)
    graph = networkx.DiGraph()
    for name, path in known.items():
        for other, line in imported(path, name, known):
            graph.add_edge(name, other, line=line)
    found = [
        min(networkx.simple_cycles(graph.subgraph(one), length_bound=len(one)), key=len)
        for one in networkx.strongly_connected_components(graph)
        if len(one) > 1
    ]
    found += [[name] for name in graph if graph.has_edge(name, name)]
    return sorted(
        [
            f"{name}:{graph[name][after]['line']} → {after}"
            for name, after in zip(circle, [*circle[1:], circle[0]], strict=True)
        ]
        for circle in ([*one[one.index(min(one)) :], *one[: one.index(min(one))]] for one in found)
    )


def test_no_modules_need_each_other():
    assert {"rayembed", *COMPANIONS} <= {*modules(PLATFORM)}
    found = circles(PLATFORM)
    assert not found, "\n\n".join("\n".join(circle) for circle in found)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("from house.b import x\n", 1),
        ("from house import b\n", 1),
        ("from . import b\n", 1),
        ("try:\n    import house.b\nexcept ImportError:\n    pass\n", 2),
        ("class A:\n    from house.b import x\n", 2),
        ("def later():\n    from house.b import x\n", 2),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import house.b\n", 3),
    ],
)
def test_a_circle_is_seen_and_printed(tmp_path, text, line):
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").touch()
    (tmp_path / "house" / "a.py").write_text(text)
    (tmp_path / "house" / "b.py").write_text("from house.a import later\n")
    assert circles(tmp_path) == [[f"house.a:{line} → house.b", "house.b:1 → house.a"]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("import house.a\n", [["house.a:1 → house.a"]]), ("import house\n", []), ("x = 1\n", [])],
)
def test_a_module_that_imports_itself_and_one_that_does_not(tmp_path, text, expected):
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").touch()
    (tmp_path / "house" / "a.py").write_text(text)
    (tmp_path / "house" / "b.py").write_text("from house.a import later\n")
    assert circles(tmp_path) == expected


ROOM = PLATFORM / "rayembed"


def test_the_core_has_no_long_file_and_no_crowded_folder():
    lines = {path: len(path.read_text().splitlines()) for path in ROOM.rglob("*.py")}
    folders = {path.parent for path in lines}
    files = {one: sum(path.is_file() for path in one.iterdir()) for one in folders}
    assert {one: number for one, number in files.items() if number > 30} == {}
    assert {path: number for path, number in lines.items() if number > 420} == {}


def importers_of(package):
    """Files that import a package, within functions as well."""
    for path in PLATFORM.rglob("*.py"):
        for statement in ast.walk(ast.parse(path.read_text())):
            if isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom):
                names = [statement.module or ""]
            else:
                continue
            if package in {name.partition(".")[0] for name in names}:
                yield path


def test_ray_and_deepspeed_are_imported_where_their_files_say_so():
    ray = {path.name for path in importers_of("ray")}
    assert {name for name in ray if not name.endswith("on_ray.py")} == set()
    assert "on_ray.py" in ray, "the control"
    assert set(importers_of("deepspeed")) == {ROOM / "training" / "engine.py"}
