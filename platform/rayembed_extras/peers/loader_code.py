"""Allow only mteb model loaders whose code was reviewed and is unchanged.

What a loader does with the files of a model cannot be searched for in its text without being fooled
by an alias. So `mteb_loaders.json` names loaders of one version of mteb with the version of their
text: a search of these found nothing that runs code of a model, or was looked at by eye where it
did. Loaders of other packages are what the user installed, and are not looked at.
"""

import inspect
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from rayembed.config.document import fingerprint

FILE = "mteb_loaders.json"

GIVES_LEAVE = "gives trust_remote_code, which runs Python files of its repository"
_OPTIONS = frozenset({"trust_remote_code", "allow_pickle"})
"""Loader options that allow code from the model to run."""


@cache
def foreign_code(loader: Any) -> str | None:
    """Say why a loader may run code that comes with a model; None if it was reviewed and
    does not.

    Args:
        loader: a class or function, without the `partial` around it.
    """
    if gives_leave(_around(loader)):
        return GIVES_LEAVE
    if loader.__module__.partition(".")[0] != "mteb":
        return None
    looked_at = _looked_at()
    version = looked_at["loaders"].get(name_of(loader))
    tested = f"mteb {looked_at['mteb']}"
    if version is None:
        return (
            f"is not among the loaders of {tested} that were reviewed and found to run no Python "
            "code and to unpickle no file that comes with a model"
        )
    if version != text_version(loader):
        return (
            f"has other source code than in {tested}, where it was reviewed; install that version"
        )
    return None


def gives_leave(options: Any) -> bool:
    """Whether a loader's options, also nested ones, allow code that comes with a model."""
    if not isinstance(options, Mapping):
        return False
    return any(options.get(name) for name in _OPTIONS) or any(map(gives_leave, options.values()))


def name_of(loader: Any) -> str:
    """Name of the loader in the list of reviewed loaders: module and qualified name."""
    return f"{loader.__module__}:{loader.__qualname__}"


def text_version(loader: Any) -> str:
    """Fingerprint of the source of mteb's modules that define the loader and its base classes."""
    parts = inspect.getmro(loader) if inspect.isclass(loader) else (loader,)
    names = {part.__module__ for part in parts if part.__module__.partition(".")[0] == "mteb"}
    return fingerprint({name: _text(name) for name in names})


@cache
def _text(module: str) -> str:
    return inspect.getsource(sys.modules[module])


@cache
def _looked_at() -> dict[str, Any]:
    path = Path(__file__).with_name(FILE)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _around(loader: Any) -> Mapping[str, Any]:
    """Variables that a loader function captures from its enclosing function, by name."""
    return inspect.getclosurevars(loader).nonlocals if isinstance(loader, FunctionType) else {}
