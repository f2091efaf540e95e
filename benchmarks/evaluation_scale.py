"""A retrieval task over millions of documents through an evaluation: time, memory, right or not.

MS MARCO's size by default: 8.8 million documents of some 300 letters and 6,980 queries with one
relevant document each, 1,000 results a query. Texts are made up, and so are their vectors, which
lie in a file: a model that looks them up stands for one that embeds, so that the time is that of
everything else. A query's vector is its document's with noise. The set is read as an own one,
scored by workers, and the best ten documents of a sample of queries compared with brute force over
all vectors.

    python benchmarks/evaluation_scale.py --documents 8841823 --folder /tmp/scale

The folder is kept, and what lies in it is not made again. `--workers 2` works on Ray, whose
processes are not counted in CPU seconds and memory.
"""

import argparse
import json
import os
import resource
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from counted import own_peak

FOUND = 10
NOISE = 5.0
"""Length of the noise that is added to a document's unit vector to make a query's."""

_AT_ONCE = 1 << 17
_FILLER = "the quick brown fox jumps over the lazy dog and runs along the river bank until night "


@dataclass(frozen=True)
class GivenVectors:
    """A model under evaluation whose vectors lie in files, in the order of the texts' numbers."""

    folder: str
    meta: object
    fingerprint: str = "given"
    similarity: str = "cosine"
    stored: object = None
    conditions: dict = field(default_factory=dict)

    def encode_spec(self, task_metadata, prompt_type):
        from rayembed.evaluation.encode_spec import EncodeSpec

        del task_metadata
        return EncodeSpec("document" if prompt_type.value == "document" else "query")

    def shown(self, encode_spec):
        del encode_spec
        return ""

    def load(self, device):
        del device
        files = {role: np.load(f"{self.folder}/{role}.npy", mmap_mode="r") for role in ROLES}

        def embed(texts, encode_spec):
            rows = np.array([int(text.partition(" ")[0]) for text in texts])
            return files[encode_spec.role][rows].astype(np.float32)

        return embed


ROLES = ("document", "query")


