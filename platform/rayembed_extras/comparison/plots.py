"""Plots of a comparison: bars by category, and a dot for each task's difference."""

from collections.abc import Sequence
from typing import Any

from rayembed.display.figures import COLOURS, GRID, INK, grouped_bars, new_figure, png_of
from rayembed_extras.comparison.benchmark_lines import MEAN, Line
from rayembed_extras.comparison.compare import Column, ModelComparison, value
from rayembed_extras.comparison.tables import metric_of

_OURS = COLOURS[2:]
_PAPERS = ("#9aa5b1", "#68737f", "#c4b8a6", "#8f8496", "#d3d8de", "#7f8f82")
"""Greys for published scores, which set them apart from measured ones."""
_MARKS = ("o", "s", "D", "^", "v", "P")
"""A different marker for each model, so that a print without colours can be read."""
_BAND = "#f3f5f7"
_SHORT = {"PairClassification": "Pair classif."}
_SHORT_TICK = 9
"""Maximum letters of a label below a bar at which neighbouring labels do not overlap."""
_INCHES_A_LETTER = 0.068
"""Width in inches of a letter of the legend at 8.5 points."""


def category_bars(comparison: ModelComparison) -> bytes:
    """Draw a PNG with a group of bars for each category, and in it a bar for each model with an
    average in that category.

    Where all tasks are of one category, each task has a group. Published models are grey. The axis
    begins at 0: lengths of bars are compared.
    """
    names = _bar_groups(comparison)
    columns = comparison.columns
    colours = _colours(columns)
    num_bars = sum(value(column, name) is not None for name in names for column in columns)
    slanted = len(names) > 10 and max(map(len, names.values())) > _SHORT_TICK
    room = 0.62 if len(names) > 10 or len(columns) > 2 else 0.85
    figure, axes = new_figure(width=min(12.5, max(6.5, 0.19 * num_bars + room * len(names))))
    upright = len(columns) > 3 or len(names) > 10
    lowest = grouped_bars(
        axes,
        {_legend_label(c): [value(c, name) for name in names] for c in columns},
        {_legend_label(c): colours[c.label] for c in columns},
        "{:.1f}".format,
        width=0.84,
        rotation=90 if upright else 0,
    )
    axes.set_xticks(range(len(names)), list(names.values()))
    axes.margins(x=0.015)
    axes.tick_params(axis="x", length=0, labelsize=8.5)
    if slanted:
        for tick in axes.get_xticklabels():
            tick.set(rotation=35, ha="right", rotation_mode="anchor")
    axes.set_ylim(min(0.0, 1.15 * lowest), 112 if upright else 105)
    axes.set_yticks(range(0, 101, 20))
    axes.set_ylabel("main score × 100")
    _head(figure, axes, comparison.benchmark)
    return png_of(figure)


def difference_dots(comparison: ModelComparison) -> bytes | None:
    """Draw a PNG with a row for each task and a dot for each model: its score minus the
    baseline's.

    The hollow marks on the line of a category are the differences of its average. None where
    there is no baseline, or no model shares a task with it.
    """
    base = comparison.base
    shared = [
        column
        for column in comparison.columns
        if any(comparison.difference(column, line.name) is not None for line in comparison.lines)
    ]
    if base is None or not shared:
        return None
    rows = _rows(comparison, shared)
    figure, axes = new_figure(width=8.2, height=1.6 + 0.185 * len(rows))
    axes.grid(visible=False)
    axes.axvline(0.0, color=INK, linewidth=0.9, zorder=1)
    for y, (is_average, _, _) in enumerate(rows):
        if is_average:
            axes.axhspan(y - 0.5, y + 0.5, color=_BAND, zorder=0, linewidth=0)
        else:
            axes.axhline(y, color=GRID, linewidth=0.7, zorder=0)
    colours = _colours(comparison.columns)
    for number, column in enumerate(shared):
        mark = _MARKS[number % len(_MARKS)]
        _draw(axes, comparison, column, rows, colours[column.label], mark)
    axes.set_yticks(range(len(rows)), [shown for _, shown, _ in rows])
    for tick, (is_average, _, _) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if is_average else "normal")
        tick.set_fontsize(8.5 if is_average else 7.5)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"points more than {_legend_label(base)}; hollow: averages")
    _head(figure, axes, comparison.benchmark)
    return png_of(figure)


