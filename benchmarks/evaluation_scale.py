"""A retrieval task over millions of documents through an evaluation: time, memory, right or not.

MS MARCO's size by default: 8.8 million documents of some 300 letters and 6,980 queries with one
relevant document each, 1,000 results a query. Texts are made up, and so are their vectors, which
lie in a file: a model that looks them up stands for one that embeds, so that the time is that of
everything else. A query's vector is its document's with noise. The set is read as an own one,
scored by workers, and the best ten documents of a sample of queries compared with brute force over
all vectors.

    python benchmarks/evaluation_scale.py --documents 8841823 --folder /tmp/scale

`--air-bench` is a data set of AIR-Bench 24.05 in its place, of the size of qa's Wikipedia in
English by default: 1,012,092 documents and 345 queries of the development split with labels, read
as JSON Lines from a hub on loopback in a process of its own, then scored by a whole evaluation with
its result file, in which the sample of queries is looked up.

    python benchmarks/evaluation_scale.py --air-bench --folder /tmp/scale

The folder is kept, and what lies in it is not made again. `--workers 2` works on Ray, whose
processes are not counted in CPU seconds and memory.
"""

import argparse
import json
import os
import resource
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from counted import own_peak
from loopback import hub_beside

MS_MARCO_SIZE = 8_841_823, 6980
AIR_BENCH_SIZE = 1_012_092, 345
"""Documents and queries."""
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
        from rayembed.evaluation.model_spec import EncodeSpec

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


def make_vectors(folder, documents, queries, width):
    """Files of the vectors, and of each query's relevant document."""
    rng = np.random.default_rng(0)
    vectors = np.lib.format.open_memmap(
        folder / "document.npy", "w+", np.float16, (documents, width)
    )
    for first in range(0, documents, _AT_ONCE):
        count = min(_AT_ONCE, documents - first)
        drawn = rng.standard_normal((count, width), dtype=np.float32)
        vectors[first : first + count] = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    relevant = rng.choice(documents, queries, replace=False)
    noise = rng.standard_normal((queries, width), dtype=np.float32)
    noise *= NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
    np.save(folder / "query.npy", (vectors[relevant].astype(np.float32) + noise))
    np.save(folder / "relevant.npy", relevant)


def document(number):
    """Text of a document; its number names its vector."""
    return f"{number} {_FILLER * (2 + number % 4)}"


def make_set(folder, documents, relevant):
    """Files of the set in BEIR's layout."""
    schema = pa.schema([("_id", pa.string()), ("title", pa.string()), ("text", pa.string())])
    with pq.ParquetWriter(folder / "corpus.parquet", schema) as file:
        for first in range(0, documents, _AT_ONCE):
            numbers = range(first, min(first + _AT_ONCE, documents))
            columns = [[f"d{n}" for n in numbers], [""] * len(numbers), [*map(document, numbers)]]
            file.write_table(pa.table(columns, schema))
    asked = [json.dumps({"_id": f"q{n}", "text": f"{n} which"}) for n in range(len(relevant))]
    (folder / "queries.jsonl").write_text("\n".join(asked))
    (folder / "qrels").mkdir(exist_ok=True)
    grades = [f"q{n}\td{found}\t1" for n, found in enumerate(relevant)]
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "\n".join(grades))


def make_data_set(folder, documents, relevant):
    """Files of the data set as AIR-Bench has them, JSON Lines."""
    numbers = range(len(relevant))
    rows = {
        "corpus": ({"id": f"d{n}", "text": document(n)} for n in range(documents)),
        "queries": ({"id": f"q{n}", "text": f"{n} which"} for n in numbers),
        "qrels": ({"qid": f"q{n}", "docid": f"d{relevant[n]}", "relevance": 1} for n in numbers),
    }
    for name, of_file in rows.items():
        with (folder / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in of_file)


def data_set():
    """What the catalogue says of the data set."""
    from rayembed_extras.air_bench.catalogue import air_bench_datasets

    asked = {"tasks": ["qa"], "domains": ["wiki"], "languages": ["en"], "splits": ["dev"]}
    (found,) = air_bench_datasets("AIR-Bench_24.05", **asked)
    return found


def repositories(folder):
    """What the hub serves, and no revisions of its own."""
    from air_bench_hub import card

    about = data_set()
    splits = {
        "corpus": (about.repository, about.corpus_split),
        "queries": (about.repository, about.queries_split("dev")),
        "qrels": (about.labels_repository, about.labels_split("dev")),
    }
    files = {}
    for name, (repository, split) in splits.items():
        path = f"{about.version}/{about.name}/{name}.jsonl"
        of_repository = files.setdefault(repository, {"listed": []})
        of_repository[path] = (folder / f"{name}.jsonl").read_bytes()
        of_repository["listed"].append({"split": split, "path": path})
    for of_repository in files.values():
        of_repository["README.md"] = card({about.version: of_repository.pop("listed")})
    return files, {}


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
    from rayembed.evaluation.pooled.pool import Workers

    asked = Workers(number=workers, cpus=threads)
    if workers == 1:
        return partial(run_shown, workers=asked)
    import ray

    from rayembed.evaluation.pooled.on_ray import run_jobs
    from rayembed.pipeline.run.on_ray import ensure_token

    ensure_token()
    ray.init(address="local", include_dashboard=False, logging_level="ERROR")
    return partial(run_jobs, workers=asked)


