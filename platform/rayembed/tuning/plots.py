"""Plots of a sweep: parallel coordinates of its trials, and importance of settings."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rayembed.config.space import Domain
from rayembed.config.sweep import Sweep
from rayembed.figures import COLOURS, GRID, INK, new_figure, set_title, write_png
from rayembed.paired import paired
from rayembed.tuning.results import Row, short_names
from rayembed.tuning.trial_store import TrialRecord


def parallel_coordinates(
    sweep: Sweep, records: Mapping[str, TrialRecord], path: str | Path
) -> None:
    """Write a PNG of parallel coordinates: axes for the settings and the score, a line for each
    trial.

    Finished trials are coloured by their score, those that were ended early are grey.
    """
    import matplotlib as mpl

    shown = [r for r in records.values() if r.score is not None and math.isfinite(r.score)]
    axes_of = list(sweep.domains.items())
    labels = list(sweep.runs)
    names = (["run"] if len(labels) > 1 else []) + list(short_names(sweep.domains).values())
    figure, axes = new_figure(width=max(6.0, 2.2 * (len(names) + 1)))
    scores = [r.score for r in shown if r.score is not None]
    low, high = (min(scores), max(scores)) if scores else (0.0, 1.0)
    wide = (high - low) or 1.0
    colours = mpl.colormaps["viridis"]
    for record in sorted(shown, key=lambda r: r.score or 0.0):
        assert record.score is not None
        places = [_place(domain, record.values.get(p, "")) for p, domain in axes_of]
        if len(labels) > 1:
            places.insert(0, _of_list(labels, record.label))
        height = (record.score - low) / wide
        ended = record.state != "finished"
        axes.plot(
            range(len(places) + 1),
            [*places, height],
            color=COLOURS[0] if ended else colours(height),
            alpha=0.5 if ended else 0.95,
            linewidth=1.0 if ended else 1.6,
            zorder=1 if ended else 2,
        )
    for number, ticks in enumerate(
        [*([_list_ticks(labels)] if len(labels) > 1 else []), *(_ticks(d) for _, d in axes_of)]
    ):
        axes.axvline(number, color=GRID, zorder=0)
        for place, text in ticks:
            axes.annotate(text, (number, place), fontsize=7, color=INK, ha="center", va="bottom")
    axes.axvline(len(names), color=GRID, zorder=0)
    for place in (0.0, 0.5, 1.0):
        text = f"{low + place * wide:.3f}"
        axes.annotate(text, (len(names), place), fontsize=7, color=INK, ha="left", va="center")
    axes.set_xticks(range(len(names) + 1), [*names, "score"], fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(-0.08, 1.12)
    set_title(axes, f"Trials of {sweep.name}")
    write_png(figure, path)


def importance_bars(shares: Mapping[str, float], path: str | Path) -> None:
    """Write a PNG with a bar for each setting, the most important one on top."""
    ordered = sorted(shares.items(), key=lambda item: item[1])
    figure, axes = new_figure(width=7.0)
    places = range(len(ordered))
    bars = axes.barh(places, [share for _, share in ordered], color=COLOURS[2], zorder=2)
    axes.bar_label(bars, [f"{share:.0%}" for _, share in ordered], fontsize=8, padding=2)
    axes.set_yticks(places, [name for name, _ in ordered], fontsize=8)
    axes.set_xlim(0.0, 1.05)
    axes.set_xlabel("share of the variance of the score (fANOVA)", fontsize=9)
    set_title(axes, "What decides the score")
    write_png(figure, path)


def rows_with_spread(rows: Sequence[Row], path: str | Path) -> None:
    """Write a PNG of each row's mean score, its standard deviation and every seed as a point."""
    shown = [row for row in rows if "score" in row.scores][::-1]
    figure, axes = new_figure(width=7.5)
    for number, row in enumerate(shown):
        found = row.scores["score"]
        points = [r.final.score for r in row.records if r.state == "finished" and r.final]
        axes.scatter(points, [number] * len(points), s=14, color=COLOURS[0], zorder=2)
        axes.errorbar(
            found.mean, number, xerr=found.deviation or 0.0, fmt="o", color=COLOURS[2], zorder=3
        )
    axes.set_yticks(range(len(shown)), [row.name for row in shown], fontsize=8)
    axes.set_xlabel("score: mean and standard deviation over seeds", fontsize=9)
    write_png(figure, path)


def differences_by_seed(rows: Sequence[Row], reference: Row, path: str | Path) -> None:
    """Write a PNG of each row's differences to the reference: every seed as a point, the mean, and
    its 95 % interval where there are seeds.
    """
    apart = [
        (row, found) for row in rows if row is not reference and (found := row.apart(reference))
    ]
    figure, axes = new_figure(width=7.5, height=1.2 + 0.35 * max(len(apart), 2))
    for number, (row, found) in enumerate(apart[::-1]):
        points = [100 * value for value in paired(row.by_seed, reference.by_seed)]
        axes.scatter(points, [number] * len(points), s=14, color=COLOURS[0], zorder=2)
        half = None if found.half is None else 100 * found.half
        mean = 100 * found.mean
        axes.errorbar(mean, number, xerr=half, fmt="o", color=COLOURS[2], capsize=3, zorder=3)
    axes.axvline(0.0, color=INK, linewidth=0.8, zorder=1)
    axes.set_ylim(-0.6, max(len(apart), 1) - 0.4)
    axes.set_yticks(range(len(apart)), [row.name for row, _ in apart[::-1]], fontsize=8)
    axes.set_xlabel(
        f"difference to {reference.name or 'the recipe'}, of 100, by seed: mean, 95 % interval",
        fontsize=9,
    )
    write_png(figure, path)


def _place(domain: Domain, text: str) -> float:
    """Position of a value between the ends of its axis, from 0 to 1."""
    if domain.is_finite:
        return _of_list(domain.values, text)
    value, low, high = float(text), domain.low, domain.high
    if domain.kind == "loguniform":
        value, low, high = np.log([value, low, high])
    return float((value - low) / (high - low))


def _of_list(values: Sequence[str], text: str) -> float:
    return list(values).index(text) / max(1, len(values) - 1) if text in values else 0.0


def _list_ticks(values: Sequence[str]) -> list[tuple[float, str]]:
    return [(_of_list(values, value), value) for value in values]


def _ticks(domain: Domain) -> list[tuple[float, str]]:
    if domain.is_finite:
        return _list_ticks(domain.values)
    return [(0.0, f"{domain.low:g}"), (1.0, f"{domain.high:g}")]