def _draw(
    axes: Any,
    comparison: ModelComparison,
    column: Column,
    rows: Sequence[tuple[bool, str, str]],
    colour: str,
    mark: str,
) -> None:
    """Draw the markers of one model: filled for tasks, hollow and larger for averages."""
    for average in (False, True):
        points = [
            (difference, y)
            for y, (is_average, _, name) in enumerate(rows)
            if is_average == average
            and (difference := comparison.difference(column, name)) is not None
        ]
        style: dict[str, Any] = {"marker": mark, "zorder": 3}
        if average:
            style |= {"s": 60, "color": "none", "edgecolors": colour, "linewidths": 1.6}
        else:
            style |= {"s": 30, "color": colour, "edgecolors": "white", "linewidths": 0.5}
            style["label"] = _legend_label(column)
        axes.scatter([x for x, _ in points], [y for _, y in points], **style)


def _rows(comparison: ModelComparison, shared: Sequence[Column]) -> list[tuple[bool, str, str]]:
    """Rows of the plot from top to bottom, as (whether it is an average, label, name).

    Lines without any mark are left out. A category of one task is one line.
    """

    def marked(name: str) -> bool:
        return any(comparison.difference(column, name) is not None for column in shared)

    rows: list[tuple[bool, str, str]] = []
    averages = comparison.averages
    for category, lines in comparison.categories.items():
        dotted = [line.name for line in lines if marked(line.name)]
        if len(lines) == 1 and category in averages:
            if marked(category):
                rows.append((True, f"{category}: {lines[0].name}", category))
            continue
        if category in averages and (dotted or marked(category)):
            rows.append((True, f"{category} ({len(lines)})", category))
        rows += [(False, name, name) for name in dotted]
    means = [name for name in averages if name not in comparison.categories and marked(name)]
    return rows + [(True, _with_count(name, len(averages[name])), name) for name in means]


def _with_count(name: str, count: int) -> str:
    return name if name.endswith(")") else f"{name} ({count})"


def _bar_groups(comparison: ModelComparison) -> dict[str, str]:
    """Name of each group of bars → the label below it."""
    averages = comparison.averages
    if len(comparison.categories) > 1:
        return {name: _tick(name, lines) for name, lines in averages.items()}
    groups = {
        line.name: line.language or line.name
        for line in comparison.lines
        if any(line.name in column.scores for column in comparison.columns)
    }
    between = " " if any(len(label) > _SHORT_TICK for label in groups.values()) else "\n"
    return groups | {name: f"{MEAN}{between}({len(lines)})" for name, lines in averages.items()}


def _tick(name: str, lines: Sequence[Line]) -> str:
    tasks = f"{len(lines)} task" + ("s" if len(lines) > 1 else "")
    return "\n".join((_SHORT.get(name, name), metric_of(lines) or "all", tasks))


def _colours(columns: Sequence[Column]) -> dict[str, str]:
    """A colour for each model: theme colours for measured ones, greys for published ones."""
    colours: dict[str, str] = {}
    for published, palette in ((False, _OURS), (True, _PAPERS)):
        labels = [column.label for column in columns if column.published == published]
        colours |= {label: palette[i % len(palette)] for i, label in enumerate(labels)}
    return colours


def _legend_label(column: Column) -> str:
    return f"{column.label} (paper)" if column.published else column.label


def _head(figure: Any, axes: Any, title: str) -> None:
    """Draw the title and the legend below it, in as many rows as the figure's width requires.

    One box holds both, so that the layout keeps them apart from each other and from the axes.
    """
    handles, labels = axes.get_legend_handles_labels()
    inches = _INCHES_A_LETTER * max((len(label) for label in labels), default=1) + 0.42
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        title=title,
        title_fontproperties={"weight": "bold", "size": 11},
        alignment="left",
        ncols=max(1, min(len(labels), int(figure.get_figwidth() / inches))),
        frameon=False,
        fontsize=8.5,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.4,
        borderaxespad=0.2,
    )
