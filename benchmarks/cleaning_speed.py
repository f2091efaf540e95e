"""Cleaning against its libraries' own ways, in one run on the same made-up texts, in one process.

Near-duplicates: the whole step (signatures, buckets, exact comparison, listing, all on disk)
against datasketch's `MinHashLSH` in memory, fed text by text with the same n-grams. Overlap: the
lookup of texts in an index of evaluation texts against `bm25s.get_scores` for each text; and of
documents that are mined from, with n-grams and without. Words are drawn by Zipf's law. Run:
python benchmarks/cleaning_speed.py
"""

import argparse
import resource
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

VOCABULARY = 50_000


def texts(count, shortest, longest, seed):
    rng = np.random.default_rng(seed)
    share = 1 / np.arange(1, VOCABULARY + 1)
    lengths = rng.integers(shortest, longest, count)
    drawn = rng.choice(VOCABULARY, lengths.sum(), p=share / share.sum())
    split = np.split(drawn, np.cumsum(lengths)[:-1])
    return [" ".join(f"w{i}" for i in words) for words in split]


def near_duplicates(rows):
    from rayembed.data.engine.index import read_column
    from rayembed.data.engine.parts import ROWS_PER_PART, write_part
    from rayembed.data.engine.work_items import in_process
    from rayembed.data.records import Record
    from rayembed_extras.near_duplicates.find import find_near_duplicates
    from rayembed_extras.near_duplicates.settings import NearDuplicates

    rng = np.random.default_rng(1)
    made = texts(rows * 9 // 10, 30, 120, 0)
    for i in rng.integers(0, len(made), rows - len(made)):  # a tenth are copies, a word changed
        words = made[i].split()
        words[rng.integers(len(words))] = "changed"
        made.append(" ".join(words))
    records = [Record(f"d/{i}", "a question", (text,), "d") for i, text in enumerate(made)]
    config = NearDuplicates(of="positive")
    with tempfile.TemporaryDirectory() as folder:
        parts = [
            write_part(folder, records[i : i + ROWS_PER_PART])
            for i in range(0, rows, ROWS_PER_PART)
        ]
        keep, ids = np.ones(rows, dtype=bool), read_column(parts, "id_hash")
        began = time.perf_counter()
        writer = SimpleNamespace(folder=folder, working_folder=f"{folder}/w", dataset="d")
        gone = find_near_duplicates(config, writer, parts, keep, ids, in_process)
        ours = time.perf_counter() - began
        written = sum(path.stat().st_size for path in Path(folder, "w").rglob("*"))
    began = time.perf_counter()
    theirs = in_memory(made, config)
    seconds = time.perf_counter() - began
    print(f"near-duplicates of {rows:,} texts of 75 words, a tenth of them copies:")
    print(
        f"  rayembed   {ours:.1f} s, {rows / ours:,.0f} texts/s, {len(gone.positions):,} go, "
        f"{written / rows:.0f} bytes a row on disk meanwhile"
    )
    print(
        f"  datasketch {seconds:.1f} s, {rows / seconds:,.0f} texts/s, {theirs:,} go "
        f"(estimated similarity)"
    )


def in_memory(made, config):
    from datasketch import MinHash, MinHashLSH

    from rayembed.data.words import words

    index = MinHashLSH(
        threshold=config.threshold, num_perm=config.permutations, weights=(0.02, 0.98)
    )
    gone = 0
    for number, text in enumerate(made):
        split = words(text)
        sketch = MinHash(config.permutations)
        sketch.update_batch(
            [" ".join(split[i : i + config.ngram]).encode() for i in range(len(split) - 4)]
        )
        gone += bool(index.query(sketch))
        index.insert(number, sketch)
    return gone


def overlap(evaluation, rows):
    import bm25s

    from rayembed.data.cleaning.bm25 import open_index, write_index
    from rayembed.data.words import words

    known = texts(evaluation, 5, 40, 2)
    asked = [*texts(rows * 9 // 10, 5, 120, 3), *(f"{text} more" for text in known[: rows // 10])]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        write_index(folder, [("made up", known)])
        built = time.perf_counter() - began
        index = open_index(folder, 0.8)
        began = time.perf_counter()
        found = sum(match is not None for match in index.match(asked))
        ours = time.perf_counter() - began
    dense = bm25s.BM25(method="lucene")
    dense.index([words(text) for text in known], show_progress=False)
    few = asked[:: max(1, rows // 200)]
    began = time.perf_counter()
    for text in few:
        dense.get_scores(list(dict.fromkeys(words(text)))).max()
    theirs = (time.perf_counter() - began) / len(few)
    print(f"overlap of {rows:,} texts with {evaluation:,} evaluation texts:")
    print(f"  rayembed {rows / ours:,.0f} texts/s, {found:,} found; index built in {built:.1f} s")
    print(f"  bm25s.get_scores {1 / theirs:,.0f} texts/s (over {len(few)})")


def documents(evaluation, rows):
    from rayembed.config.mining import Containment, Overlap
    from rayembed.data.cleaning.overlap import find_in_documents
    from rayembed.data.engine.work_items import in_process
    from rayembed.data.mining.documents import write_documents

    asked = texts(rows, 50, 150, 4)
    print(f"{rows:,} documents of 100 words with {evaluation:,} evaluation texts:")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "known.txt").write_text("\n".join(texts(evaluation, 5, 40, 2)))
        parts = [write_documents(f"{folder}/parts", asked[i : i + 16384]) for i in (0, 16384)]
        for contained in (None, Containment()):
            config = Overlap(tasks=("known.txt",), contained=contained)
            times = []
            for some in (parts[:1], parts):
                began = time.process_time()
                where = (f"{folder}/{contained}{len(some)}", f"{folder}/{contained}{len(some)}")
                find_in_documents(*where, "d", config, folder, some, in_process)
                times.append(time.process_time() - began)
            # What the second part adds: the index is made and read in both.
            rate = parts[1].rows / (times[1] - times[0])
            print(f"  {contained or 'without n-grams'}: {rate:,.0f} documents a second of CPU time")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--evaluation", type=int, default=100_000)
    parser.add_argument("--overlap-rows", type=int, default=20_000)
    parser.add_argument("--documents", type=int, default=32_768, help="more than 16,384")
    args = parser.parse_args()
    near_duplicates(args.rows)
    overlap(args.evaluation, args.overlap_rows)
    documents(args.evaluation, args.documents)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"largest resident size of this process: {peak:.1f} GiB")


if __name__ == "__main__":
    main()
