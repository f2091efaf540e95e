"""An evaluation over workers against plain `mteb.evaluate`, in one run on the same tasks.

The six tasks of the Wikipedia sample (retrieval, classification, clustering, pair classification,
STS) and all-MiniLM-L6-v2. Sides: sentence-transformers through mteb with all its defaults (float32,
batches of 32), the same in bfloat16 where this CPU has units for it, ours in these types by one
worker with two threads and by two with one each, and for the scaling ours by one worker with one
thread. When the clock starts, every side has its libraries imported, its model loaded and its tasks
made, and no embedding kept.
Differences of main scores are against the first side.
Run: python benchmarks/evaluation_speed.py --documents 1500 --queries 500
"""

import argparse
import os
import pickle
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch


def tasks_of(settings):
    from rayembed.evaluation.own_set import OwnTask
    from rayembed.recipes.sample import own_sets

    return [OwnTask(own) for own in own_sets(settings)]


def plain(folder, settings, dtype):
    """Seconds and main scores of mteb with sentence-transformers."""
    import mteb
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), model_kwargs={"dtype": dtype})
    model.encode(["warm up"])
    tasks = [factory.load() for factory in tasks_of(settings)]
    began = time.perf_counter()
    found = mteb.evaluate(model, tasks, cache=None, co2_tracker=False, show_progress_bar=False)
    seconds = time.perf_counter() - began
    return seconds, {r.task_name: r.get_score() for r in found.task_results}


@dataclass(frozen=True)
class Made:
    """A task that lies on a disk, as a downloaded one would."""

    name: str
    num_texts: int
    file: str

    def load(self):
        return pickle.loads(Path(self.file).read_bytes())


@dataclass(frozen=True)
class Nothing:
    """A job that only has its process begin and import what all jobs need."""

    name: str
    num_texts: int = 0

    def run(self, model):
        time.sleep(1.0)  # so that each process takes one
        return {}


def ours(reference, settings, dtype, number, threads):
    """As `plain`, over `number` workers."""
    from rayembed.config.evaluation import ModelUnderTest
    from rayembed.evaluation.jobs import TASK_RESULT, ScoreTask
    from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
    from rayembed.evaluation.pooled.on_ray import run_on_workers, workers_on_ray
    from rayembed.evaluation.pooled.pool import Workers
    from rayembed.evaluation.pooled.progress import ProgressLog
    from rayembed.evaluation.run_scores import make_spec

    spec = make_spec(ModelUnderTest(reference=reference, dtype=dtype))
    workers = Workers(number=number, cpus=threads, tasks_at_once=number + 1)
    with tempfile.TemporaryDirectory() as folder:
        store = EmbeddingStore(f"{folder}/kept")
        jobs = []
        for factory in tasks_of(settings):
            file = Path(folder) / factory.name
            file.write_bytes(pickle.dumps(factory.load()))
            jobs.append(ScoreTask(Made(factory.name, factory.num_texts, str(file))))
        with workers_on_ray(spec, store, workers) as handles:
            idle = [Nothing(str(n)) for n in range(workers.runners)]
            list(run_on_workers(idle, spec, workers, handles, ProgressLog(idle)))
            began = time.perf_counter()
            done = list(run_on_workers(jobs, spec, workers, handles, ProgressLog(jobs)))
            seconds = time.perf_counter() - began
    for one in done:
        assert one.error is None, one.error
    import mteb

    results = [mteb.TaskResult.from_dict(one.outcome[TASK_RESULT]) for one in done]
    return seconds, {r.task_name: r.get_score() for r in results}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1500)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--max-length", type=int, default=128)
    args = parser.parse_args()
    import ray

    from rayembed.assets.resolver import resolve_model
    from rayembed.machine.hardware import auto_precision
    from rayembed.pipeline.run.on_ray import ensure_token
    from rayembed.recipes.sample import MINILM, ScoreSizes
    from rayembed.registry.provenance import cpu_summary

    settings = ScoreSizes(
        held_out=args.documents,
        documents=args.documents,
        queries=args.queries,
        max_length=args.max_length,
    )
    folder = resolve_model(MINILM)
    torch.set_num_threads(2)
    sides = {
        "mteb + sentence-transformers, float32": lambda: plain(folder, settings, torch.float32),
    }
    halves = auto_precision("cpu").dtype == "bfloat16"
    if halves:
        sides["mteb + sentence-transformers, bfloat16"] = lambda: plain(
            folder, settings, torch.bfloat16
        )
    os.environ.setdefault("RAY_worker_niceness", "0")  # as jobs have it; Ray's own is 15
    ensure_token()  # Ray's own would be readable by others
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    for dtype in ("float32", "bfloat16")[: 1 + halves]:
        for number, threads in ((1, 1), (1, 2), (2, 1)):
            name = f"rayembed, {dtype}, {number} × {threads} thread(s)"
            sides[name] = lambda d=dtype, n=number, t=threads: ours(MINILM, settings, d, n, t)
    print(f"{cpu_summary()}, fast in {auto_precision('cpu')}")
    print(f"{args.documents} documents, {args.queries} queries, six tasks")
    first_seconds, first = None, None
    for name, run in sides.items():
        seconds, scores = run()
        first_seconds, first = first_seconds or seconds, first or scores
        apart = {task: scores[task] - first[task] for task in first}
        shown = ", ".join(f"{task} {d:+.1e}" for task, d in apart.items() if abs(d) > 1e-6)
        ratio = first_seconds / seconds
        print(f"{name:42} {seconds:7.1f} s  {ratio:5.2f}x  {shown or 'same'}", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
