"""rayembed trains and evaluates text-embedding models, in one process or on Ray.

In Python: `train`, `adapt`, `evaluate`, `mine`, `load`, `encode` (docs/python.md), and functions of
other packages, by entry points of the group `rayembed.functions`: the attribute's name and the
function. Nothing of torch is imported before one of them is used.

Importing it sets `GOMP_SPINCOUNT` where torch is not loaded yet, see `machine/spinning.py`.
"""

from typing import TYPE_CHECKING, Any

from rayembed.machine.spinning import limit_spinning

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from rayembed.api import Embedder, Trained, adapt, encode, evaluate, load, mine, train

__all__ = [
    "Embedder",
    "Trained",
    "__version__",
    "adapt",
    "encode",
    "evaluate",
    "load",
    "mine",
    "train",
]

limit_spinning()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("rayembed")
        except PackageNotFoundError:  # a checkout that is not installed
            return "0+unknown"
    if name in __all__:
        from rayembed import api

        return getattr(api, name)
    if not name.startswith("_") and (point := _functions().get(name)) is not None:
        from rayembed.config.table import from_outside

        return from_outside(point)
    raise AttributeError(f"module 'rayembed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_functions()})


def _functions() -> "dict[str, EntryPoint]":
    """Entry points of functions that other packages add, by name."""
    from rayembed.config.table import entry_points

    return {point.name: point for point in entry_points("rayembed.functions")}
