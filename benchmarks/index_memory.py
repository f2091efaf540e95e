"""Memory that grows with the data: bytes a row in the driver that plans, bytes a document in a
process that mines. Peak RSS above what the process had before, over made-up indexes in the layout
on disk; each part in a process of its own. Run: python benchmarks/index_memory.py --rows 1000000
"""

import argparse
import multiprocessing
import pickle
import tempfile
from pathlib import Path

import numpy as np

BATCH = 512


def make_indexes(folder, rows):
    """Parts that have an index and no rows."""
    from rayembed.assets.array_files import save_arrays
    from rayembed.data.parts import ROWS_PER_PART, Part, _index_path

    rng = np.random.default_rng(0)
    parts = []
    for first in range(0, rows, ROWS_PER_PART):
        count = min(ROWS_PER_PART, rows - first)
        path = str(folder / f"part-{first:012d}.parquet")
        save_arrays(
            _index_path(path),
            id_hash=rng.integers(-(2**62), 2**62, count),
            query_hash=rng.integers(-(2**62), 2**62, count),
            num_negatives=np.full(count, 7, np.int32),
            in_batch=np.ones(count, bool),
            language_hash=np.zeros(count, np.int64),
        )
        parts.append(Part(path, count))
    return tuple(parts)


def plan(parts):
    """Peak bytes of a plan of one pass over the rows, after each of its steps in the driver."""
    from rayembed.data.plan.order import PlanConfig, order_rows, usable_rows
    from rayembed.data.plan.write import _all_places

    rows = sum(part.rows for part in parts)
    config = PlanConfig({"d": 1.0}, BATCH, 7, rows // BATCH, 0, in_batch_negatives=True)
    found, before = {}, start_of_peak()
    usable = usable_rows({"d": parts}, config, {})
    found["usable rows"] = peak() - before
    order = order_rows(usable, config)
    found["their order"] = peak() - before
    places = _all_places(usable, order, {"d": parts})
    found["their places"] = peak() - before
    sent = [pickle.dumps(place) for place in places]  # as Ray Data is given them
    found["as sent to tasks"] = peak() - before
    assert sent
    return found


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
    found = {"at the peak": peak() - before, "kept": status("VmRSS") - before}
    assert made.starts[-1] == sum(part.rows for part in parts)
    return found


def start_of_peak():
    """Bytes that the process has, from which its peak counts anew."""
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def peak():
    return status("VmHWM")


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    context = multiprocessing.get_context("spawn")
    print("| of | bytes a row |")
    print("|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        with context.Pool(1) as pool:
            parts = pool.apply(make_indexes, (Path(folder), rows))
        for name, work in (("plan", plan), ("miner", corpus)):
            with context.Pool(1) as pool:
                for what, size in pool.apply(work, (parts,)).items():
                    print(f"| {name}: {what} | {size / rows:.0f} |")


if __name__ == "__main__":
    main()
