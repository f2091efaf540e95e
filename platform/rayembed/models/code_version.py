"""The software that makes vectors, in a few characters: it decides them as weights do.

Kept vectors, and what is made of them, carry it in what they are found by, so that nothing made by
other code or other libraries is taken for what would be made now. Of rayembed's own source
comments, docstrings and layout do not count, nor does the Python that reads it.
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rayembed.config.document import fingerprint
from rayembed.config.graph import RUNTIME_PACKAGES, GraphConfig
from rayembed.config.model import ModelConfig

_PACKAGE = __name__.partition(".")[0]

VECTORS = ("rayembed", "tokenizers", "torch", "transformers")
"""Packages by whose version a text's vector could be another."""

QUANTISED = "compressed-tensors"
"""The package that unpacks the weights of quantised models."""

FORWARD_PASS = (
    "models",
    "assets/sentence_modules.py",
    "config/architecture.py",
    "config/backbone.py",
    "config/graph.py",
    "config/instructions.py",
    "config/lora.py",
    "config/model.py",
    "config/pooling.py",
    "config/table.py",
    "config/types.py",
    "distributed/expert_group.py",
    "hardware.py",
)
"""Modules of rayembed by which a model's vector of a text could be another."""


def vectors_software(
    parts: Sequence[str], *, packages: Iterable[str] = (), modules: Iterable[str] = ()
) -> dict[str, str]:
    """Everything that could change the vectors of a way to embed: package or source → its version.

    Args:
        parts: modules and folders of rayembed that it has beside the forward pass.
        packages: further ones that embed.
        modules: of other packages that embed, such as an architecture of the user's own.
    """
    own = {f"code of {_PACKAGE}": source_version((*FORWARD_PASS, *parts))}
    foreign = {f"code of {module}": fingerprint(_foreign_source(module)) for module in modules}
    return versions((*VECTORS, *packages)) | own | foreign


def packages_of(graph: GraphConfig | None, *, quantised: bool) -> list[str]:
    """Further packages that embed with a model.

    Args:
        graph: what computes it in the place of torch; None: nothing does.
        quantised: whether its weights are.
    """
    found = [] if graph is None else [RUNTIME_PACKAGES[graph.runtime]]
    return [*found, QUANTISED] if quantised else found


def foreign_modules(kinds: Sequence[type[ModelConfig]]) -> list[str]:
    """Modules of other packages that the architectures of these settings stand in."""
    members = {kind.__module__ for kind in kinds}
    members |= {kind.architecture.partition(":")[0] for kind in kinds}
    return sorted(name for name in members if not name.startswith(f"{_PACKAGE}."))


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package → its version, without what a build for other hardware adds (`2.13.0+cpu`), or `not
    installed`.
    """
    return {name: _version(name) for name in sorted(packages)}


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return "not installed"


@cache
def source_version(parts: tuple[str, ...]) -> str:
    """Fingerprint of the modules at these places of the package, without comments."""
    root = Path(__file__).parents[1]
    return fingerprint(
        {
            path.relative_to(root).as_posix(): meaning(path.read_text(encoding="utf-8"))
            for part in parts
            for path in _modules(root / part)
        }
    )


@cache
def _foreign_source(module: str) -> str:
    """The meaning of a module of another package; empty where there is no text of it."""
    found = find_spec(module)
    path = None if found is None or found.origin is None else Path(found.origin)
    return "" if path is None or path.suffix != ".py" else meaning(path.read_text(encoding="utf-8"))


def meaning(source: str) -> str:
    """The syntax tree of a module as text, without its docstrings and other bare strings.

    It is the same in all Pythons that read the module alike.
    """
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [line for line in block if not _is_text(line)])
        if isinstance(node, ast.JoinedStr):  # Python 3.12 ends nested formats with an empty text
            node.values = [one for one in node.values if not _is_empty(one)]
    return _told(tree)


def _told(value: object) -> str:
    """A part of a syntax tree as text. What is empty is left out: `ast.dump` writes it or not by
    the version of Python, and newer ones have further fields.
    """
    if isinstance(value, list):
        return f"[{', '.join(map(_told, value))}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {name: getattr(value, name, None) for name in value._fields}
    told = [f"{name}={_told(one)}" for name, one in fields.items() if one not in (None, [])]
    return f"{type(value).__name__}({', '.join(told)})"


def _is_text(line: ast.AST) -> bool:
    value = line.value if isinstance(line, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_empty(part: ast.AST) -> bool:
    return isinstance(part, ast.Constant) and part.value == ""


def _modules(place: Path) -> Iterator[Path]:
    if place.suffix == ".py":
        yield place
    else:
        yield from sorted(place.rglob("*.py"))
