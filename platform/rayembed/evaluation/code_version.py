"""The software that makes vectors and scores, in a few characters: it decides them as weights do.

Kept embeddings and result files carry it in what they are found by, so that nothing made by other
code or other libraries is taken for what would be made now. Of rayembed's own source comments,
docstrings and layout do not count.
"""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from rayembed.config.document import fingerprint
from rayembed.config.graph import RUNTIME_PACKAGES, GraphConfig
from rayembed.config.model import ModelConfig

_PACKAGE = __name__.partition(".")[0]

VECTORS = ("rayembed", "tokenizers", "torch", "transformers")
"""Packages by whose version a text's vector could be another."""

_VECTORS = (
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
    "evaluation/encode_spec.py",
    "evaluation/folder_prompts.py",
    "evaluation/mteb_spec.py",
    "evaluation/rayembed_spec.py",
    "evaluation/sentence_spec.py",
)
_SCORES = (
    "evaluation/bm25.py",
    "evaluation/context.py",
    "evaluation/mteb_model.py",
    "evaluation/plan.py",
    "evaluation/pooled",
    "evaluation/prompts.py",
    "quantisation.py",
    "search",
)
"""Modules that could change a score beside vectors; tasks and their data are compared by
themselves."""


class CodeVersion(NamedTuple):
    """Two short names of the software of now."""

    vectors: str
    """Version of everything that could change a text's vector."""
    scores: str
    """Version of everything that could change a score, vectors included."""


_SCORING = ("mteb", "numpy", "scikit-learn", "scipy")
"""Packages by whose version a score of the same vectors could be another."""


def code_version(*packages: str, modules: Sequence[str] = ()) -> CodeVersion:
    """Version of the software that embeds with rayembed's own models, and scores.

    Args:
        packages: further ones that embed.
        modules: of other packages that embed, such as an architecture of the user's own.
    """
    embedding = [versions((*VECTORS, *packages)), _source(_VECTORS)]
    vectors = fingerprint([*embedding, *map(_foreign_source, modules)])
    return CodeVersion(vectors, fingerprint([vectors, versions(_SCORING), _source(_SCORES)]))


def code_of(config: ModelConfig, graph: GraphConfig | None) -> CodeVersion:
    """Version of the software that embeds with a model of these settings, and scores.

    Args:
        graph: what computes it in the place of torch; None: nothing does.
    """
    packages = [] if graph is None else [RUNTIME_PACKAGES[graph.runtime]]
    members = {type(config).__module__, type(config).architecture.partition(":")[0]}
    foreign = sorted(name for name in members if not name.startswith(f"{_PACKAGE}."))
    return code_version(*packages, modules=foreign)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Package → its version, without what a build for other hardware adds (`2.13.0+cpu`)."""
    return {name: version(name).partition("+")[0] for name in sorted(packages)}


@cache
def _source(parts: tuple[str, ...]) -> str:
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
    """The syntax tree of a module as text, without its docstrings and other bare strings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list):
                setattr(node, name, [line for line in block if not _is_text(line)])
    return ast.dump(tree)


def _is_text(line: ast.AST) -> bool:
    value = line.value if isinstance(line, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _modules(place: Path) -> Iterator[Path]:
    if place.suffix == ".py":
        yield place
    else:
        yield from sorted(place.rglob("*.py"))
