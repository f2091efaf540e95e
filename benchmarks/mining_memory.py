"""Memory and time of mining with vectors given: peak RSS of the process that mines.

Random unit vectors in the layout on disk, a query near its positive, all documents but the
positives from a corpus of their own; the files are made by a process of its own and kept in the
folder. Run: python benchmarks/mining_memory.py --queries 16384
"""

import argparse
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

WIDTH = 384
NOISE = 1.0
"""Length of what is added to a positive's vector to make its query: cosines of 0.7."""


def unit_vectors(count, seed):
    vectors = np.random.default_rng(seed).standard_normal((count, WIDTH), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def make_files(folder, queries, documents):
    """Parts of records and of documents with their vectors, as mining finds them."""
    from rayembed.data.engine.parts import ROWS_PER_PART, write_part
    from rayembed.data.mining.documents import _DOCUMENTS_PER_PART, write_documents
    from rayembed.data.records import Record
    from rayembed.data.vectors.embed import Vectors, known_of, texts_of

    vectors = Vectors(str(folder / "vectors"), "made up")
    records, others = [], []
    for first in range(0, queries, ROWS_PER_PART):
        rows = range(first, min(first + ROWS_PER_PART, queries))
        made = [
            Record(f"{n}", f"question number {n}", (f"answer {n} of some words",), "d")
            for n in rows
        ]
        part = write_part(str(folder / "records"), made)
        positives = unit_vectors(len(rows), first)
        asked = positives + NOISE * unit_vectors(len(rows), first + 1)
        asked /= np.linalg.norm(asked, axis=1, keepdims=True)
        vectors.save(part, asked, positives, texts_of(made)[1])
        records.append(part)
    for first in range(0, documents - queries, _DOCUMENTS_PER_PART):
        count = min(_DOCUMENTS_PER_PART, documents - queries - first)
        texts = [f"document {first + n} says this and that" for n in range(count)]
        part = write_documents(str(folder / "documents"), texts)
        found = unit_vectors(count, 10_000_019 + first)
        vectors.save(part, found[:0], found, known_of(texts))
        others.append(part)
    return tuple(records), tuple(others), vectors


def mine(folder, made, parts):
    """Peak RSS in MiB before and after all units were mined, seconds, negatives."""
    from rayembed.config.mining import MiningConfig
    from rayembed.data.mining.candidate_search import CorpusSearch, MineUnit, Shard
    from rayembed.data.mining.corpus import CorpusFiles
    from rayembed.data.mining.tasks import MineParts

    records, others, vectors = made
    config = MiningConfig(teacher="random")
    files, whole = CorpusFiles(records, others, vectors), (Shard(0, None),)
    search = CorpusSearch(str(folder), files, whole, config.search, config.candidates, 0)
    task = MineParts(str(folder / "mined"), search, (vectors,), config)
    before, mined, began = peak_mib(), 0, time.perf_counter()
    for first in range(0, len(records), parts):
        started = time.perf_counter()
        count = task(MineUnit(records[first : first + parts]))["mined"]
        mined += count
        seconds = time.perf_counter() - started
        print(f"unit: {seconds:.1f} s, {count} negatives, peak {peak_mib():.0f} MiB", flush=True)
    return before, peak_mib(), time.perf_counter() - began, mined


def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queries", type=int, default=100_000)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--parts", type=int, default=1, help="of 8,192 queries in a unit")
    parser.add_argument("--folder", type=Path, default=None)
    args = parser.parse_args()
    # Each in a process of its own, so that making the files does not count.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        with context.Pool(1) as pool:
            made = pool.apply(make_files, (folder, args.queries, args.documents))
        with context.Pool(1) as pool:
            before, peak, seconds, mined = pool.apply(mine, (folder, made, args.parts))
    print("| queries | documents | negatives | seconds | peak RSS (MiB) | of it imports (MiB) |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {args.queries:,} | {args.documents:,} | {mined:,} | {seconds:.0f} | {peak:.0f} | "
        f"{before:.0f} |"
    )


if __name__ == "__main__":
    main()
