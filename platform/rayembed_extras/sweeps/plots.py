"""Plot a sweep: parallel coordinates of its trials, importance of settings, and scores over
seeds.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from warnings import catch_warnings

from rayembed.display.figures import COLOURS, INK, new_figure, set_title, write_png
from rayembed_extras.sweeps.optuna_space import RUN, study_of
from rayembed_extras.sweeps.results import TrialRow, short_names
from rayembed_extras.sweeps.seeds import Difference, paired
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.trial_store import TrialRecord


def parallel_coordinates(
    sweep: Sweep, records: Mapping[str, TrialRecord], path: str | Path
) -> None:
    """Write a PNG of parallel coordinates: axes for the score and the settings, and a line for each
    trial with a score, coloured by it. The score of a trial ended early is its last.
    """
    from matplotlib import pyplot, rc_context
    from optuna.visualization.matplotlib import plot_parallel_coordinate

    shown = [record for record in records.values() if record.has_score]
    names = {**short_names(sweep.domains), RUN: RUN}
    with rc_context(), catch_warnings(action="ignore"):  # Optuna sets a style; it is experimental
        study = study_of(sweep, shown)
        axes = plot_parallel_coordinate(study, target_name="score")
        if shown:
            heads = ["score", *(names[path] for path in sorted(study.trials[0].params))]
            axes.set_xticks(range(len(heads)), heads, rotation=0, fontsize=8)
            each = max(2.2, 0.8 + _INCHES_A_SIGN * max(map(len, heads)))
            axes.figure.set_size_inches(2.0 + each * len(heads), 4.2)
        axes.set_title(f"Trials of {sweep.name}")
        write_png(axes.figure, path)
        pyplot.close(axes.figure)


def importance_bars(shares: Mapping[str, float], path: str | Path) -> None:
    """Write a PNG with a bar for each setting, the most important one at the top."""
    ordered = sorted(shares.items(), key=lambda item: item[1])
    figure, axes = _figure_of_rows([name for name, _ in ordered])
    places = range(len(ordered))
    bars = axes.barh(places, [share for _, share in ordered], color=COLOURS[2], zorder=2)
    axes.bar_label(bars, [f"{share:.0%}" for _, share in ordered], fontsize=8, padding=2)
    axes.set_xlim(0.0, 1.05)
    axes.set_xlabel("share of the variance of the score (fANOVA)", fontsize=9)
    set_title(axes, "What decides the score")
    write_png(figure, path)


def rows_with_spread(rows: Sequence[TrialRow], path: str | Path) -> None:
    """Write a PNG with each row's mean score, its standard deviation, and a point for every
    seed.
    """
    shown = [row for row in rows if "score" in row.scores][::-1]
    figure, axes = _figure_of_rows([row.name for row in shown])
    for number, row in enumerate(shown):
        found = row.scores["score"]
        points = [r.final.score for r in row.records if r.state == "finished" and r.final]
        axes.scatter(points, [number] * len(points), s=14, color=COLOURS[0], zorder=2)
        axes.errorbar(
            found.mean, number, xerr=found.deviation or 0.0, fmt="o", color=COLOURS[2], zorder=3
        )
    _set_label(figure, "score: mean and standard deviation over seeds")
    write_png(figure, path)


def differences_by_seed(rows: Sequence[TrialRow], reference: TrialRow, path: str | Path) -> None:
    """Write a PNG with each row's differences from the reference: a point for every seed, the mean,
    and its 95 % interval.

    The axis holds all points and the intervals of three and more seeds. Those of two are some ten
    times as wide: an arrow stands where they go on.
    """
    apart = [
        (row, found) for row in rows if row is not reference and (found := row.apart(reference))
    ]
    figure, axes = _figure_of_rows([row.name for row, _ in apart[::-1]])
    low, high = difference_limits([(found, _points(row, reference)) for row, found in apart])
    cut = False
    for number, (row, found) in enumerate(apart[::-1]):
        points = _points(row, reference)
        axes.scatter(points, [number] * len(points), s=14, color=COLOURS[0], zorder=2)
        half = None if found.half is None else 100 * found.half
        mean = 100 * found.mean
        axes.errorbar(mean, number, xerr=half, fmt="o", color=COLOURS[2], capsize=3, zorder=3)
        for end, beyond, sign in (
            (low, half is not None and mean - half < low, "<"),
            (high, half is not None and mean + half > high, ">"),
        ):
            if beyond:
                axes.plot(end, number, sign, color=COLOURS[2], markersize=6, clip_on=False)
                cut = True
    axes.axvline(0.0, color=INK, linewidth=0.8, zorder=1)
    axes.set_xlim(low, high)
    note = "; an arrow: the interval goes on" if cut else ""
    to = reference.name or "the recipe"
    _set_label(figure, f"difference to {to}, of 100, by seed: mean, 95 % interval{note}")
    write_png(figure, path)


def difference_limits(found: Sequence[tuple[Difference, Sequence[float]]]) -> tuple[float, float]:
    """Limits of the axis of differences, in percentage points.

    Args:
        found: each row's difference and its points, of 100. Intervals of three and more seeds lie
            on the axis, or all where no row has as many.
    """
    most = max((one.number for one, _ in found), default=0)
    ends = [0.0]
    for one, points in found:
        whole = one.half is not None and one.number >= min(3, most)
        half = one.half if whole and one.half is not None else 0.0
        ends += [*points, 100 * (one.mean - half), 100 * (one.mean + half)]
    room = 0.06 * (max(ends) - min(ends)) or 1.0
    return min(ends) - room, max(ends) + room


def _points(row: TrialRow, reference: TrialRow) -> list[float]:
    return [100 * value for value in paired(row.by_seed, reference.by_seed)]


_INCHES_A_SIGN = 0.075
"""Width in inches of a letter of a row's name."""

_SIGNS_A_LINE = 60
"""Maximum letters of a row's name in a line, unless one of its settings is longer."""


def _figure_of_rows(names: Sequence[str]) -> tuple[Any, Any]:
    """Create a figure sized for the rows and their names, with the last row at the bottom."""
    wrapped = [textwrap.wrap(name, _SIGNS_A_LINE, break_long_words=False) for name in names]
    longest = max((len(line) for lines in wrapped for line in lines), default=0)
    most = max(map(len, wrapped), default=1)
    figure, axes = new_figure(
        width=max(7.0, 4.5 + _INCHES_A_SIGN * longest),
        height=1.2 + (0.2 + 0.14 * most) * max(len(names), 2),
    )
    axes.set_yticks(range(len(names)), ["\n".join(lines) for lines in wrapped], fontsize=8)
    axes.set_ylim(-0.6, max(len(names), 1) - 0.4)
    return figure, axes


def _set_label(figure: Any, text: str) -> None:
    """Write the label of the x axis below the whole figure, which is wider than the axis."""
    signs = int(figure.get_size_inches()[0] / (1.1 * _INCHES_A_SIGN))
    figure.supxlabel(textwrap.fill(text, signs), fontsize=9, color=INK)
