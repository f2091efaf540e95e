"""Plot of a clustering: cluster sizes, and similarity within batches."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rayembed.assets.storage import write_atomic
from rayembed.figures import COLOURS, INK, new_figure, png_of, set_title

_CLUSTERED, _RANDOM = COLOURS[2], COLOURS[0]


def write_plot(path: str, manifest: Mapping[str, Any]) -> None:
    """Write a PNG of two histograms: cluster sizes, and mean similarity within batches.

    The second one shows clustered batches beside random ones of the same pairs.

    Args:
        path: local, `s3://…` or `gs://…`.
        manifest: `batch_pairs`, `sizes` and `similarity` of a clustered folder.
    """
    from matplotlib.ticker import MaxNLocator

    figure, (left, right) = new_figure(width=9.0, height=3.6, columns=2)
    sizes, similar = manifest["sizes"], manifest["similarity"]
    _bars(left, sizes["edges"], sizes["counts"], _CLUSTERED)
    left.axvline(manifest["batch_pairs"], color=INK, linewidth=1.0, linestyle=":")
    left.set_xlabel("pairs of a cluster (dotted: pairs of a batch)")
    left.set_ylabel("clusters")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    set_title(left, "Sizes of clusters", size=10)
    for name, counts, mean, colour in (
        ("random", similar["random_counts"], similar["random_mean"], _RANDOM),
        ("clustered", similar["counts"], similar["mean"], _CLUSTERED),
    ):
        share = np.asarray(counts) / max(1, sum(counts))
        _bars(right, similar["edges"], share, colour, f"{name}, mean {mean:.3f}", alpha=0.75)
    right.set_xlabel("mean cosine of queries with others' documents")
    right.set_ylabel("share of batches")
    set_title(right, "Similarity within batches", size=10)
    right.legend(frameon=False, fontsize=8.5)
    write_atomic(path, png_of(figure))


def _bars(
    axes: Any, edges: Any, heights: Any, colour: str, label: str | None = None, alpha: float = 1.0
) -> None:
    places = np.asarray(edges)
    widths = np.diff(places)
    axes.bar(
        places[:-1],
        heights,
        widths,
        align="edge",
        color=colour,
        alpha=alpha,
        label=label,
        zorder=2,
    )
