"""Gates: conditions on scores that a version must meet to become champion. Independent of
MLflow.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rayembed.config.settings import nearest
from rayembed.display.tables import Cell, Table, show
from rayembed.errors import ConfigError
from rayembed.results.scores import (
    MEAN,
    TaskScore,
    by_category,
    by_kind,
    mean,
)

ROUNDING = 1e-6
"""Score tolerance: result files keep six decimals, so smaller differences are ties."""

_FORM = re.compile(r"\s*(?:(?P<metric>\S+)\s+)?(?P<name>\S+)\s*>=\s*(?P<minimum>\S+)\s*")


@dataclass(frozen=True)
class Requirement:
    """Gate that requires a minimum score."""

    name: str
    """Name of a task, of a category of tasks, `mean` over all tasks, or `mean/own` or
    `mean/general` over one kind of them."""
    minimum: float
    metric: str | None = None
    """Metric name; None for the main score of each task."""

    def __str__(self) -> str:
        metric = f"{self.metric} " if self.metric else ""
        return f"{metric}{self.name} >= {self.minimum:g}"


@dataclass(frozen=True)
class Comparison:
    """Gate that requires scores no worse than another version has."""

    version: int
    scores: tuple[TaskScore, ...]
    tolerance: float
    """Allowed deficit on a single task."""
    differing: tuple[str, ...] = ()
    """Settings in which the two evaluations may differ, as `TaskScore.differences` names them."""


@dataclass(frozen=True)
class Check:
    """Result of one gate: the observed figure, the limit, and whether the gate is met."""

    gate: str
    figure: float | None
    """Observed figure; None if there is none."""
    limit: float | None
    holds: bool
    note: str = ""


@dataclass(frozen=True)
class Decision:
    """Decision whether a version may become champion, with the result of every gate."""

    version: str
    """Version as `name/number`, or the candidate to be registered."""
    checks: tuple[Check, ...]

    @property
    def holds(self) -> bool:
        """Whether all gates are met."""
        return all(check.holds for check in self.checks)

    def to_json(self) -> str:
        """Serialise the decision as JSON; figures that are not finite become null."""
        rows = [asdict(check) for check in self.checks]
        for row in rows:
            row["figure"] = _finite(row["figure"])
        return json.dumps({"version": self.version, "holds": self.holds, "gates": rows}, indent=1)

    def table(self, *, no: str = "NO") -> Table:
        """Table of the decision with a row for each gate."""
        verdict = "all gates hold" if self.holds else "REFUSED"
        rows = [
            [
                check.gate,
                Cell(check.figure, digits=4),
                Cell(check.limit, digits=4),
                "yes" if check.holds else no,
                check.note,
            ]
            for check in self.checks
        ]
        heads = ["gate", "figure", "limit", "holds", ""]
        title = f"Promotion of {self.version}: {verdict}"
        return Table(heads, rows, title=title, align="lrrl", folds=True)

    def to_markdown(self) -> str:
        """Format the decision as a Markdown table with a row for each gate."""
        return show(self.table(no="**no**"), "markdown")


def parse_requirement(text: str) -> Requirement:
    """Parse a gate such as `SciFact>=0.6`, `Retrieval>=0.5`, `mean>=0.5` or `ndcg_at_1
    SciFact>=0.4`.

    Raises:
        ConfigError: not of the form.
    """
    match = _FORM.fullmatch(text)
    try:
        minimum = float(match["minimum"]) if match else math.nan
    except ValueError:
        minimum = math.nan
    if match is None or not math.isfinite(minimum):
        raise ConfigError(
            f"--require {text!r} is no gate; write 'NAME>=NUMBER', where NAME is a task, a "
            "category of tasks or 'mean' ('Retrieval>=0.5'). To use another metric than "
            "the main score, write the metric first ('ndcg_at_1 SciFact>=0.4')"
        )
    return Requirement(match["name"], minimum, match["metric"])


def check_names(requirements: Sequence[Requirement], scores: Sequence[TaskScore]) -> None:
    """Raise if a requirement names a task, category or metric that the scores lack.

    Raises:
        ConfigError: it names a task or category that was not scored, or a metric that it lacks.
    """
    known = {score.task for score in scores} | {MEAN, *by_category(scores), *by_kind(scores)}
    for requirement in requirements:
        if requirement.name not in known:
            raise ConfigError(
                f"the gate '{requirement}' cannot be judged: this model has no scores of a task "
                f"or category {requirement.name!r}; {nearest(requirement.name, known)}"
            )
        for score in _meant(requirement, scores):
            if requirement.metric is not None and _value(score, requirement.metric) is None:
                names = {score.metric, *score.metrics}
                raise ConfigError(
                    f"the gate '{requirement}' cannot be judged: {score.task} has no metric "
                    f"{requirement.metric!r}; {nearest(requirement.metric, names)}"
                )


def decide(
    version: str,
    scores: Sequence[TaskScore],
    requirements: Sequence[Requirement],
    comparison: Comparison | None,
) -> Decision:
    """Evaluate all requirements and the comparison on the scores, and return the decision.

    Raises:
        ConfigError: as `check_names`.
    """
    check_names(requirements, scores)
    checks = [_minimum(requirement, scores) for requirement in requirements]
    if comparison is not None:
        checks += _not_beaten(scores, comparison)
    return Decision(version, tuple(checks))


def _minimum(requirement: Requirement, scores: Sequence[TaskScore]) -> Check:
    meant = _meant(requirement, scores)
    values = [_value(score, requirement.metric) for score in meant]
    figure = sum(v for v in values if v is not None) / len(values)
    note = "" if len(meant) == 1 else f"mean of {len(meant)} tasks"
    holds = _reaches(figure, requirement.minimum)
    if len({score.measured_with.get("software") for score in meant}) > 1:
        holds = False
        note += ", which software of several versions has scored: evaluate the older ones again"
    return Check(str(requirement), figure, requirement.minimum, holds, note)


def _not_beaten(scores: Sequence[TaskScore], comparison: Comparison) -> list[Check]:
    """Compare the mean and each task with the other version, over tasks with the same test data."""
    former = {score.measured_on: score for score in comparison.scores}
    shared = [(s, former[s.measured_on]) for s in scores if s.measured_on in former]
    against = f"version {comparison.version}"
    left_out = _left_out(scores, comparison.scores, len(shared))
    if not shared:
        note = f"nothing was measured on the same data; {left_out}"
        return [Check(f"mean, against {against}", None, None, holds=False, note=note)]
    if otherwise := _taken_otherwise(shared, comparison):
        return otherwise
    now, before = mean(new for new, _ in shared), mean(old for _, old in shared)
    note = f"mean of {len(shared)} shared tasks" + (f"; {left_out}" if left_out else "")
    checks = [Check(f"mean, against {against}", now, before, _reaches(now, before), note)]
    for new, old in shared:
        limit = old.value - comparison.tolerance
        note = f"{against} has {old.value:.4f}"
        holds = _reaches(new.value, limit)
        checks.append(Check(f"{new.task}, against {against}", new.value, limit, holds, note))
    return checks


def _taken_otherwise(
    shared: Sequence[tuple[TaskScore, TaskScore]], comparison: Comparison
) -> list[Check]:
    """Make a failed check, with both values, for each setting that differs between the two
    evaluations.
    """
    found: dict[str, list[str]] = {}
    shown: dict[str, tuple[str, str]] = {}
    for new, old in shared:
        for name, values in new.differences(old).items():
            if name not in comparison.differing:
                found.setdefault(name, []).append(new.task)
                shown.setdefault(name, values)
    return [
        Check(
            f"same {name}, against version {comparison.version}",
            None,
            None,
            holds=False,
            note=f"{shown[name][0]!r} here, {shown[name][1]!r} there ({len(tasks)} tasks, first "
            f"{tasks[0]}): evaluate both alike, or compare all the same with --differing {name}",
        )
        for name, tasks in found.items()
    ]


def _reaches(figure: float, limit: float) -> bool:
    """Whether a score is at least as high as another; NaN counts as lower than every number."""
    return math.isfinite(figure) and not figure < limit - ROUNDING


def _left_out(scores: Sequence[TaskScore], former: Sequence[TaskScore], num_shared: int) -> str:
    """Describe the tasks that could not be compared; empty if all were."""
    both = {score.task for score in scores} & {score.task for score in former}
    parts = [
        (len(both) - num_shared, "of other data revisions, splits or subsets"),
        (len({s.task for s in scores} - both), "scored for this version alone"),
        (len({s.task for s in former} - both), "scored for the other alone"),
    ]
    told = [f"{number} {words}" for number, words in parts if number]
    return "not compared: " + ", ".join(told) if told else ""


def _meant(requirement: Requirement, scores: Sequence[TaskScore]) -> list[TaskScore]:
    """Select the scores that a requirement refers to; if a task and a category share its name, the
    task's.
    """
    if requirement.name == MEAN:
        return list(scores)
    named = [score for score in scores if score.task == requirement.name]
    return named or (by_category(scores) | by_kind(scores))[requirement.name]


def _value(score: TaskScore, metric: str | None) -> float | None:
    if metric is None or metric == score.metric:
        return score.value
    return score.metrics.get(metric)


def summary(scores: Sequence[TaskScore]) -> dict[str, float]:
    """Figures for MLflow: the score of each task, the mean of each category as `category/<name>`,
    and overall means.
    """
    figures = {score.task: score.value for score in scores}
    figures |= {f"category/{name}": mean(of) for name, of in by_category(scores).items()}
    return figures | {name: mean(of) for name, of in by_kind(scores).items()}


def _finite(figure: float | None) -> float | None:
    return None if figure is None or not math.isfinite(figure) else figure
