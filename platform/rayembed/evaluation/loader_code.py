"""Check of what mteb's loaders do with the files of a model, read from their text before they are
run.

Searched is a loader, its base classes, and what they name of mteb, in their own module and in those
that they import from. Other packages are what the user installed, and are not looked at.
"""

import ast
import importlib.util
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

Place = tuple[str, str]
"""A module and a name in it; an empty name: the module itself."""

GIVES_LEAVE = "gives trust_remote_code, which runs Python files of its repository"
_OPTIONS = frozenset({"trust_remote_code", "allow_pickle"})
"""Options that give leave to run code."""

_UNPICKLES = "reads pickled files, which run code when they are read"
_RUNS = "runs Python code that is not of an installed package"

_MODULES = {
    **dict.fromkeys(("cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"), _UNPICKLES),
    **dict.fromkeys(("runpy", "torch.hub"), _RUNS),
}
_CALLS = frozenset({"__import__", "compile", "eval", "exec"})
_IMPORTERS = frozenset(
    {"get_class_from_dynamic_module", "import_module", "spec_from_file_location"}
)
"""Last parts of the names of functions that import what a text names."""


@dataclass(frozen=True)
class _Module:
    """The top level of a module."""

    name: str
    definitions: dict[str, list[ast.stmt]] = field(default_factory=dict)
    imports: dict[str, Place] = field(default_factory=dict)
    """Imported places by the name that they have here."""


@cache
def foreign_code(loader: Any) -> str | None:
    """Way in which the loader runs a model's own code, in words; None: by its text it does not.

    Args:
        loader: a class or function, without the `partial` around it.
    """
    if gives_leave(_around(loader)):
        return GIVES_LEAVE
    waiting = list(_roots(loader))
    seen: set[Place] = set()
    while waiting:
        place = waiting.pop()
        if place in seen or place[0].partition(".")[0] != "mteb":
            continue
        seen.add(place)
        reason, places = _looked_at(place)
        if reason is not None:
            return reason
        waiting += places
    return None


@cache
def _looked_at(place: Place) -> tuple[str | None, frozenset[Place]]:
    """Why what stands at the place runs what comes with a model, and which places it names."""
    name, inside = place
    module = _read(name)
    places = {module.imports[inside]} if inside in module.imports else set()
    for statement in module.definitions.get(inside, ()):
        for node in ast.walk(statement):
            if (reason := _reason(node, module)) is not None:
                return reason, frozenset()
            places.update(_named(node, module))
    return None, frozenset(places)


def gives_leave(options: Any) -> bool:
    """Whether nested options of a loader give leave to run code that comes with a model."""
    if not isinstance(options, Mapping):
        return False
    return any(options.get(name) for name in _OPTIONS) or any(map(gives_leave, options.values()))


def _roots(loader: Any) -> Iterator[Place]:
    """Places of the loader, its base classes, and the variables around a function."""
    parts = list(inspect.getmro(loader)) if inspect.isclass(loader) else [loader]
    around = _around(loader).values()
    parts += [one for one in around if inspect.isclass(one) or inspect.isfunction(one)]
    for part in parts:
        if hasattr(part, "__qualname__"):
            yield part.__module__, part.__qualname__.partition(".")[0]


def _around(loader: Any) -> Mapping[str, Any]:
    """Variables that a function has from the function that made it, by name."""
    return inspect.getclosurevars(loader).nonlocals if isinstance(loader, FunctionType) else {}


def _named(node: ast.AST, module: _Module) -> Iterator[Place]:
    """Places that a piece of a module's code leads to."""
    if isinstance(node, ast.Name):
        yield module.name, node.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from _imported(node, module.name).values()


