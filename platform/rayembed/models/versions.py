"""Version number of rayembed's model computations, and versions of the libraries that affect
vectors.
"""

import logging
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger(__name__)

VECTORS = 1
"""Raise it when the same weights and settings give other vectors: it is part of the names of
vectors, of data made with them, and of scores. `tests/unit/test_golden.py` fails when it is due."""

LIBRARIES = (
    *("compressed-tensors", "sentence-transformers", "tokenizers", "torch", "transformers"),
    *("onnxruntime", "openvino"),
)
"""Packages by whose version a vector could differ; recorded, but part of no name."""


def versions(packages: Iterable[str] = LIBRARIES) -> dict[str, str]:
    """Return the versions of installed packages, without a suffix such as +cu130 for the hardware
    of a build.

    `2.13.0+cpu` is `2.13.0`.
    """
    found = {name: _version(name) for name in sorted(packages)}
    return {name: number for name, number in found.items() if number}


def _version(package: str) -> str:
    try:
        return version(package).partition("+")[0]
    except PackageNotFoundError:
        return ""


_warned: set[str] = set()
"""Differences that this process has warned of."""


def warn_of_other_versions(what: str, then: Mapping[str, str]) -> None:
    """Warn, once per process, if the installed library versions differ from the recorded
    ones.

    Args:
        what: was made with the recorded versions, in the plural.
        then: package → recorded version; packages that are not installed here do not count.
    """
    here = versions(then)
    differing = [name for name in here if here[name] != then[name]]
    told = "; ".join(f"{name} {then[name]}, here {here[name]}" for name in differing)
    if told and told not in _warned:
        _warned.add(told)
        logger.warning(
            "%s were made with other library versions (%s) and are used unchanged", what, told
        )
