"""What clustering will cost, counted before it starts, and what to do where that is too much."""

from dataclasses import dataclass

from rayembed.config.mining import ClusterConfig
from rayembed.data.clusters.two_levels import PROBES, REFINEMENTS, num_groups

FEWEST_PAIRS = 39
"""Training pairs of a cluster below which FAISS warns of too few."""

_MANY_FLOP = 1e16
"""FLOP of k-means that take a CPU of 1 TFLOP/s three hours."""

_WIDTH = 768
"""Width of a teacher's vectors that messages reckon with, as it is not known before it has run."""


@dataclass(frozen=True)
class ClusterCost:
    """Products of two joined vectors, of 2·D numbers each, and what a task holds."""

    rows: int
    clusters: int
    levels: int
    """1: every pair is compared with every cluster; 2: with groups, then within one of them."""
    sample: int
    """Training pairs of k-means."""
    kmeans_products: int
    """Products that k-means takes, over all restarts."""
    assignment_products: int
    """Products that the assignment of all pairs takes, shared by the workers."""
    tour_products: int
    """Products that the tour of the clusters takes in the driver."""

    @classmethod
    def of(cls, rows: int, config: ClusterConfig) -> "ClusterCost":
        """Cost for so many rows."""
        clusters = -(-rows // (config.pairs_per_cluster or config.batch_pairs))
        sample = max(min(clusters * config.sample_per_cluster, config.max_sample), clusters)
        sample = min(sample, rows)
        levels = 1 if clusters <= config.exact_clusters else 2
        passes, compared, tour = config.iterations + 1, clusters, clusters**2
        once = passes * compared
        if levels == 2:
            groups = num_groups(clusters)
            inside = -(-clusters // groups)
            compared = groups + min(PROBES, groups) * inside
            once = passes * (groups + inside) + (REFINEMENTS + 1) * compared
            tour = clusters * compared
        return cls(
            rows=rows,
            clusters=clusters,
            levels=levels,
            sample=sample,
            # Both orders of each pair; a last pass tells the objective.
            kmeans_products=config.restarts * 2 * sample * once,
            assignment_products=rows * compared,
            tour_products=0 if config.packing == "random" else tour,
        )

    @property
    def flop(self) -> float:
        """FLOP of k-means with vectors of 768 dimensions."""
        return 4.0 * _WIDTH * self.kmeans_products

    def warnings(self, config: ClusterConfig) -> list[str]:
        """What to do about a cost, one sentence for each."""
        found = []
        if self.sample < min(FEWEST_PAIRS * self.clusters, self.rows):
            size = FEWEST_PAIRS * self.clusters
            needed = -(-self.rows // max(config.max_sample // FEWEST_PAIRS, 1))
            found.append(
                f"k-means has {self.sample / self.clusters:.1f} pairs for each of "
                f"{self.clusters:,} clusters, and centroids of fewer than {FEWEST_PAIRS} are "
                "little better than drawn pairs: raise clusters.pairs_per_cluster to "
                f"{needed:,}, or clusters.sample_per_cluster and max_sample to {size:,} (one "
                f"machine then holds {20e-9 * _WIDTH * size:,.0f} GB at {_WIDTH} dimensions)"
            )
        if self.flop > _MANY_FLOP:
            found.append(
                f"k-means takes {self.flop:.0e} FLOP at {_WIDTH} dimensions, "
                f"{self.flop / 6e13 / 60:,.0f} min on a GPU of 60 TFLOP/s and "
                f"{self.flop / 1e12 / 3600:,.0f} h on a CPU of 1: lower clusters.exact_clusters, "
                "iterations, restarts or sample_per_cluster"
            )
        for products, what, remedy in (
            (self.assignment_products, "assigning all pairs", "lower clusters.exact_clusters"),
            (
                self.tour_products,
                "the tour of the clusters, on the driver,",
                "lower clusters.exact_clusters, or set clusters.packing=random",
            ),
        ):
            flop = 4.0 * _WIDTH * products
            if flop > _MANY_FLOP:
                found.append(
                    f"{what} takes {flop:.0e} FLOP at {_WIDTH} dimensions, "
                    f"{flop / 1e12 / 3600:,.0f} h on a CPU of 1 TFLOP/s: {remedy}"
                )
        return found
