"""Common style of all figures, and a function for grouped bar charts."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLOURS = ("#9aa5b1", "#7fb3d5", "#1f6fb2", "#e0a458", "#7a9e7e", "#b56576", "#6d597a", "#355070")
"""Colours of the series; the first, grey, is for the reference."""
INK = "#2b2f36"
"""Colour of letters and numbers."""
GRID = "#e3e6ea"
"""Colour of guide lines."""


def new_figure(
    *, width: float, height: float = 4.2, rows: tuple[float, ...] = (1.0,), columns: int = 1
) -> tuple[Any, Any]:
    """Create a figure without a window, with its axes in one column or one row.

    Args:
        width: in inches, as the height.
        rows: relative heights of the rows.
        columns: number of columns; axes of one column share their x.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(rows), columns, sharex="col", gridspec_kw={"height_ratios": rows})
    for one in np.atleast_1d(axes):
        one.grid(axis="y", color=GRID, linewidth=0.8, zorder=0)
        one.set_axisbelow(True)
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color("#c3c9d1")
        one.tick_params(colors=INK, labelsize=8.5)
        one.yaxis.label.set_color(INK)
        one.xaxis.label.set_color(INK)
    return figure, axes


def set_title(axes: Any, text: str, *, size: float = 11, pad: float | None = None) -> None:
    """Write a left-aligned title above the axes."""
    axes.set_title(text, loc="left", fontsize=size, fontweight="bold", pad=pad)


def grouped_bars(
    axes: Any,
    heights: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
    shown: Callable[[float], str],
    *,
    width: float,
    rotation: int = 0,
) -> float:
    """Draw grouped bars labelled with their values; return the smallest value, or 0 if none is
    negative.

    A height that is missing leaves no gap: the others of its group move together.

    Args:
        heights: label → its height in each group.
        shown: writes a number.
        width: of a group, whose neighbour stands at a distance of 1.
        rotation: of the numbers, in degrees.
    """
    lowest, each = 0.0, width / max(1, len(heights))
    for label, values in heights.items():
        places, drawn = [], []
        for group, height in enumerate(values):
            there = [other for other, row in heights.items() if row[group] is not None]
            if height is not None:
                places.append(group + (there.index(label) - (len(there) - 1) / 2) * each)
                drawn.append(height)
        lowest = min([lowest, *drawn])
        bars = axes.bar(places, drawn, each * 0.91, label=label, color=colours[label], zorder=2)
        numbers = [shown(height) for height in drawn]
        axes.bar_label(bars, numbers, fontsize=7, color=INK, padding=2, rotation=rotation)
    return lowest


def png_of(figure: Any, dpi: int = 160) -> bytes:
    """Render the figure as PNG."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=dpi, facecolor="white")
    return data.getvalue()


def write_png(figure: Any, path: str | Path) -> None:
    """Write the figure as a PNG file; missing folders are created."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(png_of(figure))
