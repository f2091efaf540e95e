"""Bytes a document in processes that mine: peak RSS above what each had before, over made-up
indexes. The first of a machine makes the file that all map, from a million documents on. What a
plan takes tells `data_scale`. Run: python benchmarks/index_memory.py --rows 2000000
"""

import argparse
import multiprocessing
import os
import tempfile
from pathlib import Path

import numpy as np

from counted import start_of_peak, status
from data_scale import make_indexes


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


if __name__ == "__main__":
    main()
