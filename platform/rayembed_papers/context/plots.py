"""Plot the effects of context and of clustered batches, as CDE's Figures 6, 7 and 16 do."""

from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

import numpy as np

from rayembed.display.figures import COLOURS, INK, new_figure, png_of, set_title
from rayembed.evaluation.tables import heading
from rayembed_papers.context.difficulty import Difficulty
from rayembed_papers.context.topics import TopicScores
from rayembed_papers.spread import MEAN, SpreadTable

Difficulties = Mapping[int | None, Mapping[int, Difficulty]]
"""Mean size of clusters (None: no clusters, batches in random order) → size of batches."""

_LINES = COLOURS[2:]
_FAR = 0.05
"""Distance below the best score at which a score is drawn white."""
_SMALL_TICKS = 8


def difficulty_lines(found: Difficulties) -> bytes:
    """Draw a PNG of difficulty over cluster size, with a line for each batch size (Figure
    6).

    Dashed are random batches. The lower plot shows the share of documents that the filter masks.
    """
    sizes = sorted(size for size in found if size is not None)
    batch_sizes = list(next(iter(found.values())))
    figure, axes = new_figure(width=7.2, height=5.0, rows=(2.6, 1.2))
    upper, lower = axes
    for number, pairs in enumerate(batch_sizes):
        colour = _LINES[number % len(_LINES)]
        line: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 4}
        means = [found[size][pairs].mean for size in sizes]
        upper.plot(sizes, means, label=f"batches of {pairs}", **line)
        lower.plot(sizes, [100 * found[size][pairs].masked_share for size in sizes], **line)
        if None in found:
            random: dict[str, Any] = {"color": colour, "linestyle": "--", "linewidth": 0.9}
            upper.axhline(found[None][pairs].mean, **random)
            lower.axhline(100 * found[None][pairs].masked_share, **random)
    for one in axes:
        one.set_xscale("log", base=2)
    lower.set_xticks(sizes, [str(size) for size in sizes])
    lower.minorticks_off()
    lower.set_xlabel("mean pairs of a cluster")
    lower.set_ylabel("filtered, %")
    upper.set_ylabel("mean cosine with\nothers' documents")
    set_title(upper, "Difficulty of in-batch negatives (dashed: random batches)", size=10)
    upper.legend(frameon=False, fontsize=8.5)
    return png_of(figure)


def size_lines(table: SpreadTable) -> bytes:
    """Draw a PNG of scores over the number of context documents, with their spread (Figure
    16).

    Args:
        table: its labels are the numbers.
    """
    figure, axes = new_figure(width=7.2)
    places = range(len(table.rows))
    for number, column in enumerate(table.columns):
        scores = [table.scores(label, column) for label in table.rows]
        style: dict[str, Any] = {"color": _LINES[number % len(_LINES)], "marker": "o"}
        if column == MEAN:
            style |= {"color": INK, "linewidth": 2.0}
        axes.errorbar(
            places,
            [fmean(each) for each in scores],
            yerr=[stdev(each) if len(each) > 1 else 0.0 for each in scores],
            label=" ".join(part for part in heading(column) if part),
            markersize=4,
            capsize=2.5,
            elinewidth=0.9,
            **style,
        )
    axes.set_xticks(places, list(table.rows))
    axes.set_xlabel("context documents; the null token fills the other positions")
    axes.set_ylabel("score")
    set_title(axes, "Scores by the number of context documents", size=10)
    # Below the axis, where no line can run through it.
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
    axes.legend(frameon=False, fontsize=8.5, **below)
    return png_of(figure)


def topic_squares(found: TopicScores) -> bytes:
    """Draw a PNG of each topic's score × 100 in each context (Figure 7).

    The darker, the nearer to the best of the row; bold and framed within one point of it.
    """
    topics, contexts = found.topics, found.contexts
    below = np.array([[found.best(t) - found.mean(t, c) for c in contexts] for t in topics])
    figure, axes = new_figure(width=2.8 + 0.62 * len(contexts), height=2.0 + 0.42 * len(topics))
    axes.grid(visible=False)
    axes.imshow(-below, cmap="Blues", vmin=-_FAR, vmax=_FAR, aspect="auto")
    for y, topic in enumerate(topics):
        for x, context in enumerate(contexts):
            near = found.near_best(topic, context)
            text = f"{100 * found.mean(topic, context):.1f}"
            weight = "bold" if near else "normal"
            place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7.5}
            axes.text(x, y, text, color=INK, fontweight=weight, **place)
            if near:
                axes.add_patch(_frame(x, y))
    axes.axvline(len(topics) - 0.5, color=INK, linewidth=0.9)
    axes.set_xticks(range(len(contexts)), [_short(c) for c in contexts])
    for tick in axes.get_xticklabels():
        tick.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(topics)), [_short(t) for t in topics])
    axes.tick_params(length=0, labelsize=_SMALL_TICKS)
    axes.set_xlabel("context documents of")
    axes.set_ylabel("texts of")
    name, metric = heading(found.task)
    set_title(axes, f"{name}, {metric} × 100 (framed: within one point of the row's best)", size=10)
    return png_of(figure)


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, fill=False, edgecolor=INK, linewidth=0.9)


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}…"