def make(folder, documents, queries, width):
    """Files of the set in BEIR's layout and of its vectors."""
    rng = np.random.default_rng(0)
    vectors = np.lib.format.open_memmap(
        folder / "document.npy", "w+", np.float16, (documents, width)
    )
    schema = pa.schema([("_id", pa.string()), ("title", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(folder / "corpus.parquet", schema) as file:
        for first in range(0, documents, _AT_ONCE):
            count = min(_AT_ONCE, documents - first)
            drawn = rng.standard_normal((count, width), dtype=np.float32)
            vectors[first : first + count] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
            numbers = range(first, first + count)
            texts = [f"{n} {_FILLER * (2 + n % 4)}" for n in numbers]
            columns = [[f"d{n}" for n in numbers], [""] * count, texts]
            file.write_table(pa.table(columns, schema))
    relevant = rng.choice(documents, queries, replace=False)
    noise = rng.standard_normal((queries, width), dtype=np.float32)
    noise *= NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
    np.save(folder / "query.npy", (vectors[relevant].astype(np.float32) + noise))
    asked = [json.dumps({"_id": f"q{n}", "text": f"{n} which"}) for n in range(queries)]
    (folder / "queries.jsonl").write_text("\n".join(asked))
    (folder / "qrels").mkdir(exist_ok=True)
    grades = [f"q{n}\td{document}\t1" for n, document in enumerate(relevant)]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(grades))
    np.save(folder / "relevant.npy", relevant)
    (folder / "made").touch()


def brute_force(folder, sample):
    """nDCG@10 of the first queries, by products with all documents."""
    documents = np.load(folder / "document.npy", mmap_mode="r")
    queries = np.load(folder / "query.npy")[:sample]
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    best = np.full((sample, FOUND), -np.inf, np.float32)
    places = np.zeros((sample, FOUND), np.int64)
    for first in range(0, len(documents), _AT_ONCE):
        some = documents[first : first + _AT_ONCE].astype(np.float32)
        some /= np.linalg.norm(some, axis=1, keepdims=True)
        scores = np.concatenate([best, queries @ some.T], axis=1)
        rows = np.arange(first, first + len(some))
        rows = np.concatenate([places, np.broadcast_to(rows, (sample, len(some)))], axis=1)
        kept = np.argpartition(-scores, FOUND, axis=1)[:, :FOUND]
        best, places = (np.take_along_axis(table, kept, axis=1) for table in (scores, rows))
    relevant = np.load(folder / "relevant.npy")[:sample]
    order = np.take_along_axis(places, np.argsort(-best, axis=1), axis=1)
    rank = np.argmax(order == relevant[:, None], axis=1)
    return np.where((order == relevant[:, None]).any(axis=1), 1 / np.log2(rank + 2), 0.0)


@contextmanager
def timed(what, texts):
    """Prints a row: seconds, CPU seconds of this process and those it waited for, its own peak."""
    began, before = time.perf_counter(), _cpu()
    with own_peak() as peak:
        yield
    seconds = time.perf_counter() - began
    print(
        f"| {what} | {seconds:,.1f} | {_cpu() - before:,.1f} | {texts / seconds:,.0f} | "
        f"{peak[0] / 2**20:,.0f} | {peak[0] / texts:.0f} |",
        flush=True,
    )


def _cpu():
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def pool_of(workers, threads):
    """The pool, and how it is called in the table."""
    from rayembed.evaluation.pooled.here import run_shown
    from rayembed.evaluation.pooled.workers import Workers

    asked = Workers(number=workers, cpus=threads)
    if workers == 1:
        return partial(run_shown, workers=asked)
    import ray

    from rayembed.evaluation.pooled.on_ray import run_jobs
    from rayembed.pipeline.local_head import ensure_token

    ensure_token()
    ray.init(address="local", include_dashboard=False, logging_level="ERROR")
    return partial(run_jobs, workers=asked)


def settings():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=8_841_823)
    parser.add_argument("--queries", type=int, default=6980)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--precision", default="float32", choices=["float32", "int8", "binary"])
    parser.add_argument("--keep", action="store_true", help="keep embeddings, as evaluations do")
    parser.add_argument("--sample", type=int, default=100, help="queries of brute force")
    parser.add_argument("--folder", type=Path, required=True)
    return parser.parse_args()


def main():
    given = settings()
    import torch

    from rayembed.config.own_sets import RetrievalSet
    from rayembed.config.small_vectors import StoredVectors
    from rayembed.evaluation.jobs import OF_QUERIES
    from rayembed.evaluation.mteb_model import model_meta
    from rayembed.evaluation.own_set import OwnTask
    from rayembed.evaluation.score import Store, score
    from rayembed.registry.provenance import cpu_told

    torch.set_num_threads(given.threads)
    folder = given.folder.absolute() / f"{given.documents}-{given.queries}-{given.width}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RAYEMBED_CACHE"] = str(folder / "cache")
    if not (folder / "made").exists():
        make(folder, given.documents, given.queries, given.width)
    texts = given.documents + given.queries
    print(f"{cpu_told()}; {given.documents:,} documents of {given.width} dimensions, ", end="")
    print(f"{given.queries:,} queries, embeddings {'kept' if given.keep else 'not kept'}")
    print("| step | seconds | CPU seconds | texts/s | own MiB | bytes a text |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    task = OwnTask(RetrievalSet(name="Scale", path=str(folder)))
    with timed("read and check the set", texts):
        task.load()
    stamp = str(time.time_ns())
    meta, stored = model_meta("given", stamp), StoredVectors(precision=given.precision)
    spec = GivenVectors(str(folder), meta, stored=stored)
    kept = str(folder / "embeddings") if given.keep else None
    store = Store(str(folder / "results" / stamp), kept)
    pool = pool_of(given.workers, given.threads)
    with timed(f"score, {given.workers} × {given.threads}, {given.precision}", texts):
        scored = score(spec, [task], pool, store)
    assert not scored.failed, scored.failed
    (entry,) = scored.tasks[0].result.scores["test"]
    names = sorted(f"q{n}" for n in range(given.queries))
    ours = dict(zip(names, entry[OF_QUERIES], strict=True))
    with timed(f"brute force, {given.sample} queries", texts):
        wanted = brute_force(folder, given.sample)
    found = np.array([ours[f"q{n}"] for n in range(given.sample)])
    print(f"nDCG@10 {scored.scores['Scale']:.6f}; of the first {given.sample} queries ", end="")
    print(f"{found.mean():.6f}, by brute force {wanted.mean():.6f}; ", end="")
    print(f"{(np.abs(found - wanted) > 1e-5).sum()} of them differ by more than 1e-5")


if __name__ == "__main__":
    main()