def settings(arguments):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--air-bench", action="store_true", help="a data set of AIR-Bench")
    parser.add_argument("--documents", type=int, help="default: 8,841,823; AIR-Bench: 1,012,092")
    parser.add_argument("--queries", type=int, help="default: 6,980; AIR-Bench: 345")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="of each worker")
    parser.add_argument("--precision", default="float32", choices=["float32", "int8", "binary"])
    parser.add_argument("--keep", action="store_true", help="keep embeddings, as evaluations do")
    parser.add_argument("--sample", type=int, default=100, help="queries of brute force")
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args(arguments)
    documents, queries = AIR_BENCH_SIZE if given.air_bench else MS_MARCO_SIZE
    given.documents, given.queries = given.documents or documents, given.queries or queries
    return given


def scored_set(given, folder, spec, store):
    """Main score of the own set, and nDCG@10 of the first queries."""
    from rayembed.config.own_sets import RetrievalSet
    from rayembed.evaluation.own_set import OwnTask
    from rayembed.evaluation.score import score
    from rayembed.results.scores import OF_QUERIES

    texts = given.documents + given.queries
    task = OwnTask(RetrievalSet(name="Scale", path=str(folder)))
    with timed("read and check the set", texts):
        task.load()
    pool = pool_of(given.workers, given.threads)
    with timed(shown(given), texts):
        scored = score(spec, [task], pool, store)
    assert not scored.failed, scored.failed
    (entry,) = scored.tasks[0].result.scores["test"]
    names = sorted(f"q{n}" for n in range(given.queries))
    ours = dict(zip(names, entry[OF_QUERIES], strict=True))
    return scored.scores["Scale"], np.array([ours[f"q{n}"] for n in range(given.sample)])


def scored_data_set(given, folder, spec, store):
    """The same of the data set of AIR-Bench."""
    from rayembed.evaluation.score import score
    from rayembed_extras.air_bench.hub_data import load_data, load_labels
    from rayembed_extras.air_bench.job import AIR_BENCH_RESULT, AirBenchJob
    from rayembed_extras.air_bench.results import AirBenchResults

    texts, found = given.documents + given.queries, []
    with (
        tempfile.TemporaryDirectory(dir=folder) as cache,
        hub_beside(partial(repositories, folder), cache),
    ):
        job = AirBenchJob(data_set(), f"{store.results}/air-bench", cache=f"{cache}/arrow")
        with timed("read from the hub", texts):
            load_data(job.dataset, job.cache)
            load_labels(job.dataset, job.cache)
        pool = pool_of(given.workers, given.threads)
        with timed(shown(given), texts):
            score(spec, [], pool, store, beside=[job], on_done=found.append)
    (done,) = found
    assert done.error is None, done.error
    outcome = done.outcome[AIR_BENCH_RESULT]
    made = AirBenchResults.of(job.folder, job.dataset.version, outcome["retriever"])
    results = json.loads(made.read(job.dataset, "dev"))["search_results"]
    gains = []
    for n, document in enumerate(np.load(folder / "relevant.npy")[: given.sample]):
        best = list(results[f"q{n}"])[:FOUND]
        rank = best.index(f"d{document}") if f"d{document}" in best else np.inf
        gains.append(1 / np.log2(rank + 2))
    return outcome["scores"]["dev"]["ndcg_at_10"], np.array(gains)


def shown(given):
    """What is scored, and how."""
    return f"score, {given.workers} × {given.threads}, {given.precision}"


def main(arguments=None):
    given = settings(arguments)
    import torch

    from rayembed.config.types import StoredVectors
    from rayembed.evaluation.model_spec import model_meta
    from rayembed.evaluation.score import Store
    from rayembed.registry.provenance import cpu_summary

    torch.set_num_threads(given.threads)
    kind = "air-bench-" if given.air_bench else ""
    folder = given.folder.absolute() / f"{kind}{given.documents}-{given.queries}-{given.width}"
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["RAYEMBED_CACHE"] = str(folder / "cache")
    if not (folder / "made").exists():
        make_vectors(folder, given.documents, given.queries, given.width)
        make_texts = make_data_set if given.air_bench else make_set
        make_texts(folder, given.documents, np.load(folder / "relevant.npy"))
        (folder / "made").touch()
    print(f"{cpu_summary()}; {given.documents:,} documents of {given.width} dimensions, ", end="")
    print(f"{given.queries:,} queries, embeddings {'kept' if given.keep else 'not kept'}")
    print("| step | seconds | CPU seconds | texts/s | own MiB | bytes a text |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    stamp = str(time.time_ns())
    meta, stored = model_meta("given", stamp), StoredVectors(precision=given.precision)
    spec = GivenVectors(str(folder), meta, stored=stored)
    kept = str(folder / "embeddings") if given.keep else None
    store = Store(str(folder / "results" / stamp), kept)
    scored = scored_data_set if given.air_bench else scored_set
    mean, found = scored(given, folder, spec, store)
    with timed(f"brute force, {given.sample} queries", given.documents + given.queries):
        wanted = brute_force(folder, given.sample)
    print(f"nDCG@10 {mean:.6f}; of the first {given.sample} queries ", end="")
    print(f"{found.mean():.6f}, by brute force {wanted.mean():.6f}; ", end="")
    print(f"{(np.abs(found - wanted) > 1e-5).sum()} of them differ by more than 1e-5")


if __name__ == "__main__":
    main()
