"""Plot of a clustering: cluster sizes, and similarity within batches."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from rayembed.assets.storage import write_atomic

_CLUSTERED, _RANDOM, _INK = "#1f6fb2", "#9aa5b1", "#2b2f36"


def write_plot(path: str, manifest: Mapping[str, Any]) -> None:
    """Write a PNG of two histograms: cluster sizes, and mean similarity within batches.

    The second one shows clustered batches beside random ones of the same pairs.

    Args:
        path: local, `s3://…` or `gs://…`.
        manifest: `batch_pairs`, `sizes` and `similarity` of a clustered folder.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    sizes, similar = manifest["sizes"], manifest["similarity"]
    _bars(left, sizes["edges"], sizes["counts"], _CLUSTERED)
    left.axvline(manifest["batch_pairs"], color=_INK, linewidth=1.0, linestyle=":")
    left.set_xlabel("pairs of a cluster (dotted: pairs of a batch)")
    left.set_ylabel("clusters")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_title("Sizes of clusters", loc="left", fontsize=10, fontweight="bold")
    for name, counts, mean, colour in (
        ("random", similar["random_counts"], similar["random_mean"], _RANDOM),
        ("clustered", similar["counts"], similar["mean"], _CLUSTERED),
    ):
        share = np.asarray(counts) / max(1, sum(counts))
        _bars(right, similar["edges"], share, colour, f"{name}, mean {mean:.3f}", alpha=0.75)
    right.set_xlabel("mean cosine of queries with others' documents")
    right.set_ylabel("share of batches")
    right.set_title("Similarity within batches", loc="left", fontsize=10, fontweight="bold")
    right.legend(frameon=False, fontsize=8.5)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=160, facecolor="white")
    write_atomic(path, content.getvalue())


def _bars(
    axes: Any, edges: Any, heights: Any, colour: str, label: str | None = None, alpha: float = 1.0
) -> None:
    places = np.asarray(edges)
    widths = np.diff(places)
    axes.bar(places[:-1], heights, widths, align="edge", color=colour, alpha=alpha, label=label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c3c9d1")
    axes.tick_params(colors=_INK, labelsize=8.5)
