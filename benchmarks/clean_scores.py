"""What clean scores cost: all tasks of MTEB(eng, v2) against a batch plan, in one process.

    python benchmarks/clean_scores.py [--scale 0.1] [--rows 4096] [--hub | --corpus 1000000]

Texts are made up: of every task as many as mteb has counted, of their mean length, words drawn by
Zipf's law; the plan has as many rows as named, each with a query, a positive and seven negatives,
and a hundredth of the queries. With --hub the tasks are read from the tests' hub on loopback
instead, through mteb and `datasets`, with the few texts that it has. With --corpus one search over
so many made-up passages, in a file of Arrow, is read, and memory is that of the process without
mapped files.
"""

import argparse
import resource
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

BENCHMARK = "MTEB(eng, v2)"
VOCABULARY = 200_000
CHARACTERS_OF_A_WORD = 6.0
NEGATIVES = 7


class Texts:
    """Made-up texts of a mean length in characters."""

    def __init__(self, seed=0):
        share = 1 / np.arange(1, VOCABULARY + 1)
        self._random = np.random.default_rng(seed)
        self._ends = np.cumsum(share / share.sum())
        letters = np.array(list("etaoinshrdlu"))
        self._words = ["".join(self._random.choice(letters, 4 + n % 4)) for n in range(VOCABULARY)]

    def make(self, number, characters):
        """`number` texts, a block at a time."""
        words = max(int(characters / CHARACTERS_OF_A_WORD), 1)
        at_once = max(2_000_000 // words, 1)
        for start in range(0, number, at_once):
            size = min(at_once, number - start)
            drawn = np.searchsorted(self._ends, self._random.random((size, words)))
            drawn = np.minimum(drawn, VOCABULARY - 1).tolist()
            yield [" ".join([self._words[word] for word in row]) for row in drawn]


def sizes():
    """Task, side, number of texts and mean characters, by mteb's statistics."""
    import mteb

    for task in mteb.get_benchmark(BENCHMARK).tasks:
        found = (task.metadata.descriptive_stats or {})[task.eval_splits[0]]
        if "hf_subset_descriptive_stats" in found:
            found = found["hf_subset_descriptive_stats"][task.hf_subsets[0]]
        for side, told in found.items():
            if isinstance(told, dict) and "unique_texts" in told:
                yield task.metadata.name, side, told["unique_texts"], told["average_text_length"]


def write_plan_of(folder, texts, rows, queries):
    """A batch plan with made-up rows, some with test queries."""
    from rayembed.data.engine.parts import ROWS_PER_PART, write_part
    from rayembed.data.plan.order import PlanConfig
    from rayembed.data.plan.write import write_plan
    from rayembed.data.records import Negative, Record

    asked = [text for block in texts.make(rows, 60) for text in block]
    asked[: len(queries)] = queries
    documents = [text for block in texts.make(rows * (NEGATIVES + 1), 500) for text in block]
    records = [
        Record(
            id=str(n),
            query=query,
            positives=(documents[n],),
            negatives=tuple(map(Negative, documents[rows + n * NEGATIVES :][:NEGATIVES])),
            dataset="pairs",
        )
        for n, query in enumerate(asked)
    ]
    places = range(0, rows, ROWS_PER_PART)
    parts = {
        "pairs": [write_part(f"{folder}/parts", records[i : i + ROWS_PER_PART]) for i in places]
    }
    config = PlanConfig({"pairs": 1.0}, 64, NEGATIVES, 0, 0, True, key="s", epochs=1)
    return write_plan(f"{folder}/plan", parts, config).folder


def in_memory():
    """GiB of the process without mapped files."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("RssAnon")) / 2**20


class Peak:
    """Highest memory in a block beyond that at its start, in GiB."""

    def __enter__(self):
        self.gib, self._start, self._over = 0.0, in_memory(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._over.wait(0.02):
            self.gib = max(self.gib, in_memory() - self._start)

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()


def over_one_corpus(folder, passages, rows):
    from datasets import Dataset

    from rayembed_extras.clean_scores.overlap import ScoredPart
    from rayembed_extras.clean_scores.scored_texts import TaskPart
    from rayembed_extras.clean_scores.search import TestTexts

    def made():
        texts = (text for block in Texts().make(passages, 370) for text in block)
        yield from ({"id": str(n), "text": text} for n, text in enumerate(texts))

    corpus = Dataset.from_generator(made, cache_dir=f"{folder}/cache")
    queries = [text for block in Texts(1).make(5000, 60) for text in block]
    plan = write_plan_of(folder, Texts(2), rows, [*queries[:40], *corpus[: rows // 10]["text"]])
    names = [str(n) for n in range(len(queries))]
    positives = [[name] for name in names]
    task = TaskPart("test", "s", names, [(q,) for q in queries], corpus, positives)
    metadata = SimpleNamespace(name="passages", main_score="ndcg_at_10")
    began = time.perf_counter()
    with Peak() as peak:
        texts = TestTexts([plan], f"{folder}/index")
        part = ScoredPart.of(metadata, task, {"main_score": 0.5}, texts)
        texts.search()
        part.mark(texts.matches)
    seen, there = (part.ways > 0).sum(), (part.seen_documents > 0).sum()
    told(
        f"{passages:,} passages",
        began,
        f"; without mapped files {peak.gib:.2f} GiB; seen: {seen:,} queries, {there:,} passages",
    )


def told(what, began, more=""):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {time.perf_counter() - began:,.1f} s, peak {peak:.2f} GiB{more}", flush=True)


def at_published_sizes(folder, scale, rows):
    from rayembed_extras.clean_scores.search import TestTexts

    texts, making = Texts(), 0.0
    counted = list(sizes())
    queries = [text for block in Texts(1).make(rows // 100, 60) for text in block]
    plan = write_plan_of(folder, Texts(2), rows, queries)
    tests = TestTexts([plan], f"{folder}/index")
    tests.add(queries)
    began, characters = time.perf_counter(), 0
    for _, side, number, mean in counted:
        documents, start = side.startswith("documents"), time.perf_counter()
        for block in texts.make(max(int(number * scale), 1), mean):
            making += time.perf_counter() - start
            tests.add_documents(block) if documents else tests.add(block)
            characters += sum(map(len, block))
            start = time.perf_counter()
    tests.search()
    seconds, found = time.perf_counter() - began - making, tests.matches
    print(f"{tests.count:,} texts, {characters / 1e6:,.0f} million characters")
    what = f"searched in a plan of {rows:,} rows at scale {scale:g}"
    told(what, began + making, f"; {(found > 0).sum():,} texts are there")
    print(f"{seconds:,.0f} s without making texts")


def repositories(tasks):
    """What the hub serves: sixteen times the usual texts, as clustering draws 2,048."""
    from mteb_hub import repositories_of, revisions_of

    return repositories_of(tasks, 16), revisions_of(tasks)


def on_the_hub(folder, rows):
    from loopback import hub_beside
    from rayembed.errors import AssetError
    from rayembed.evaluation.benchmarks import benchmark_tasks
    from rayembed_extras.clean_scores.scored_texts import task_texts
    from rayembed_extras.clean_scores.search import TestTexts

    tasks = benchmark_tasks(BENCHMARK)
    plan = write_plan_of(folder, Texts(), rows, [])
    tests, unread = TestTexts([plan], f"{folder}/index"), []
    with hub_beside(partial(repositories, [task.load() for task in tasks]), f"{folder}/hub"):
        began = time.perf_counter()
        for factory in tasks:
            try:
                for part in task_texts(factory.load()):
                    flat = [text for item in part.items for text in item]
                    tests.add(flat)
                    for _, block in part.document_blocks():
                        tests.add_documents(block)
            except AssetError as error:
                unread.append(str(error))
        told(
            f"read {len(tasks) - len(unread)} tasks from the hub", began, f"; {tests.count:,} texts"
        )
    print("\n".join(unread))
    began = time.perf_counter()
    tests.search()
    told(f"searched in a plan of {rows:,} rows", began)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the published sizes")
    parser.add_argument("--rows", type=int, default=8192, help="of the plan")
    parser.add_argument("--hub", action="store_true", help="read the tests' hub on loopback")
    parser.add_argument("--corpus", type=int, metavar="PASSAGES", help="one search over so many")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if asked.hub:
            on_the_hub(Path(folder), asked.rows)
        elif asked.corpus:
            over_one_corpus(folder, asked.corpus, asked.rows)
        else:
            at_published_sizes(folder, asked.scale, asked.rows)


if __name__ == "__main__":
    main()
