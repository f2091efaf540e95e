"""The clustering step: records in batches of similar pairs, with the false negatives of each."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from rayembed.assets.storage import join, remove_folder
from rayembed.config.data import DatasetConfig
from rayembed.config.mining import ClusterConfig
from rayembed.data.clusters.kmeans import require_faiss
from rayembed.data.clusters.packing import order_clusters, pack
from rayembed.data.clusters.plot import write_plot
from rayembed.data.clusters.rewriting import GatherBatches, ScatterPairs
from rayembed.data.clusters.tasks import (
    AssignPart,
    FindCentroids,
    Restart,
    Sample,
    load_array,
    sample_keys,
)
from rayembed.data.parts import ROWS_PER_PART, read_index
from rayembed.data.plan.files import blocks_of, part_places
from rayembed.data.prepared import Making, Prepared, Workshop
from rayembed.data.units import Result, run_units
from rayembed.data.vectors.embed import PartUnit, Vectors, embed_parts
from rayembed.errors import DataError

CODE_VERSION = 1
"""Of clustering; raised whenever it makes other batches of the same inputs."""

NOT_FULL = "last batch is not full"

_BINS = 24
_EXAMPLES = 3


def make_clustered(workshop: Workshop, dataset: DatasetConfig, before: Prepared) -> Prepared:
    """The folder of the records in batches of `batch_pairs`: each so many rows, part after part.

    Pairs are clustered within the data set, clusters are packed into batches, and each record is
    told which documents of its batch are no negatives of it (arXiv 2410.02525, section 4.1). Rows
    that fill no batch are dropped. How pairs were split into parts changes nothing.

    Raises:
        ConfigError: FAISS is not installed.
        DataError: fewer rows than a batch.
    """
    config = dataset.clusters
    assert config is not None
    inputs = {
        "code": CODE_VERSION,
        "settings": config.model_dump(mode="json", exclude={"teacher"}),
        "teacher": workshop.teaching.fingerprint(config.teacher),
        "records": before.fingerprint,
        "seed": workshop.seed,
    }
    making = Making(workshop.storage, "clustered", dataset.name, inputs, before)
    if (found := making.found()) is not None:
        return found
    require_faiss()  # before vectors are made
    count = sum(part.rows for part in before.parts)
    if count < config.batch_pairs:
        raise DataError(
            f"data set {dataset.name!r} has {count} rows, fewer than one batch of "
            f"clusters.batch_pairs {config.batch_pairs}; lower it or add rows"
        )
    vectors = embed_parts(workshop, dataset.name, making.folder, before.parts, config)
    id_hash = read_index(before.parts).id_hash
    trained, assigned = _clusters(workshop, dataset.name, config, making, before, vectors, id_hash)
    cluster = np.concatenate([load_array(result["file"]) for result in assigned])
    sizes = np.bincount(cluster, minlength=_num_clusters(config, count))
    used = np.flatnonzero(sizes)
    purpose = f"{workshop.seed}\0{dataset.name}\0packing".encode()
    rng = np.random.Generator(np.random.PCG64(xxhash.xxh3_64_intdigest(purpose)))
    tour = used[order_clusters(load_array(trained["file"])[used], config.packing, rng)]
    batches = pack(cluster, sample_keys(id_hash, workshop.seed), tour, config.batch_pairs)
    gathered = _rewrite(workshop, dataset.name, config, making, before, vectors, batches)
    more = {
        "batch_pairs": config.batch_pairs,
        "batches": len(batches),
        "clusters": len(used),
        "empty_clusters": len(sizes) - len(used),
        "sizes": _sizes(sizes[used]),
        "centroids": trained["file"].rsplit("/", 1)[-1],
        "objectives_of_restarts": [round(value, 6) for value in trained["objectives"]],
        "objective": round(sum(result["cosine"] for result in assigned) / count, 6),
        **_of_batches(gathered, trained["random"], batches),
    }
    write_plot(join(making.folder, "clusters.png"), more)
    remove_folder(join(making.folder, "scattered"))  # all of it is in the parts
    parts = [item for result in gathered for item in result["parts"]]
    made = making.finish(assigned, parts, {NOT_FULL: count - batches.size}, **more)
    remove_folder(join(making.folder, "assigned"))
    return made


def _num_clusters(config: ClusterConfig, num_pairs: int) -> int:
    return -(-num_pairs // (config.pairs_per_cluster or config.batch_pairs))


def _clusters(
    workshop: Workshop,
    name: str,
    config: ClusterConfig,
    making: Making,
    before: Prepared,
    vectors: Vectors,
    id_hash: np.ndarray,
) -> tuple[Result, list[Result]]:
    """Result of the best run of k-means, with `objectives` of all; of the tasks that assign."""
    num_clusters = _num_clusters(config, len(id_hash))
    sample = Sample.of(id_hash, num_clusters * config.sample_per_cluster, workshop.seed)
    parts = tuple(before.parts)
    find = FindCentroids(
        *(making.folder, vectors, parts, sample, num_clusters),
        *(config.iterations, config.batch_pairs),
    )
    restarts = [Restart(number) for number in range(config.restarts)]
    what, execute = f"k-means {name}", workshop.execute
    trained = run_units(making.folder, what, find, restarts, execute, "gpu or machine")
    best = max(trained, key=lambda result: float(result["objective"]))
    assign = AssignPart(making.folder, vectors, best["file"])
    units = [PartUnit(part) for part in parts]
    what = f"assign {name}"
    assigned = run_units(making.folder, what, assign, units, execute, "gpu or cpu")
    best["objectives"] = [result["objective"] for result in trained]
    return best, assigned


def _rewrite(
    workshop: Workshop,
    name: str,
    config: ClusterConfig,
    making: Making,
    before: Prepared,
    vectors: Vectors,
    batches: np.ndarray,
) -> list[Result]:
    """Results of the tasks that put batches together; their parts lie in the folder."""
    per_part = max(1, ROWS_PER_PART // config.batch_pairs)
    step, slot = np.divmod(np.arange(batches.size), config.batch_pairs)
    paths, rows = [part.path for part in before.parts], [part.rows for part in before.parts]
    places = part_places(paths, rows, batches.ravel(), step, slot.astype(np.int32))
    scatter = ScatterPairs(making.folder, vectors, per_part)
    what, execute = f"scatter {name}", workshop.execute
    scattered = run_units(making.folder, what, scatter, places, execute)
    blocks = blocks_of(scattered, len(batches), per_part)
    gather = GatherBatches(making.parts_folder, config.batch_pairs, config.false_negative_margin)
    return run_units(making.folder, f"gather {name}", gather, blocks, execute)


def _sizes(sizes: np.ndarray) -> dict[str, Any]:
    """The histogram of the sizes of clusters."""
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
    gathered: Sequence[Result], random: Sequence[float], batches: np.ndarray
) -> Mapping[str, Any]:
    """What the manifest tells of similarity within batches, masks and examples."""
    similarity = np.array([value for result in gathered for value in result["similarity"]])
    both = np.concatenate([similarity, random])
    edges = np.linspace(both.min(), max(both.max(), both.min() + 1e-3), _BINS + 1)
    count, pairs = batches.shape
    examples = [queries for result in gathered for queries in result["queries"]]
    places = np.unique(np.linspace(0, len(examples) - 1, _EXAMPLES).astype(int))
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
        "example_batches": [examples[place] for place in places],
    }
