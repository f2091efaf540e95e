"""Report which claims hold: a table with intervals, and a plot."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rayembed.display.figures import COLOURS, INK, new_figure, write_png
from rayembed.display.tables import Table
from rayembed.recipes.sample import CROSS_LINGUAL, RETRIEVAL_TASKS, TASK_NAMES
from rayembed_extras.sweeps.seeds import Difference, difference
from rayembed_papers.directions.catalogue import NOTHING, Direction
from rayembed_papers.directions.measure import short_name


@dataclass(frozen=True)
class ClaimResult:
    """Measured result of a claim: both runs' scores and their difference."""

    direction: Direction
    better: float | None
    """Mean score of the run that the paper finds better, over seeds; None: no seed has both."""
    worse: float | None
    apart: Difference | None
    seeds: int
    """Number of requested seeds."""

    @property
    def verdict(self) -> str:
        """Return `holds` or `reversed` if all seeds are measured and the interval is on one side of
        the claim's limit; otherwise the reason why it is undecided.
        """
        if self.apart is None:
            return "not measured"
        if self.apart.number < self.seeds:
            return f"undecided: {self.apart.number} of {self.seeds} seeds"
        return self.apart.verdict(-NOTHING if self.direction.costs_nothing else 0.0)


def finding(
    direction: Direction, scores: Mapping[int, tuple[float, float]], seeds: int
) -> ClaimResult:
    """Compare both runs' scores by seed; `seeds` is the requested number of seeds."""
    if not scores:
        return ClaimResult(direction, None, None, None, seeds)
    better, worse = zip(*scores.values(), strict=True)
    apart = difference([one - other for one, other in scores.values()])
    return ClaimResult(direction, statistics.mean(better), statistics.mean(worse), apart, seeds)


def findings_table(findings: Sequence[ClaimResult], title: str) -> Table:
    """Tabulate each claim; scores and differences in percent, runs named without their seeds."""
    rows = [
        [
            one.direction.key,
            one.direction.claim,
            one.direction.source,
            _SCORED[tuple(one.direction.tasks)],
            "" if one.direction.printed is None else f"{one.direction.printed:+g}",
            "" if one.better is None else f"{100 * one.better:.2f}",
            "" if one.worse is None else f"{100 * one.worse:.2f}",
            "" if one.apart is None else one.apart.text(digits=2, times=100),
            one.verdict,
            ", ".join(short_name(make()) for make in (one.direction.better, one.direction.worse)),
        ]
        for one in findings
    ]
    heads = ["--only", "claim", "paper", "scored on", "its difference", "first", "second"]
    heads += ["difference here", "verdict", "runs"]
    return Table(heads, rows, title=title, align="llllrrrrll", look="open")


_SCORED: Mapping[tuple[str, ...], str] = {
    tuple(RETRIEVAL_TASKS): "2 retrieval",
    tuple(TASK_NAMES): "all 6",
    (CROSS_LINGUAL,): "cross-lingual",
}
"""Names of the tasks whose mean is compared."""


def notes_of(findings: Sequence[ClaimResult]) -> str:
    """Collect the notes to print with the table, one line for each claim with a note."""
    directions = [one.direction for one in findings if one.direction.note]
    return "".join(f"- {one.claim}: {one.note}\n" for one in directions)


def findings_plot(findings: Sequence[ClaimResult], path: Path) -> None:
    """Write a PNG of the differences with their intervals, and the papers'
    differences as crosses.
    """
    shown = [(one, one.apart) for one in findings if one.apart is not None][::-1]
    figure, axes = new_figure(width=9.0, height=1.4 + 0.28 * max(len(shown), 2))
    for place, (one, apart) in enumerate(shown):
        half = None if apart.half is None else 100 * apart.half
        mean, colour = 100 * apart.mean, _COLOURS.get(one.verdict, COLOURS[0])
        axes.errorbar(mean, place, xerr=half, fmt="o", color=colour, capsize=3, zorder=3)
        if one.direction.costs_nothing:  # what may be lost
            axes.plot([-100 * NOTHING] * 2, [place - 0.3, place + 0.3], color=INK, linewidth=0.8)
        if one.direction.printed is not None:
            axes.scatter([one.direction.printed], [place], marker="x", color=INK, s=22, zorder=2)
    axes.axvline(0.0, color=INK, linewidth=0.8, zorder=1)
    axes.set_ylim(-0.6, max(len(shown), 1) - 0.4)
    axes.set_yticks(range(len(shown)), [one.direction.claim for one, _ in shown], fontsize=8)
    axes.set_xlabel(
        "difference, of 100: mean and 95 % interval over seeds here (●), the paper's (×)",
        fontsize=9,
    )
    write_png(figure, path)


_COLOURS = {"holds": COLOURS[2], "reversed": COLOURS[1]}
