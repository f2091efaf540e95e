"""Packages that a registered model needs, derived from the imports of its bundled code."""

import ast
import functools
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions, version
from pathlib import Path

from rayembed.config.backbone import RUNTIME_PACKAGES
from rayembed.config.model import architecture_classes

_ENTRIES = ("rayembed.registry.pyfunc_model", "rayembed.models.sentence_module")
"""Entry modules of loading. The second is imported by a name in a string."""

_PACKAGE = __name__.partition(".")[0]
_ROOT = Path(__file__).parents[2]

_logger = logging.getLogger(__name__)


_RUNTIMES = {package: runtime for runtime, package in RUNTIME_PACKAGES.items()}
"""Modules that only models of graphs need, by the runtime that their settings name."""


def pip_requirements(runtime: str | None = None) -> list[str]:
    """Requirements of the served model, pinned to this environment's versions.

    These are the packages that the travelling code imports itself; what they need in turn, pip
    finds. Imports within functions count, since nobody knows which of them a request reaches.

    Args:
        runtime: of a model of graphs; None: it has weights for torch.
    """
    provided = _provided()
    found = set()
    for name in imported_modules():
        if _RUNTIMES.get(name, runtime) != runtime:
            continue
        distributions = provided.get(name)
        if distributions is None:
            _logger.warning(
                "no installed package is known to hold the module %r, so that the requirements of "
                "the registered model lack it; where it is served, it must be installed by hand",
                name,
            )
            continue
        # MLflow's parts are distributions of their own, which all hold the same module.
        same = [d for d in distributions if _normal(d) == _normal(name)]
        found.update(same or distributions)
    # A local build (`2.13.0+cpu`) is on no index.
    return sorted(f"{name}=={version(name).partition('+')[0]}" for name in found)


def format_requirements(folder: Path) -> list[str]:
    """Requirements of a model's files beside those of its code: what reads quantised weights."""
    settings = (json.loads(path.read_text("utf-8")) for path in folder.rglob("config.json"))
    methods = {(one.get("quantization_config") or {}).get("quant_method") for one in settings}
    name = "compressed-tensors"
    return [f"{name}=={version(name)}"] if name in methods else []


def imported_modules() -> frozenset[str]:
    """Third-party top-level modules imported for loading and embedding, without the standard
    library.

    Read from the text of our modules, from those that loading begins with along their imports.
    """
    foreign: set[str] = set()
    ours: set[str] = set()
    # Tables name settings and code by texts, which no import statement shows.
    members = [(c.__module__, c.architecture.partition(":")[0]) for c in architecture_classes()]
    waiting = [*_ENTRIES, *(name for both in members for name in both)]
    while waiting:
        name = waiting.pop()
        top = name.partition(".")[0]
        if top != _PACKAGE:
            foreign.add(top)
        elif name not in ours and (file := _file(name)) is not None:
            ours.add(name)
            # The package itself imports its face alone, for those who ask for it by name.
            waiting += [*_packages(name), *(() if name == _PACKAGE else _imports(file))]
    return frozenset(foreign - sys.stdlib_module_names)


def _packages(name: str) -> Iterator[str]:
    """Parent packages of a module, which are imported before it."""
    while name := name.rpartition(".")[0]:
        yield name


@functools.cache
def _provided() -> Mapping[str, list[str]]:
    """Module → packages that hold it, from the files of all that are installed; once a process."""
    return packages_distributions()


@functools.cache
def _imports(file: Path) -> tuple[str, ...]:
    """Dotted names imported by the file; `from a import b` gives both `a` and `a.b`."""
    return tuple(_read_imports(file))


def _read_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None, f"a relative import in {file}"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _file(name: str) -> Path | None:
    """File of a rayembed module or package; None if the name is an object within one."""
    place = _ROOT.joinpath(*name.split("."))
    return next((f for f in (place.with_suffix(".py"), place / "__init__.py") if f.is_file()), None)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