def _reason(node: ast.AST, module: _Module) -> str | None:
    """Why a piece of code runs what comes with a model; None: it does not."""
    for option, value in _given(node):
        if option in _OPTIONS and not _is_off(value, option):
            return GIVES_LEAVE if option == "trust_remote_code" else _UNPICKLES
    if isinstance(node, ast.Import | ast.ImportFrom):
        for where, name in _imported(node, module.name).values():
            if (reason := _of_module(where)) or (reason := _of_module(f"{where}.{name}")):
                return reason
    if isinstance(node, ast.Name) and node.id in module.imports:
        return _of_module(module.imports[node.id][0])
    if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.path", *_MODULES):
        return _RUNS
    return _of_call(node) if isinstance(node, ast.Call) else None


def _of_module(name: str) -> str | None:
    return _MODULES.get(name) or _MODULES.get(name.partition(".")[0])


def _of_call(call: ast.Call) -> str | None:
    function = ast.unparse(call.func)
    if function in _CALLS:
        return _RUNS
    if function.rpartition(".")[2] in _IMPORTERS and not _is_known(call):
        return _RUNS
    if function == "torch.load":
        given = dict(_given(call))
        only = given.get("weights_only")
        if not (isinstance(only, ast.Constant) and only.value is True):
            return f"{_UNPICKLES} (torch.load without weights_only=True)"
    return None


def _is_known(call: ast.Call) -> bool:
    """Whether the imported module stands in the code, or is one of the code's own package."""
    text: ast.AST | None = call.args[0] if call.args else None
    if isinstance(text, ast.JoinedStr) and text.values:
        text = text.values[0]
        return isinstance(text, ast.Constant) and str(text.value).startswith(".")
    return isinstance(text, ast.Constant)


def _given(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Options by name with the value that a piece of code gives them, in any of Python's ways."""
    if isinstance(node, ast.Call):
        yield from ((word.arg, word.value) for word in node.keywords if word.arg)
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        for option in (text for text in texts if isinstance(text, str)):
            # As in `kwargs.setdefault("option", True)`, `.get("option", True)`.
            yield from ((option, value) for value in node.args[1:])
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, value
    elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield _last_name(target), node.value
    elif isinstance(node, ast.arguments):
        named = [*node.posonlyargs, *node.args]
        behind = named[len(named) - len(node.defaults) :]
        yield from ((a.arg, v) for a, v in zip(behind, node.defaults, strict=True))
        pairs = zip(node.kwonlyargs, node.kw_defaults, strict=True)
        yield from ((a.arg, value) for a, value in pairs if value is not None)


def _is_off(value: ast.expr, option: str) -> bool:
    """Whether the value is false, or handed on under the same name, where it is looked at too."""
    if isinstance(value, ast.Constant):
        return not value.value or value.value == option
    return _last_name(value) == option


def _last_name(node: ast.expr) -> str:
    """`c` of `c`, `a.c` and `a["c"]`; empty of anything else."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
    return ""


@cache
def _read(name: str) -> _Module:
    """The module's top level, without what stands there for type checkers alone."""
    module = _Module(name)
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return module
    waiting: list[ast.AST] = list(ast.parse(Path(found.origin).read_text(encoding="utf-8")).body)
    while waiting:
        statement = waiting.pop()
        match statement:
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                waiting += statement.orelse
            case ast.If() | ast.Try() | ast.ExceptHandler() | ast.With():
                waiting += ast.iter_child_nodes(statement)
            case ast.Import() | ast.ImportFrom():
                module.imports.update(_imported(statement, name))
            case ast.FunctionDef() | ast.ClassDef() | ast.AsyncFunctionDef():
                module.definitions.setdefault(statement.name, []).append(statement)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                for target in targets:
                    module.definitions.setdefault(_last_name(target), []).append(statement)
    return module


def _imported(node: ast.Import | ast.ImportFrom, name: str) -> dict[str, Place]:
    """Places that an import statement of the module brings, by name."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: (alias.name, "") for alias in node.names
        }
    package = name if _is_package(name) else name.rpartition(".")[0]
    where = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    return {alias.asname or alias.name: (where, alias.name) for alias in node.names}


def _is_package(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and found.submodule_search_locations is not None
