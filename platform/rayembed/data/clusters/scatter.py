"""Rewrite Parquet parts in batch order: rows are sent to the output part of their batch and
gathered there.

Vectors are moved with their rows, so that false negatives are found where a batch is assembled.
Memory is bounded by an old and a new part.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayembed.config.mining import ClusterConfig
from rayembed.data.clusters.tasks import false_negatives, mean_similarity, vectors_of_positives
from rayembed.data.clusters.two_levels import PROBES, REFINEMENTS, num_groups
from rayembed.data.engine.exchange import Buckets, Sent, vectors_column, vectors_of
from rayembed.data.engine.parts import SCHEMA, read_table, records_table, write_table
from rayembed.data.engine.work_items import Result
from rayembed.data.plan.files import Block, placed_rows, read_block
from rayembed.data.plan.scratch import PartPlaces
from rayembed.data.vectors.embed import Vectors
from rayembed.data.words import normalised_hash

_QUERY, _DOCUMENTS = "query_vector", "document_vectors"

_QUERIES_OF_EXAMPLE = 10
_SHOWN_CHARACTERS = 160


@dataclass(frozen=True)
class ScatterPairs:
    """Task: send each row of a Parquet part, with its vectors, to the output part that holds its
    batch.
    """

    vectors: Vectors
    batch_pairs: int
    batches_per_part: int

    def __call__(self, item: PartPlaces) -> Sent:
        """Return the rows grouped by output part, each with the number of its batch as `step`."""
        table = read_table(item.part.path)
        documents = vectors_of_positives(self.vectors, item.part)
        table = table.append_column(_QUERY, vectors_column(self.vectors.queries(item.part)))
        table = table.append_column(_DOCUMENTS, vectors_column(documents))
        return placed_rows(table, item, self.batch_pairs, self.batches_per_part)


@dataclass(frozen=True)
class GatherBatches:
    """Task: assemble an output part from whole batches, and add the false negatives of each row."""

    folder: str
    """Folder of the output parts."""
    buckets: Buckets
    batch_pairs: int
    margin: float | None
    """Margin ε of false negatives; None disables them."""
    shown: tuple[int, ...] = ()
    """Batch numbers whose queries are reported."""

    def __call__(self, block: Block) -> Result:
        """Write the output part; return `parts`, the batches' mean `similarity`, and the numbers of
        `masked` pairs and of rows left `alone`.

        `alone` counts rows of which all other documents of the batch are masked; `queries` are some
        of each shown batch.
        """
        table = read_block(self.buckets, block, self.batch_pairs)
        queries = vectors_of(table[_QUERY])
        documents = vectors_of(table[_DOCUMENTS], queries.shape[1])
        positives = [
            [normalised_hash(t) for t in texts] for texts in table["positives"].to_pylist()
        ]
        told = [list(known or ()) for known in table["false_negatives"].to_pylist()]
        starts = np.cumsum([0, *map(len, positives)])
        firsts = documents[starts[:-1]]
        similarity, masked, alone = [], 0, 0
        for first in range(0, len(table), self.batch_pairs):
            rows = slice(first, first + self.batch_pairs)
            similarity.append(round(mean_similarity(queries[rows], firsts[rows]), 6))
            if self.margin is None:
                continue
            of_batch = documents[starts[first] : starts[min(rows.stop, len(table))]]
            found, counts = false_negatives(queries[rows], of_batch, positives[rows], self.margin)
            masked += int(counts.sum())
            alone += int((counts == self.batch_pairs - 1).sum())
            for row, hashes in enumerate(found, first):
                told[row] = list(dict.fromkeys([*told[row], *hashes.tolist()]))
        place = table.schema.get_field_index("false_negatives")
        field = SCHEMA.field("false_negatives")
        table = table.set_column(place, field, pa.array(told, field.type))
        part = write_table(self.folder, records_table(table))
        shown = [step - block.first_step for step in self.shown]
        return {
            "parts": [[part.name, part.rows]],
            "similarity": similarity,
            "masked": masked,
            "alone": alone,
            "queries": [
                [
                    text[:_SHOWN_CHARACTERS]
                    for text in table["query"]
                    .slice(batch * self.batch_pairs, min(_QUERIES_OF_EXAMPLE, self.batch_pairs))
                    .to_pylist()
                ]
                for batch in shown
                if 0 <= batch < block.num_steps
            ],
        }


FEWEST_PAIRS = 39
"""Training pairs of a cluster below which FAISS warns of too few."""

_MANY_FLOP = 1e16
"""FLOP that take a CPU of 1 TFLOP/s three hours."""

_WIDTH = 768
"""Vector width that cost estimates assume, since the teacher's is unknown before it runs."""


@dataclass(frozen=True)
class ClusterCost:
    """Estimated cost of clustering: numbers of inner products of 2·D-wide vectors, and
    sample size.
    """

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
        """Estimate the cost of clustering this number of rows."""
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

    def warnings(self, config: ClusterConfig) -> list[str]:
        """Return a warning for each high cost, in one sentence with a remedy."""
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
        for products, what, remedy in (
            (
                self.kmeans_products,
                "k-means",
                "lower clusters.exact_clusters, iterations, restarts or sample_per_cluster",
            ),
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
