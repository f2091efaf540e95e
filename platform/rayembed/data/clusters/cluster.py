"""The clustering step: packs records into batches of similar pairs and marks false negatives.

A plot shows sizes of clusters and similarity within batches.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from rayembed.assets.storage import join, write_atomic
from rayembed.config.data import DatasetConfig
from rayembed.config.mining import ClusterConfig
from rayembed.data.clusters import packing
from rayembed.data.clusters.kmeans import order_clusters
from rayembed.data.clusters.packing import Batches, pack_on_disk
from rayembed.data.clusters.scatter import ClusterCost, GatherBatches, ScatterPairs
from rayembed.data.clusters.tasks import (
    AssignPart,
    FindCentroids,
    Restart,
    Sample,
    chunks_of_keys,
    load_groups,
    load_made,
)
from rayembed.data.clusters.two_levels import Groups, tour_of_groups
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.exchange import exchange
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part, PartItem, rows_per_part
from rayembed.data.engine.work_items import Needs, Result, Task, WorkItem, run_resumable
from rayembed.data.plan.files import blocks_of, num_blocks
from rayembed.data.plan.scratch import BYTES_OF_A_PLACE, PlaceWriter, mapped, scratch_folder
from rayembed.data.vectors.embed import Vectors, embed_parts
from rayembed.display.figures import COLOURS, INK, new_figure, png_of, set_title
from rayembed.errors import DataError
from rayembed.machine.ahead import done_ahead
from rayembed.models.versions import VECTORS
from rayembed.search.faiss_library import require_faiss

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Code version of clustering; raise it when the same inputs yield other batches."""

NOT_FULL = "last batch is not full"

_BYTES_OF_A_ROW = 12 + packing.BYTES_OF_A_ROW + BYTES_OF_A_PLACE
"""Bytes of scratch for each row: hash, cluster, packing and place in the batches."""

_FILES_AHEAD = 8
_BINS = 24
_EXAMPLES = 3


def make_clustered(
    context: PipelineContext, dataset: DatasetConfig, parent: DatasetArtifact
) -> DatasetArtifact:
    """Cluster a data set into a folder of records, ordered so that each `batch_pairs` consecutive
    rows are one batch.

    Pairs are clustered within the data set, clusters are packed into batches, and each record
    stores the false negatives among its batch's documents (arXiv 2410.02525, section 4.1). Rows
    that fill no batch are dropped. The division into parts has no effect.

    Raises:
        ConfigError: FAISS is not installed.
        DataError: fewer rows than a batch.
    """
    config = dataset.clusters
    assert config is not None
    inputs = {
        "code": CODE_VERSION,
        "settings": config.model_dump(mode="json", exclude={"teacher"}),
        "teacher": context.teacher_loader.fingerprint(config.teacher),
        "vectors": VECTORS,
        "records": parent.fingerprint,
        "seed": context.seed,
    }
    rows = sum(part.rows for part in parent.parts)
    cost = ClusterCost.of(rows, config)
    writer = ArtifactWriter(context.storage, "clustered", dataset.name, inputs, parent)
    return writer.get_or_make(lambda: _cluster(context, dataset, parent, writer, cost))


