"""How filter, mining and clusters grow with the rows, counted at sizes that run (`beyond` goes on
from there), and what two levels of clusters and an index lose.

Vectors are given, not embedded: pairs of random topics. `counted` tells what is counted; a step has
the vectors of its rows already, which the first one writes.
Run: python benchmarks/data_scale_mining.py --rows 10000 30000 100000
     python benchmarks/data_scale_mining.py --rows --levels 500 2000 --tours 2000 20000 \\
         --search 100000
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from beyond import BATCH, CANDIDATES, WIDTH, cut_table, extrapolated
from counted import exponents, machine, measured, table

TOPICS = 500
NUMBERS_TOGETHER = 1024
NOISE = 1.2
"""Length of what is added to a topic's vector to make a text's."""


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def vectors_of(texts):
    """(n, WIDTH) float32 by the numbers in the texts: `query 7`, `document 7`."""
    numbers = np.array([int(text.split()[1]) for text in texts])
    if not len(numbers):
        return np.empty((0, WIDTH), np.float32)
    return numbered(numbers, "query" if texts[0].startswith("query") else "document")


def numbered(numbers, kind):
    """(n, WIDTH) float32 vectors of the queries or documents with these numbers."""
    centres = unit(np.random.default_rng(0).standard_normal((TOPICS, WIDTH)))
    made = np.empty((len(numbers), WIDTH), np.float32)
    blocks, inside = np.divmod(numbers, NUMBERS_TOGETHER)
    for block in np.unique(blocks):
        here = np.flatnonzero(blocks == block)
        noise = sum(
            unit(np.random.default_rng([block, of]).standard_normal((NUMBERS_TOGETHER, WIDTH)))
            for of in (kind == "query", 2)
        )
        topics = centres[numbers[here] * 7919 % TOPICS]
        made[here] = unit(topics + NOISE * noise[inside[here]])
    return made


def load(config, weights, device):
    return lambda texts, role: vectors_of(texts)


def write_records(folder, rows, execute):
    """The finished folder of records of an earlier step."""
    from rayembed.data.engine.artifacts import ArtifactWriter
    from rayembed.data.engine.parts import ROWS_PER_PART, write_part
    from rayembed.data.records import Record

    writer = ArtifactWriter(str(folder), "records", "d", {"rows": rows})
    parts = []
    for first in range(0, rows, ROWS_PER_PART):
        some = range(first, min(first + ROWS_PER_PART, rows))
        made = [Record(f"{n}", f"query {n} asks", (f"document {n} tells",), "d") for n in some]
        parts.append(write_part(writer.parts_folder, made))
    result = {"rows_in": rows, "rows_out": rows, "rejected": {}}
    return writer.finish([result], [[part.name, part.rows] for part in parts]).folder


def make(step, folder, records, execute):
    """Run a step (`embed`, `filter`, `mine` or `cluster`) over the records."""
    from rayembed.config.data import DatasetConfig
    from rayembed.config.settings import parse
    from rayembed.data.clusters.cluster import make_clustered
    from rayembed.data.engine.artifacts import PipelineContext, open_artifact
    from rayembed.data.mining.mine import make_mined
    from rayembed.data.sources.tasks import HeldOut
    from rayembed.data.vectors.embed import embed_parts
    from rayembed.data.vectors.teacher import TeacherLoader
    from rayembed_extras.consistency.filter import make_filtered

    teacher = {"teacher": "given", "dtype": "float32"}
    dataset = parse(
        DatasetConfig,
        {
            "name": "d",
            "source": {"kind": "pairs", "path": "none"},
            "consistency": {**teacher, "top_k": 20},
            "mining": {**teacher, "near_duplicate": None},
            "clusters": {**teacher, "batch_pairs": BATCH, "iterations": 10, "restarts": 1},
        },
    )
    loader = TeacherLoader(load, lambda reference: reference)
    context = PipelineContext(str(folder), 0, execute, loader)
    parent = open_artifact(records)
    if step == "embed":
        embed_parts(context, "d", parent.parts, dataset.mining)
    elif step == "filter":
        make_filtered(context, dataset, parent)
    elif step == "mine":
        make_mined(context, dataset, parent, HeldOut())
    else:
        make_clustered(context, dataset, parent)


def count_steps(costs, rows):
    """Add the costs of all steps of one size."""
    with tempfile.TemporaryDirectory() as name:
        records, _ = measured(write_records, Path(name), rows)
        measured(make, "embed", Path(name), records)
        for step in costs:
            costs[step][rows] = measured(make, step, Path(name), records)[1]
            print(f"{step} {rows:,}: {costs[step][rows].cpu_seconds:.0f} CPU s", flush=True)


def levels_table(counts):
    """Two levels of clusters against one, on made-up pairs: 20 a cluster."""
    from rayembed.data.clusters.kmeans import cluster_pairs, greedy_tour, joined, nearest
    from rayembed.data.clusters.packing import pack
    from rayembed.data.clusters.two_levels import (
        cluster_in_groups,
        nearest_in_groups,
        tour_of_groups,
    )

    lines = [
        "| clusters | levels | k-means' objective | cosine of pairs | cosine of neighbours on the "
        "tour | similarity within batches of 64 | CPU s: k-means, tour |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for count in counts:
        pairs = 20 * count
        queries = numbered(np.arange(pairs), "query")
        documents = numbered(np.arange(pairs), "document")
        rows = joined(queries, documents)
        asked = {"iterations": 10, "seed": 0}
        for levels in (1, 2):
            began = time.process_time()
            if levels == 1:
                found = cluster_pairs(queries, documents, count, **asked)
                centroids, objective = found.centroids, found.objective
                cluster, cosine = nearest(rows, centroids)
            else:
                centroids, groups, objective = cluster_in_groups(queries, documents, count, **asked)
                cluster, cosine = nearest_in_groups(rows, centroids, groups)
            seconds = [time.process_time() - began]
            used = np.unique(cluster)
            tours = {"one": lambda used=used, centroids=centroids: greedy_tour(centroids[used], 0)}
            if levels == 2:
                tours["by groups"] = lambda used=used, centroids=centroids, groups=groups: (
                    tour_of_groups(centroids[used], used, groups, np.random.default_rng(0))
                )
            for kind, make_tour in tours.items():
                began = time.process_time()
                tour = used[make_tour()]
                seconds[1:] = [time.process_time() - began]
                ordered = centroids[tour]
                step = float((ordered[1:] * ordered[:-1]).sum(1).mean())
                batches = pack(cluster, np.arange(pairs), tour, BATCH)
                within = within_batches(queries, documents, batches)
                lines.append(
                    f"| {count:,} | {levels}, tour {kind} | {objective:.4f} | {cosine.mean():.4f} "
                    f"| {step:.4f} | {within:.4f} | {seconds[0]:.0f}, {seconds[1]:.1f} |"
                )
                print(lines[-1], flush=True)
    return "\n".join(lines)


def tours_table(counts):
    """Tours by groups against one greedy tour over all, of centroids that are made up."""
    from rayembed.data.clusters.kmeans import greedy_tour, joined, kmeans, nearest
    from rayembed.data.clusters.two_levels import Groups, num_groups, tour_of_groups

    lines = [
        "| clusters | tour | cosine of neighbours | cosine within 4 in turn | CPU s |",
        "|---:|---|---:|---:|---:|",
    ]
    for count in counts:
        numbers = np.arange(count)
        made = joined(numbered(numbers, "query"), numbered(numbers, "document"))
        coarse = kmeans(made, num_groups(count), iterations=10, seed=0)
        group = nearest(made, coarse)[0]
        centroids = made[np.argsort(group, kind="stable")]
        sizes = np.bincount(group, minlength=len(coarse))
        groups = Groups(coarse, np.concatenate([[0], np.cumsum(sizes)]))
        rng = np.random.default_rng(0)
        for kind, order in (
            ("one", lambda: greedy_tour(centroids, 0)),  # noqa: B023
            ("by groups", lambda: tour_of_groups(centroids, numbers, groups, rng)),  # noqa: B023
            ("random", lambda: rng.permutation(count)),  # noqa: B023
        ):
            began = time.process_time()
            ordered = centroids[order()]
            spent = time.process_time() - began
            step = float((ordered[1:] * ordered[:-1]).sum(1).mean())
            fours = ordered[: count // 4 * 4].reshape(-1, 4, ordered.shape[1])
            within = (fours @ fours.transpose(0, 2, 1)).sum((1, 2)).mean() - 4
            lines.append(f"| {count:,} | {kind} | {step:.4f} | {within / 12:.4f} | {spent:.1f} |")
    return "\n".join(lines)


def within_batches(queries, documents, batches):
    """Mean cosine of a query with the documents of the other pairs of its batch."""
    from rayembed.data.clusters.tasks import mean_similarity

    found = [mean_similarity(queries[rows], documents[rows]) for rows in batches]
    return float(np.mean(found))


def search_table(documents, queries=1000, k=CANDIDATES):
    """Exact search against indexes by FAISS: CPU seconds of one thread and recall."""
    from rayembed.search.exact import top_k
    from rayembed.search.kinds import Hnsw, Ivf

    corpus = numbered(np.arange(documents), "document").astype(np.float16)
    asked = numbered(np.arange(queries), "query").astype(np.float16)
    began = time.process_time()
    exact = top_k(asked, [corpus], k)[1]
    lines = [
        f"{queries:,} queries, {documents:,} documents of {WIDTH} dimensions, {k} candidates:\n",
        "| search | CPU s of the index | CPU ms a query | recall |",
        "|---|---:|---:|---:|",
        f"| exact | | {1e3 * (time.process_time() - began) / queries:.2f} | 1 |",
    ]
    for search in (Ivf(probes=8), Ivf(), Ivf(probes=128), Hnsw(ef_search=128), Hnsw()):
        began = time.process_time()
        index = search.index(corpus, 0)
        made = time.process_time()
        found = search.find(search.open(index), asked, k)[1]
        spent = 1e3 * (time.process_time() - made) / queries
        recall = np.mean([np.isin(a, b).mean() for a, b in zip(exact, found, strict=True)])
        told = ", ".join(f"{name} {value}" for name, value in search if name != "kind")
        lines.append(f"| {search.kind}: {told} | {made - began:.1f} | {spent:.2f} | {recall:.4f} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[10_000, 30_000, 100_000])
    parser.add_argument("--levels", type=int, nargs="*", default=[], help="numbers of clusters")
    parser.add_argument("--tours", type=int, nargs="*", default=[], help="numbers of clusters")
    parser.add_argument("--search", type=int, nargs="*", default=[], help="numbers of documents")
    args = parser.parse_args()
    print(machine())
    costs = {"filter": {}, "mine": {}, "cluster": {}}
    for rows in args.rows:
        count_steps(costs, rows)
    if args.rows:
        print(table(costs), exponents(costs), sep="\n\n")
    print(cut_table(), extrapolated(costs), sep="\n\n")
    if args.levels:
        print(levels_table(args.levels))
    if args.tours:
        print(tours_table(args.tours))
    for documents in args.search:
        print(search_table(documents))


if __name__ == "__main__":
    main()
