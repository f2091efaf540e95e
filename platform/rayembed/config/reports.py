"""Reports that other packages add: copies of a run's metrics in other trackers, and analyses of
scores.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator

from rayembed.config.settings import Settings
from rayembed.config.table import NamedTable
from rayembed.errors import require_packages


class Mirror(Protocol):
    """Copy of a run's metrics in one tracker; a failure causes a warning, never an error."""

    def log_scores(self, name: str, scores: Mapping[str, float], step: int) -> None:
        """Log scores as `<name>/<task>` at a step of the run."""

    def close(self) -> None:
        """Send the remaining metrics."""


@dataclass(frozen=True)
class MirrorKind:
    """Table entry for a tracker that can hold copies of runs."""

    library: str
    """Required package, also the name of the extra that installs it."""
    open: Callable[[Any, Path, Path], Mirror]
    """Function that opens a `Run`'s copy, given the run's folder and its metrics log."""


MIRRORS = NamedTable("rayembed.mirrors", MirrorKind, "tracker for placement.mirrors", {})


def known_mirror(name: str) -> str:
    """Check that an installed package adds the named tracker, and return the name.

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


@dataclass(frozen=True)
class FindingKind:
    """Table entry for one analysis of scores, called a finding. Its functions are import strings
    `module:name`, loaded after scoring.
    """

    title: str
    """Heading of its table and of its section on the model card."""
    of_scores: str = ""
    """Function from a `ScoredModels` of `pipeline.evaluate.findings` to a `Finding`, or to None
    where nothing is to be said; empty: it has nothing to say about a run or an evaluation."""
    of_comparison: str = ""
    """The same from a `ComparedModels`, for comparisons of result files."""


FINDINGS = NamedTable("rayembed.findings", FindingKind, "finding for placement.findings", {})


def known_finding(name: str) -> str:
    """Check that an installed package adds the named analysis of scores, and return the
    name.

    Raises:
        ConfigError: none does; the message names the nearest.
    """
    FINDINGS.get(name)
    return name


def chosen_findings(names: Iterable[str] | None) -> dict[str, FindingKind]:
    """Look up the named analyses of scores; None selects all."""
    return FINDINGS.members() if names is None else {name: FINDINGS.get(name) for name in names}


class FindingChoice(Settings):
    """Settings that choose the analyses of scores to run after scoring; they change no score."""

    findings: tuple[Annotated[str, AfterValidator(known_finding)], ...] | None = None
    """Names of the findings about the scores, such as texts of a task that were trained on; None:
    all that are installed, `[]`: none. One that fails is reported and loses no score."""
