"""MTEB(eng, v1), all 56 tasks, by plain mteb and by rayembed's workers in one sitting.

The unmodified tasks read made-up data in the layouts of their repositories from a hub on loopback,
each set `--times` as large as in the tests (there it has 30 documents). Both sides take
all-MiniLM-L6-v2 in float32. Sides: sentence-transformers through `mteb.evaluate` with its defaults
(batches of 32) and two threads; ours without Ray, one worker with two threads; ours on Ray with one
worker of two threads, and with two of one. Before the first clock starts all data are in the cache
of `datasets`, from where every side reads them; before its own, each side has its libraries
imported and its model loaded. No embedding is kept, as the tasks of a type have equal texts.

    python benchmarks/evaluation_mteb.py --times 20

CPU seconds are those of all processes below this one, Ray's own among them, without the hub's.
"""

import argparse
import os
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from loopback import hub_beside
from processes import cpu_of_all

THREADS = 2


@dataclass(frozen=True)
class Begins:
    """A job that only has its process begin and import what mteb does for its first task."""

    name: str
    num_texts: int = 0

    def run(self, model):
        import sentence_transformers  # noqa: F401

        time.sleep(1.0)  # so that each process takes one
        return {}


def repositories(tasks, times):
    """What the hub serves."""
    from mteb_hub import repositories_of, revisions_of

    return repositories_of(tasks, times), revisions_of(tasks)


@contextmanager
def plain(folder, factories):
    """A function that gives the main scores of mteb with sentence-transformers, and how many texts
    it embeds.
    """
    import mteb
    import torch
    from sentence_transformers import SentenceTransformer

    from rayembed.evaluation.averages import main_score

    class Counted(SentenceTransformer):
        texts = 0

        def encode(self, inputs, *args, **more):
            self.texts += 1 if isinstance(inputs, str) else len(inputs)
            return super().encode(inputs, *args, **more)

    model = Counted(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    model.encode(["warm up"])
    model.texts = 0

    def run():
        tasks = [factory.load() for factory in factories]
        found = mteb.evaluate(model, tasks, cache=None, co2_tracker=False, show_progress_bar=False)
        results = {result.task_name: result for result in found.task_results}
        return {f.name: main_score(f, results[f.name]) for f in factories}, model.texts

    yield run


@contextmanager
def ours_here(spec, factories):
    """The same by one worker in this process."""
    from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
    from rayembed.evaluation.pooled.here import finish
    from rayembed.evaluation.pooled.model import PooledModel
    from rayembed.evaluation.pooled.pool import OneWorker

    worker = OneWorker(EncodingWorker(spec, None, "cpu"))

    def pool(jobs, spec, _store):
        for job in jobs:
            yield finish(job, partial(PooledModel, spec, worker))

    yield lambda: scores_of(spec, factories, pool)


@contextmanager
def ours_on_ray(spec, factories, number, threads):
    """The same by `number` workers on Ray."""
    from rayembed.evaluation.pooled.on_ray import run_on_workers, workers_on_ray
    from rayembed.evaluation.pooled.pool import Workers
    from rayembed.evaluation.pooled.progress import ProgressLog

    workers = Workers(number=number, cpus=threads, tasks_at_once=number + 1)
    with workers_on_ray(spec, None, workers) as handles:

        def pool(jobs, spec, _store):
            return run_on_workers(jobs, spec, workers, handles, ProgressLog(jobs))

        for done in pool([Begins(str(n)) for n in range(workers.runners)], spec, None):
            assert done.error is None, done.error
        yield lambda: scores_of(spec, factories, pool)


def scores_of(spec, factories, pool):
    """Main scores by an evaluation of rayembed, with its result files."""
    from rayembed.evaluation.score import Store, score

    with tempfile.TemporaryDirectory() as folder:
        scored = score(spec, factories, pool, Store(folder))
    assert not scored.failed, scored.failed
    return scored.scores, None


def measured(name, side, first, hub):
    """The scores of a side, its seconds and its row of the table, which is printed."""
    with side as run, cpu_of_all(without=(hub,)) as used:
        began = time.perf_counter()
        scores, texts = run()
        wall = time.perf_counter() - began
    found = {"scores": scores, "texts": texts, "wall": wall, "cpu": used.seconds}
    first = first or found
    apart = {task: abs(scores[task] - first["scores"][task]) for task in first["scores"]}
    most = max(apart, key=apart.get)
    print(
        f"| {name} | {wall:,.1f} | {wall / first['wall']:.2f} | {used.seconds:,.1f} | "
        f"{used.seconds / first['cpu']:.2f} | {apart[most]:.1e} ({most}) |",
        flush=True,
    )
    return found


def settings(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="size of the sets (1: the tests')")
    parser.add_argument("--tasks", nargs="+", help="some of the benchmark's (default: all)")
    parser.add_argument("--model", help="a folder (default: all-MiniLM-L6-v2 of the sample)")
    return parser.parse_args(arguments)


def main(arguments=None):
    given = settings(arguments)
    os.environ.setdefault("RAY_worker_niceness", "0")  # as jobs have it; Ray's own is 15
    import datasets
    import torch

    from rayembed.assets.resolver import resolve_model
    from rayembed.config.evaluation import ModelUnderTest
    from rayembed.evaluation.benchmarks import ENGLISH_V1, benchmark_tasks
    from rayembed.evaluation.plan import pieces
    from rayembed.evaluation.run_scores import make_spec
    from rayembed.recipes.sample import MINILM
    from rayembed.registry.provenance import cpu_summary

    datasets.disable_progress_bars()
    known = {factory.name: factory for factory in benchmark_tasks(ENGLISH_V1)}
    factories = [known[name] for name in given.tasks or known]
    reference = given.model or MINILM
    folder, tasks = resolve_model(reference), [factory.load() for factory in factories]
    with (
        tempfile.TemporaryDirectory() as cache,
        hub_beside(partial(repositories, tasks, given.times), cache) as hub,
    ):
        torch.set_num_threads(THREADS)
        began = time.perf_counter()
        for task in [piece.load() for factory in factories for piece in pieces(factory)]:
            task.load_data()
            task.unload_data()
        loaded = time.perf_counter() - began
        print(f"{cpu_summary()}; {len(factories)} tasks, sets {given.times} times as large\n")
        print("| side | seconds | of the first | CPU seconds | of the first | largest difference |")
        print("| --- | ---: | ---: | ---: | ---: | --- |")
        name = "mteb + sentence-transformers"
        first = measured(name, plain(folder, factories), None, hub)
        spec = make_spec(ModelUnderTest(reference=reference, dtype="float32"))
        here = ours_here(spec, factories)
        measured("rayembed, without Ray, 1 × 2 threads", here, first, hub)
        with ray_of_two():
            for number, threads in ((1, 2), (2, 1)):
                side = ours_on_ray(spec, factories, number, threads)
                measured(f"rayembed on Ray, {number} × {threads} thread(s)", side, first, hub)
    print(
        f"\n{first['texts']:,} texts by mteb's own count of calls, {loaded:.1f} s to load all data"
    )


@contextmanager
def ray_of_two():
    """A Ray of two CPUs."""
    import ray

    from rayembed.pipeline.run.on_ray import ensure_token

    ensure_token()  # Ray's own would be readable by others
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        yield
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
