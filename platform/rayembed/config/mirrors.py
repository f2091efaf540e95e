"""Table of trackers that receive a copy of a run's metrics in addition to MLflow; other packages
add them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rayembed.config.table import NamedTable
from rayembed.errors import require_packages


class Mirror(Protocol):
    """Connection that copies a run's metrics to one tracker; failures are warnings, not errors."""

    def log_scores(self, name: str, scores: Mapping[str, float], step: int) -> None:
        """Log scores as `<name>/<task>` at a step of the run."""

    def close(self) -> None:
        """Send the remaining data and end the connection."""


@dataclass(frozen=True)
class MirrorKind:
    """Entry of the table for one kind of tracker."""

    library: str
    """Required package, also the name of the extra that installs it."""
    open: Callable[[Any, Path, Path], Mirror]
    """Function that opens a `Run`'s copy, given the run's folder and its metrics log."""


MIRRORS = NamedTable("rayembed.mirrors", MirrorKind, "tracker for placement.mirrors", {})


def known_mirror(name: str) -> str:
    """Check and return the name of a tracker that a package adds.

    Raises:
        ConfigError: none does; the message names the nearest.
    """
    MIRRORS.get(name)
    return name


def check_mirrors(names: tuple[str, ...]) -> None:
    """Check that the trackers' libraries are installed.

    Raises:
        ConfigError: one is not.
    """
    for name in names:
        require_packages("placement.mirrors", name, MIRRORS.get(name).library)
