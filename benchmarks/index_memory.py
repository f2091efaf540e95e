"""Bytes a row of processes that hold something of all rows, over made-up indexes.

Miners: peak RSS above what each had before, a row a document; the first of a machine makes the file
that all map, from a million documents on. Driver: the peak of its own memory while it packs
clusters into batches and draws a sample, whose files are mapped, while it tells the tasks of the
consistency filter what ranks decide, and while it gathers the filter's results. What a plan
takes tells `data_scale`. Run: python benchmarks/index_memory.py --rows 2000000
"""

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path

import numpy as np

from counted import own_peak, start_of_peak, status
from data_scale import make_indexes

PART_ROWS, SHARD_ROWS = 8192, 1_000_000


def corpus(parts):
    """Peak bytes of what a miner knows of the documents, and those that it keeps."""
    from rayembed.data.mining.corpus import CorpusFiles, open_corpus
    from rayembed.data.vectors.embed import PartTexts

    class MadeUp:
        """Stands for the vectors' files: a distinct positive a row, no classes."""

        folder = "made up"

        def texts(self, part):
            rng = np.random.default_rng(int(part.name[5:17]))
            places = np.arange(part.rows + 1)
            hashes = rng.integers(-(2**62), 2**62, part.rows)
            none = np.empty(0, np.int64)
            return PartTexts(hashes, places, places[:-1].copy(), none, none)

    before = start_of_peak()
    made = open_corpus(CorpusFiles(parts, (), MadeUp()))
    found = {"at the peak": status("VmHWM") - before, "kept": status("VmRSS") - before}
    assert made.starts[-1] == sum(part.rows for part in parts)
    return found


def packing(rows, folder):
    """Peak of own memory while rows in clusters of 100 become batches of 256."""
    from rayembed.data.clusters.packing import pack_on_disk
    from rayembed.data.clusters.tasks import Sample, chunks_of_keys
    from rayembed.data.plan.scratch import mapped

    rng, clusters = np.random.default_rng(0), max(1, rows // 100)
    id_hash = mapped(folder / "id_hash", rows, np.int64)
    cluster = mapped(folder / "cluster", rows, np.int32)
    for first in range(0, rows, 1 << 17):
        count = len(id_hash[first : first + (1 << 17)])
        id_hash[first : first + count] = rng.integers(-(2**62), 2**62, count)
        cluster[first : first + count] = rng.integers(0, clusters, count)
    with own_peak() as peak:
        Sample.of(id_hash, rows // 2, 0)
        keys = chunks_of_keys(id_hash, 0)
        batches = pack_on_disk(folder, cluster, keys, np.arange(clusters), 256)
        packed = sum(some.size for some in batches.read())
    assert packed == rows // 256 * 256
    return peak[0]


def sampling(rows, folder):
    """Peak of own memory while half of all rows are drawn."""
    from rayembed.data.cleaning.rows import drawn
    from rayembed.data.plan.scratch import mapped

    id_hash = mapped(folder / "drawn", rows, np.int64)
    id_hash[:] = np.arange(rows)
    with own_peak() as peak:
        chosen = drawn(id_hash, np.ones(rows, bool), rows // 2, 0)
    assert chosen.sum() == rows // 2
    return peak[0]


def write_ranks(rows, folder):
    """Files of ranks, as the tasks of the filter leave them; the parts and shards they are of."""
    from rayembed.assets.array_files import save_arrays
    from rayembed.data.engine.parts import Part
    from rayembed_extras.consistency.shards import Shards

    parts = [Part(f"part-{number:032d}.parquet", PART_ROWS) for number in range(rows // PART_ROWS)]
    total, rng = len(parts) * PART_ROWS, np.random.default_rng(0)
    shards = Shards.for_rows({None: total}, SHARD_ROWS, 0)
    of_shards = np.array_split(rng.permutation(total), len(shards.languages))
    for number, row in enumerate(of_shards):
        own = {"part": row // PART_ROWS, "row": row % PART_ROWS, "rank": 1 + row % 7}
        save_arrays(str(folder / "ranks" / f"{number}.npz"), **own)
    return parts, shards


def filtering(parts, shards, folder):
    """Peak of own memory from the shards' ranks to the pickled units of the filter's tasks."""
    from ray import cloudpickle

    from rayembed_extras.consistency import filter as consistency

    with own_peak() as peak:
        items, _ = consistency._ranked_parts(str(folder), parts, shards, 2)
        # As `on_ray` does for all units of an execution, most of all.
        pickled = [cloudpickle.dumps([unit]) for unit in enumerate(items)]
    assert len(pickled) == len(parts)
    return peak[0]


def results_of_parts(rows, folder):
    """Peak of own memory while the results of a filter's units are gathered, of which each shows
    ten rows that go.
    """
    from rayembed.data.engine.parts import Part, PartItem
    from rayembed.data.engine.work_items import in_process, run_tasks

    def task(item):
        text = f"{item.key} ".ljust(300, "x")
        shown = [
            {"reason": "gone", "id": text[:40], "query": text[:60], "document": text + str(number)}
            for number in range(10)
        ]
        counts = {"rows_in": PART_ROWS, "rows_out": PART_ROWS, "rejected": {}}
        return {**counts, "parts": [[item.part.path, PART_ROWS]], "examples": shown}

    items = [PartItem(Part(f"part-{n:032d}.parquet", PART_ROWS)) for n in range(rows // PART_ROWS)]
    with own_peak() as peak:
        made = run_tasks("gather", task, items, in_process)
    assert len(made) == len(items)
    return peak[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    context = multiprocessing.get_context("spawn")
    print("| of | bytes a row |")
    print("|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        with context.Pool(1) as pool:
            parts = tuple(pool.apply(make_indexes, (Path(folder), rows, None)))
        os.environ["RAYEMBED_CACHE"] = str(Path(folder) / "cache")
        for miner in ("first miner", "next miner"):
            with context.Pool(1) as pool:
                for what, size in pool.apply(corpus, (parts,)).items():
                    print(f"| {miner}: {what} | {size / rows:.0f} |")
        with context.Pool(1) as pool:  # of its own: what it frees would stay with the process
            ranked = pool.apply(write_ranks, (rows, Path(folder)))
        steps = {
            "packing clusters": (packing, rows),
            "drawing a sample": (sampling, rows),
            "ranks of the filter": (filtering, *ranked),
            "results of the filter": (results_of_parts, rows),
        }
        for what, (step, *given) in steps.items():
            with context.Pool(1) as pool:
                size = pool.apply(step, (*given, Path(folder)))
                print(f"| driver, {what} | {size / rows:.1f} |")


if __name__ == "__main__":
    main()
