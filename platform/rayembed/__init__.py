"""rayembed trains and evaluates text-embedding models, in one process or on Ray.

In Python: `train`, `adapt`, `evaluate`, `mine`, `load`, `encode` (docs/python.md). Nothing of
torch is imported before one of them is used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    raise AttributeError(f"module 'rayembed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
