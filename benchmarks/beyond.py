"""What filter, mining and clusters cost at sizes beyond those that run: by the functions that cut
the work, and in proportion to what `data_scale_mining` has counted.
"""

import math
from dataclasses import dataclass

WIDTH, BATCH = 64, 64
"""Dimensions and pairs of a batch of what is counted."""

NODES, GPUS, DIMENSIONS, CANDIDATES = 16, 8, 768, 100
"""Machines and teacher that the extrapolation assumes."""

FLOP_PER_SECOND, STORAGE_BYTES, DISK_BYTES = 300e12, 3.1e9, 10e9
"""Of a GPU's products in bfloat16, of a node's network (25 Gb/s) and of its disk, a second."""

DRIVER_FLOP_PER_SECOND = 1e12
"""Of the driver's products in float32, as messages about clusters' costs reckon."""


def parts_of(rows):
    from rayembed.data.engine.parts import ROWS_PER_PART

    whole, rest = divmod(rows, ROWS_PER_PART)
    return [ROWS_PER_PART] * whole + [rest] * bool(rest)


@dataclass(frozen=True)
class MiningCost:
    """What an exact search costs all workers together."""

    products: int
    """Products of a query with a document."""
    bytes_read: int
    """Vectors of queries and documents, and results of shards, in bytes."""
    bytes_written: int
    """Results of shards."""
    units: int
    """Units that workers share out, searches of shards included."""
    text_parts_read: int
    """Parts whose texts are read for negatives, if these are spread evenly over the corpus."""


def cost_of(cut, rows, documents, width, k, negatives=7):
    """Cost of a cut by one teacher.

    Args:
        width: of the vectors, of 2 bytes a number.
        k: results of each query.
        negatives: of each query.
    """
    from rayembed.data.engine.parts import rows_per_part
    from rayembed.data.mining.candidate_search import parts_of_texts

    queries = sum(rows)
    parts, text_parts = documents / rows_per_part(documents), 0.0
    for unit in cut.units:
        together = parts_of_texts(len(unit))
        for first in range(unit.start, unit.stop, together):
            wanted = negatives * sum(rows[first : min(first + together, unit.stop)])
            text_parts -= parts * math.expm1(-wanted / parts)
    found = 12 * queries * k * len(cut.shards) if len(cut.shards) > 1 else 0
    return MiningCost(
        products=queries * documents,
        bytes_read=2 * width * (len(cut.units) * documents + len(cut.shards) * queries) + found,
        bytes_written=found,
        units=len(cut.units) * (len(cut.shards) + (len(cut.shards) > 1)),
        text_parts_read=round(text_parts),
    )