def _cluster(
    context: PipelineContext,
    dataset: DatasetConfig,
    parent: DatasetArtifact,
    writer: ArtifactWriter,
    cost: ClusterCost,
) -> DatasetArtifact:
    config = dataset.clusters
    assert config is not None
    require_faiss("clusters")  # before vectors are made
    count = cost.rows
    if count < config.batch_pairs:
        raise DataError(
            f"data set {dataset.name!r} has {count} rows, fewer than one batch of "
            f"clusters.batch_pairs {config.batch_pairs}; lower clusters.batch_pairs or add rows"
        )
    _tell_cost(dataset.name, cost, config)
    teacher = writer.settled(context, config)
    vectors = embed_parts(context, dataset.name, parent.parts, teacher)
    job = _Job(context, dataset.name, config, writer, tuple(parent.parts), vectors, cost)
    size = _BYTES_OF_A_ROW * count
    with scratch_folder(f"clusters of data set {dataset.name!r}", size) as scratch:
        # The rows' hashes and clusters are mapped, so that memory does not grow with the rows.
        id_hash = mapped(scratch / "id_hash", count, np.int64)
        read_column(parent.parts, "id_hash", into=id_hash)
        trained = job.find_centroids(id_hash)
        best = max(trained, key=lambda result: float(result["objective"]))
        file = join(writer.folder, best["file"])
        groups = None if cost.levels == 1 else load_groups(file)
        centroids = load_made(file)
        assigned = job.assign(file, xxhash.xxh3_64_hexdigest(centroids.data), groups)
        cluster = mapped(scratch / "cluster", count, np.int32)
        sizes = job.read_clusters(assigned, cluster)
        used = np.flatnonzero(sizes)
        tour = job.tour(centroids[used], used, groups)
        keys = chunks_of_keys(id_hash, context.seed)
        batches = pack_on_disk(scratch, cluster, keys, tour, config.batch_pairs)
        gathered = job.rewrite(batches, scratch)
    more = {
        "teacher_dtype": teacher.dtype,
        "batch_pairs": config.batch_pairs,
        "batches": len(batches),
        "clusters": len(used),
        "empty_clusters": len(sizes) - len(used),
        "sizes": _sizes(sizes[used]),
        "centroids": best["file"],
        "objectives_of_restarts": [round(result["objective"], 6) for result in trained],
        "objective": round(sum(result["cosine"] for result in assigned) / count, 6),
        **_of_batches(gathered, best["random"], batches),
        **({} if groups is None else {"groups": len(groups.centroids)}),
    }
    _warn_of_lone_rows(dataset.name, int(more["rows_all_masked"]), batches.size)
    write_plot(join(writer.folder, "clusters.png"), more)
    parts = [item for result in gathered for item in result["parts"]]
    return writer.finish(assigned, parts, {NOT_FULL: count - batches.size}, **more)


def _tell_cost(name: str, cost: ClusterCost, config: ClusterConfig) -> None:
    """Log the estimated cost of clustering, with warnings where it is high."""
    log.info(
        "clusters of data set %s: %s clusters, formed in %d step%s, with k-means over %s pairs; "
        "estimated numbers of inner products: %.1e for k-means, %.1e to assign pairs, %.1e to "
        "order clusters",
        *(name, f"{cost.clusters:,}", cost.levels, "s" * (cost.levels > 1), f"{cost.sample:,}"),
        *(cost.kmeans_products, cost.assignment_products, cost.tour_products),
    )
    for sentence in cost.warnings(config):
        log.warning("clusters %s: %s", name, sentence)


def _warn_of_lone_rows(name: str, alone: int, rows: int) -> None:
    """Warn when the false-negative filter leaves most rows without any negative, so that they give
    no training signal.
    """
    if alone > rows / 2:
        log.warning(
            "clusters of data set %s: the false-negative filter masks all other documents of the "
            "batch for %d of %d rows, so that these rows give no training signal. Choose another "
            "data.datasets.%s.clusters.teacher, a higher false_negative_margin, or larger clusters",
            *(name, alone, rows, name),
        )


