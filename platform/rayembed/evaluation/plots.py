"""Draw a run's plots: scores by model, and loss curves of its stages."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rayembed.display.figures import COLOURS, grouped_bars, new_figure, set_title, write_png
from rayembed.evaluation.tables import ScoreTable, heading


def score_bars(table: ScoreTable, path: str | Path) -> None:
    """Draw scores as a PNG bar chart, grouped by task, one bar for each model."""
    tasks, labels = table.tasks, list(table.rows)
    bars = 0.36 * (len(labels) + 1) * len(tasks)
    legend = sum(0.4 + 0.075 * len(label) for label in labels)  # inches, of one line
    figure, axes = new_figure(width=min(12.0, max(6.0, bars, legend)))
    heights = {label: [table.score(label, task) for task in tasks] for label in labels}
    colours = {label: COLOURS[i % len(COLOURS)] for i, label in enumerate(labels)}
    lowest = grouped_bars(axes, heights, colours, _short, width=0.86)
    axes.margins(x=0.015)
    axes.set_xticks(range(len(tasks)), ["\n".join(filter(None, heading(t))) for t in tasks])
    axes.tick_params(axis="x", length=0, labelsize=8.5)
    axes.set_ylim(min(0.0, 1.15 * lowest), 1.05)
    axes.set_ylabel("main score")
    set_title(axes, "Held-out scores", pad=26)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(-0.005, 1.0),
        ncols=len(labels),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.4,
        borderaxespad=0.3,
    )
    write_png(figure, path)


def loss_curve(
    records: Sequence[Mapping[str, Any]],
    path: str | Path,
    *,
    validation: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Draw the smoothed loss by step as PNG, with the learning rate below it.

    Args:
        records: `step`, `loss`, `learning_rate` and `stage` of each step. Steps that start again
            in a later stage are drawn after those of the stage before; those whose loss is not
            finite are not drawn.
        validation: `step`, `score` and `stage` of each step that was scored; they get a curve of
            their own below the loss, with the best one of each stage filled.
    """
    from matplotlib.ticker import MaxNLocator

    rows = (3.0, 1.6, 1.0) if validation else (3.0, 1.0)
    figure, axes = new_figure(width=8.0, height=2.0 + sum(rows) * 0.75, rows=rows)
    upper, lower = axes[0], axes[-1]
    end = 0.0
    for number, (stage, rows_of_stage) in enumerate(
        _by_stage(r for r in records if np.isfinite(r["loss"])).items()
    ):
        steps = np.array([float(row["step"]) for row in rows_of_stage])
        losses = np.array([float(row["loss"]) for row in rows_of_stage])
        rates = np.array([float(row["learning_rate"]) for row in rows_of_stage])
        shift = end if len(steps) and steps[0] <= end else 0.0
        steps = steps + shift
        colour = COLOURS[2 if number == 0 else (3 + number - 1) % len(COLOURS)]
        if number:
            for one in axes:
                one.axvline((steps[0] + end) / 2, color="#b8bec6", linewidth=0.8, linestyle=":")
        upper.plot(steps, losses, color=colour, alpha=0.28, linewidth=0.8)
        upper.plot(steps, smoothed(losses), color=colour, linewidth=1.9, label=stage)
        lower.plot(steps, rates, color=colour, linewidth=1.5)
        scored = [row for row in validation if row["stage"] == stage]
        if scored:
            _validation_curve(axes[1], scored, shift, colour)
        end = float(steps[-1])
    upper.set_ylabel("loss")
    set_title(upper, "Training loss")
    if end:
        upper.legend(frameon=False, fontsize=8.5)
    for one in axes[:-1]:
        one.tick_params(axis="x", labelbottom=False)
    if validation:
        axes[1].set_ylabel("validation")
    lower.set_ylabel("learning rate")
    lower.set_ylim(bottom=0.0)
    lower.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    lower.set_xlabel("step")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True))
    write_png(figure, path)


def _validation_curve(
    axes: Any, scored: Sequence[Mapping[str, Any]], shift: float, colour: str
) -> None:
    steps = np.array([float(row["step"]) for row in scored]) + shift
    scores = np.array([float(row["score"]) for row in scored])
    axes.plot(steps, scores, color=colour, linewidth=1.2, marker="o", markersize=3.5, mfc="white")
    best = int(scores.argmax())
    axes.plot(steps[best], scores[best], color=colour, marker="o", markersize=5.5)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Smooth a series (N,) by local linear regression over about a tenth of its length.

    At both ends it is the line through the first and the last of them, so that the curve neither
    lags nor follows the noise of the outermost values.
    """
    from scipy.signal import savgol_filter

    width = min(2 * max(2, len(values) // 20) + 1, len(values) - (len(values) + 1) % 2)
    if width < 3:
        return values
    found: np.ndarray = savgol_filter(values, width, polyorder=1)
    return found


def _by_stage(records: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    stages: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        stages.setdefault(str(record["stage"]), []).append(record)
    return stages


def _short(score: float) -> str:
    return f"{score:.2f}".replace("0.", ".", 1)