def cut_table():
    """What mining and clusters cost by the functions that cut them: sizes beyond those that run."""
    from rayembed.config.mining import ClusterConfig
    from rayembed.data.clusters.scatter import ClusterCost
    from rayembed.data.mining.candidate_search import MiningCut, Shard, cut_mining

    lines = [
        f"Mining, {DIMENSIONS} dimensions, {CANDIDATES} candidates:\n",
        "| queries | documents | units × shards | products | TB read | TB with a unit a part | "
        "TB written |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for queries, documents in (
        (100_000, 100_000),
        (500_000, 8_800_000),
        *((10**n, 10**n) for n in range(6, 10)),
    ):
        rows = parts_of(queries)
        cut = cut_mining(rows, documents)
        each = MiningCut(tuple(range(n, n + 1) for n in range(len(rows))), (Shard(0, None),))
        now, before = (cost_of(one, rows, documents, DIMENSIONS, CANDIDATES) for one in (cut, each))
        lines.append(
            f"| {queries:,} | {documents:,} | {len(cut.units):,} × {len(cut.shards)} | "
            f"{now.products:.1e} | {now.bytes_read / 1e12:,.4g} | {before.bytes_read / 1e12:,.4g} "
            f"| {now.bytes_written / 1e12:,.2g} |"
        )
    lines += [
        "\nClusters of 512 pairs, the defaults:\n",
        "| rows | clusters | levels | sample | k-means | assignment | tour | GB of the sample |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    config = ClusterConfig(teacher="t", batch_pairs=512)
    for rows in (10**n for n in range(5, 10)):
        cost = ClusterCost.of(rows, config)
        lines.append(
            f"| {rows:,} | {cost.clusters:,} | {cost.levels} | {cost.sample:,} | "
            f"{cost.kmeans_products:.1e} | {cost.assignment_products:.1e} | "
            f"{cost.tour_products:.1e} | {20e-9 * cost.sample * DIMENSIONS:,.1f} |"
        )
    return "\n".join(lines)


def extrapolated(costs, rows=10**9):
    """Lines about mining a billion pairs from themselves, and about the filter and clusters of
    them, on the machines assumed.
    """
    return "\n".join(
        [
            f"A billion pairs on {NODES} nodes. Assumed: {GPUS} GPUs a node, each "
            f"{FLOP_PER_SECOND / 1e12:.0f} TFLOP/s in products, {STORAGE_BYTES / 1e9:.1f} GB/s of "
            f"storage and {DISK_BYTES / 1e9:.0f} GB/s of its own disk a node, "
            f"{DRIVER_FLOP_PER_SECOND / 1e12:.0f} TFLOP/s of the driver, vectors of {DIMENSIONS} "
            "dimensions that are there, units shared out evenly, nothing else counted.",
            *mining_lines(rows),
            *filter_lines(costs["filter"], rows),
            *cluster_lines(costs["cluster"], rows),
        ]
    )


def mining_lines(rows):
    from rayembed.data.mining.candidate_search import cut_mining

    cut = cut_mining(parts_of(rows), rows)
    cost = cost_of(cut, parts_of(rows), rows, DIMENSIONS, CANDIDATES)
    corpus = 2 * DIMENSIONS * rows
    return [
        f"- Mining: {cost.products:.1e} products, {multiplied(2 * cost.products) / 3600:.0f} h.",
        f"- Mining, read by {len(cut.units):,} units: {cost.bytes_read / 1e15:.1f} PB; "
        f"{cost.bytes_read / NODES / STORAGE_BYTES / 3600:.0f} h from storage, "
        f"{cost.bytes_read / NODES / DISK_BYTES / 3600:.0f} h from the nodes' disks after "
        f"{corpus / STORAGE_BYTES / 60:.0f} min of copying {corpus / 1e12:.1f} TB to each.",
        f"- Mining, parts of texts read for negatives: {cost.text_parts_read:.1e}; at 1.5 MB each "
        f"{1.5e6 * cost.text_parts_read / 1e15:.1f} PB, at 20 ms of a core each "
        f"{cost.text_parts_read * 0.02 / 3600 / NODES / 64:.0f} h of 64 cores a node.",
        "- Mining, held by a GPU's process of a unit: "
        f"{max(map(len, cut.units)) * 8192 * (2 * DIMENSIONS + 12 * CANDIDATES) / 1e9:.2f} GB "
        "of queries and candidates.",
    ]


def filter_lines(costs, rows):
    """Each query is compared with the documents of its shard, one a row, of one language here."""
    from rayembed.data.engine.shuffle import Route
    from rayembed_extras.consistency.settings import ConsistencyConfig
    from rayembed_extras.consistency.shards import Shards

    def route(rows):
        config = ConsistencyConfig(teacher="t")
        return Route.to(len(Shards.for_rows({None: rows}, config.shard_rows, 0).languages))

    shards = route(rows).buckets
    in_shard = -(-rows // shards)
    # Vectors are read where they are sent to shards, and where each level of the route has them.
    passes = {of: (1 + route(of).levels, route(of).levels) for of in (*costs, rows)}
    return [
        f"- Filter, {shards:,} shards: {rows * in_shard:.1e} products, "
        f"{multiplied(2 * rows * in_shard):.0f} s; "
        f"{4 * DIMENSIONS * in_shard / 1e9:.1f} GB of vectors in a shard.",
        *bytes_lines("Filter", costs, rows, passes),
    ]


def cluster_lines(costs, rows, batch_pairs=512):
    from rayembed.config.mining import ClusterConfig
    from rayembed.data.clusters.scatter import ClusterCost
    from rayembed.data.engine.parts import rows_per_part
    from rayembed.data.engine.shuffle import Route

    def levels(rows, batch_pairs):
        return Route.to(-(-(rows // batch_pairs) // (rows_per_part(rows) // batch_pairs))).levels

    config = ClusterConfig(teacher="t", batch_pairs=batch_pairs)
    cost = ClusterCost.of(rows, config)
    # Vectors are read by each k-means, where pairs are assigned and where they are sent to batches.
    passes = {of: (3 + levels(of, BATCH), levels(of, BATCH)) for of in costs}
    there = levels(rows, batch_pairs)
    passes[rows] = config.restarts + 2 + there, there
    alone = NODES * GPUS
    return [
        f"- Clusters, {cost.clusters:,} in {cost.levels} levels, k-means over {cost.sample:,} "
        f"pairs ({20e-9 * cost.sample * DIMENSIONS:.0f} GB on a machine): "
        f"{cost.kmeans_products:.1e} products in {config.restarts} restarts, "
        f"{alone * multiplied(4 * cost.kmeans_products / config.restarts):.0f} s of one GPU each "
        f"after {4 * DIMENSIONS * rows / STORAGE_BYTES / 60:.0f} min of reading all vectors on its "
        f"node; {cost.assignment_products:.1e} of assignment, "
        f"{multiplied(4 * cost.assignment_products):.0f} s; {cost.tour_products:.1e} of the tour, "
        f"{4 * DIMENSIONS * cost.tour_products / DRIVER_FLOP_PER_SECOND:.0f} s of the driver; "
        f"{8 * DIMENSIONS * cost.clusters / 1e9:.0f} GB of centroids in each that assigns.",
        *bytes_lines("Clusters", costs, rows, passes),
    ]


def multiplied(numbers):
    """Seconds that all GPUs take for products of vectors; `numbers` are a product's FLOP for each
    dimension.
    """
    return numbers * DIMENSIONS / (NODES * GPUS * FLOP_PER_SECOND)


def bytes_lines(step, costs, rows, passes):
    """A line about bytes read and written: those counted at the most rows, in proportion to the
    rows and to the times that vectors are read and written, and as much more as these are wider.

    Args:
        passes: of numbers of rows, how often a step reads and writes the two vectors of a row.
    """
    if not costs:
        return []
    most, cost = max(costs.items())
    told = []
    for what, counted, here, there in zip(
        ("read", "written"), (cost.read, cost.written), passes[most], passes[rows], strict=True
    ):
        bytes_ = rows * (counted / most * there / here + 4 * (DIMENSIONS - WIDTH) * there)
        told.append(
            f"{bytes_ / 1e12:.1f} TB {what} in {bytes_ / NODES / STORAGE_BYTES / 60:.0f} min "
            f"(vectors × {there}; {counted / most:.0f} bytes a row at {most:,} rows, "
            f"vectors of {WIDTH} dimensions × {here})"
        )
    return [f"- {step}: {', '.join(told)}; texts as short as here."]