@dataclass(frozen=True)
class _Job:
    """Shared inputs of all clustering steps of one data set."""

    context: PipelineContext
    dataset: str
    config: ClusterConfig
    writer: ArtifactWriter
    parts: tuple[Part, ...]
    vectors: Vectors
    cost: ClusterCost

    def find_centroids(self, id_hash: np.ndarray) -> list[Result]:
        """Run every k-means restart on the same sample of rows, and return one result for each
        restart.
        """
        task = FindCentroids(
            self.writer.folder,
            self.vectors,
            self.parts,
            Sample.of(id_hash, self.cost.sample, self.context.seed),
            self.cost.clusters,
            self.config.iterations,
            self.config.batch_pairs,
            self.cost.levels,
        )
        restarts = [Restart(number) for number in range(self.config.restarts)]
        return self._run(self.writer.folder, "k-means", task, restarts, "gpu or machine")

    def assign(self, centroids: str, digest: str, groups: Groups | None) -> list[Result]:
        """Assign all pairs to clusters, and return one result for each Parquet part."""
        working = self.writer.working_folder
        is_grouped = groups is not None
        task = AssignPart(working, self.vectors, centroids, digest, in_groups=is_grouped)
        items = [PartItem(part) for part in self.parts]
        return self._run(working, "assign", task, items, "gpu or cpu")

    def read_clusters(self, assigned: Sequence[Result], into: np.ndarray) -> np.ndarray:
        """(clusters,) int64 number of rows in each cluster; also writes the cluster of every row
        into the array `into`.

        Args:
            into: (rows,) takes the cluster of each row.
        """
        sizes, first = np.zeros(self.cost.clusters, np.int64), 0
        paths = [join(self.writer.working_folder, result["file"]) for result in assigned]
        for found in done_ahead(load_made, paths, read_ahead=_FILES_AHEAD):
            into[first : first + len(found)] = found
            sizes += np.bincount(found, minlength=len(sizes))
            first += len(found)
        return sizes

    def tour(self, centroids: np.ndarray, used: np.ndarray, groups: Groups | None) -> np.ndarray:
        """Order the non-empty clusters so that similar ones are neighbours; return their
        numbers.
        """
        purpose = f"{self.context.seed}\0{self.dataset}\0packing".encode()
        rng = np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(purpose)))
        if groups is None or self.config.packing == "random":
            order = order_clusters(centroids, self.config.packing, rng)
        else:
            order = tour_of_groups(centroids, used, groups, rng)
        return np.asarray(used[order])

    def rewrite(self, batches: Batches, scratch: Path) -> list[Result]:
        """Write the records as new Parquet parts in batch order, and return one result for each
        part.

        Args:
            batches: of rows that count through the parts.
        """
        pairs = self.config.batch_pairs
        per_part = max(1, rows_per_part(self.cost.rows) // pairs)
        working, what = self.writer.working_folder, f"scatter {self.dataset}"
        places, first = PlaceWriter(scratch, working, self.parts), 0
        for some in batches.read():
            places.add(some.ravel(), np.arange(first, first + some.size))
            first += some.size
        items = places.finish()
        scatter = ScatterPairs(self.vectors, pairs, per_part)
        count, execute = num_blocks(len(batches), per_part), self.context.execute
        buckets, _ = exchange(working, what, scatter, items, count, execute)
        blocks = blocks_of(buckets, len(batches), per_part)
        margin = self.config.false_negative_margin
        shown = np.unique(np.linspace(0, len(batches) - 1, _EXAMPLES).astype(int)).tolist()
        gather = GatherBatches(self.writer.parts_folder, buckets, pairs, margin, tuple(shown))
        return self._run(self.writer.folder, "gather", gather, blocks)

    def _run(
        self, folder: str, what: str, task: Task, items: Sequence[WorkItem], needs: Needs = "cpu"
    ) -> list[Result]:
        what = f"{what} {self.dataset}"
        return run_resumable(folder, what, task, items, self.context.execute, needs)


def _sizes(sizes: np.ndarray) -> dict[str, Any]:
    """Return the histogram of cluster sizes with their mean, median and extremes, for the
    manifest.
    """
    counts, edges = np.histogram(sizes, _BINS)
    return {
        "mean": round(float(sizes.mean()), 3),
        "smallest": int(sizes.min()),
        "median": float(np.median(sizes)),
        "largest": int(sizes.max()),
        "edges": [round(float(edge), 3) for edge in edges],
        "counts": counts.tolist(),
    }


def _of_batches(
    gathered: Sequence[Result], random: Sequence[float], batches: Batches
) -> Mapping[str, Any]:
    """Return manifest entries about the batches: similarity within them, share of masked pairs, and
    examples.
    """
    similarity = np.array([value for result in gathered for value in result["similarity"]])
    both = np.concatenate([similarity, random])
    edges = np.linspace(both.min(), max(both.max(), both.min() + 1e-3), _BINS + 1)
    count, pairs = len(batches), batches.pairs
    return {
        "similarity": {
            "mean": round(float(similarity.mean()), 6),
            "random_mean": round(float(np.mean(random)), 6),
            "edges": [round(float(edge), 6) for edge in edges],
            "counts": np.histogram(similarity, edges)[0].tolist(),
            "random_counts": np.histogram(random, edges)[0].tolist(),
        },
        "masked_share": round(
            sum(result["masked"] for result in gathered) / max(1, count * pairs * (pairs - 1)), 6
        ),
        "rows_all_masked": sum(result["alone"] for result in gathered),
        "example_batches": [queries for result in gathered for queries in result["queries"]],
    }


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
    left.stairs(sizes["counts"], sizes["edges"], fill=True, color=_CLUSTERED, zorder=2)
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
        label = f"{name}, mean {mean:.3f}"
        look: dict[str, Any] = {"color": colour, "alpha": 0.75, "label": label, "zorder": 2}
        right.stairs(share, similar["edges"], fill=True, **look)
    right.set_xlabel("mean cosine of queries with others' documents")
    right.set_ylabel("share of batches")
    set_title(right, "Similarity within batches", size=10)
    right.legend(frameon=False, fontsize=8.5)
    write_atomic(path, png_of(figure))
