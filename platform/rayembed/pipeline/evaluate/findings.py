"""Run the analyses of finished scores that are registered in `FINDINGS`, and store their results
beside the scores.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rayembed.assets.storage import join, write_atomic
from rayembed.config.reports import chosen_findings
from rayembed.config.run import Run
from rayembed.config.table import load
from rayembed.display.tables import Table, console, show

if TYPE_CHECKING:  # the job of comparisons loads neither torch nor mteb
    from rayembed.data.engine.work_items import Execute
    from rayembed.evaluation.jobs import TaskFactory
    from rayembed.evaluation.score import ModelScores
    from rayembed.registry.tracking import Tracker

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredModels:
    """Input of an analysis of scores: the scored models of a training run or of an evaluation."""

    models: "Mapping[str, ModelScores]"
    """Label → scores, with those of single queries and the model's spec."""
    about: str
    """Label of the model whose scores are judged: the one that is kept, or that is evaluated."""
    against: str | None
    """Label of the untrained model; None: it was not scored."""
    reference: str
    """Asset reference of the judged model."""
    storage: str
    run: Run | None = None
    """The training run; None: a model is evaluated."""
    plans: Mapping[str, str] = field(default_factory=dict)
    """Stage of the run → folder of its batch plan, whose data folders are beside it."""
    execute: "Execute | None" = None
    """Runs tasks over many items where the run's data are prepared; None: in this process."""

    @property
    def judged(self) -> "ModelScores":
        """Scores of the model that the analysis is about."""
        return self.models[self.about]

    @property
    def tasks(self) -> "tuple[TaskFactory, ...]":
        """Tasks on which the model that the analysis is about was scored."""
        return tuple(scoring.factory for scoring in self.judged.tasks)

    def write(self, name: str, content: bytes) -> None:
        """Write a file beside the results of the model that the analysis is about, on this machine
        and in storage.
        """
        for folder in dict.fromkeys((str(self.judged.local), self.judged.results)):
            write_atomic(join(folder, name), content)


@dataclass(frozen=True)
class ComparedModels:
    """Input of an analysis of scores: the models of a comparison and their result files."""

    results: Mapping[str, Sequence[str]]
    """Label → folders of the model's result files, beside which findings lie."""
    baseline: str | None
    """Label of the model from which differences are taken."""
    output: str
    """Folder of the comparison's files."""
    own_sets: Mapping[str, str] = field(default_factory=dict)
    """Folder of each named own set, by the task's name."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file into the comparison's output folder."""
        write_atomic(join(self.output, name), content)


@dataclass(frozen=True)
class Finding:
    """Result of one analysis of scores: a table, sentences, metrics and files; each may be
    empty.
    """

    table: Table | None = None
    lines: tuple[str, ...] = ()
    """Lines for the report, whole sentences."""
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Name of a curve in MLflow → its values by task."""
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    """Contents of files beside the results, by name; `.json` is for results alone."""
    markdown: str | None = None
    """Section for the model card, without its heading; None: table and lines."""
    title: str = ""
    """Heading; set by `make_findings`."""

    @property
    def section(self) -> str:
        """Section of the model card about the finding; empty if the finding is empty."""
        body = self.markdown
        if body is None:
            parts = [] if self.table is None else [show(self.table, "markdown").strip()]
            body = "\n\n".join([*parts, *self.lines])
        return f"### {self.title}\n\n{body.strip()}\n" if body.strip() else ""


def make_findings(
    subject: ScoredModels | ComparedModels, names: Iterable[str] | None
) -> tuple[Finding, ...]:
    """Run the analyses of scores and write their files; a failed analysis is reported by a sentence
    with the error.

    Args:
        names: of the findings; None: all that are installed.
    """
    made = []
    for name, kind in chosen_findings(names).items():
        is_run = isinstance(subject, ScoredModels)
        if not (function := kind.of_scores if is_run else kind.of_comparison):
            continue
        try:
            finding: Finding | None = load(function)(subject)
            if finding is not None:
                _write(subject, finding)
        except Exception as error:  # of another package: the scores are there, whatever it does
            logger.warning(
                "the additional analysis %s of the scores failed; the scores are not affected",
                name,
                exc_info=True,
            )
            reason = str(error) or type(error).__name__
            finding = Finding(
                lines=(f"the analysis {name!r} is missing, because it failed: {reason}",)
            )
        if finding is not None:
            made.append(replace(finding, title=kind.title))
    return tuple(made)


def _write(subject: ScoredModels | ComparedModels, finding: Finding) -> None:
    for name, content in finding.files.items():
        if name.endswith(".json") or Path(name).name != name:
            raise ValueError(
                f"{name!r} cannot be the name of a file in Finding.files: a name has no folder "
                "and does not end in .json"
            )
        subject.write(name, content.encode() if isinstance(content, str) else content)


def print_findings(findings: Iterable[Finding], out: TextIO | None = None) -> None:
    """Print the tables and sentences of findings to `out`, by default standard output."""
    printer = console(out, soft_wrap=True)
    for finding in findings:
        if finding.table is not None:
            printer.print(finding.table)
        for line in finding.lines:
            printer.print(f"{finding.title}: {line}")


def log_findings(
    findings: Iterable[Finding], tracker: "Tracker", step: int, folder: Path | None = None
) -> None:
    """Send the metrics and files of findings to MLflow.

    Args:
        step: of the run.
        folder: of the files on this machine; None: they are sent with the results.
    """
    for finding in findings:
        for curve, values in finding.metrics.items():
            tracker.log_scores(curve, values, step)
        if folder is not None:
            for name in finding.files:
                tracker.log_artifact(folder / name, "findings")
