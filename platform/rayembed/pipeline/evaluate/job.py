"""The evaluation job: from its arguments to scores, exit codes and messages."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from rayembed.assets.cache import cache_folder
from rayembed.config.document import fingerprint, published_values
from rayembed.config.evaluation import EvaluationRun, ResultsPlace
from rayembed.config.named_benchmarks import (
    further_benchmark_names,
    job_benchmark,
    job_benchmark_names,
    named_benchmarks,
)
from rayembed.config.override import override
from rayembed.config.own_sets import Scores
from rayembed.config.settings import parse
from rayembed.errors import ConfigError, TrackingError
from rayembed.pipeline.job import Job, JobContext, Option, Reader, names_in, option
from rayembed.pipeline.storage import absolute_storage
from rayembed.registry.provenance import collect_provenance
from rayembed.registry.run_folder import flatten
from rayembed.registry.tracking import Tracker

if TYPE_CHECKING:
    from rayembed.pipeline.evaluate.evaluate import EvaluationResult


def own_set(text: str) -> dict[str, str]:
    """Parse `name=folder` into settings of an own set; a folder alone also gives the name."""
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text.rstrip("/")).absolute().resolve().name, text
    return {"name": name, "path": path}


def score_options(benchmark: str) -> tuple[Option, ...]:
    """Command-line options that select the tasks to score.

    Args:
        benchmark: help text of `--benchmark`.
    """
    return (
        option("--benchmark NAME", benchmark, sets="benchmarks", often=True),
        option("--tasks A,B", "single tasks of mteb", sets="tasks", type=names_in),
        option("--languages eng,deu", "subsets in these only", sets="languages", type=names_in),
        option(
            "--own-set [NAME=]FOLDER",
            "your own corpus, queries and qrels (BEIR's layout) as a task",
            sets="own_sets",
            often=True,
            type=own_set,
        ),
    )


def _evaluate(run: EvaluationRun, context: JobContext) -> int:
    check_task_names(run)
    # torch, mteb and Ray; the rest of the job needs none of them.
    from rayembed.pipeline.evaluate.evaluate import evaluate, with_findings
    from rayembed.pipeline.evaluate.report import print_evaluated
    from rayembed.registry.tracking_uri import reachable_tracking_uri

    tracking_uri = reachable_tracking_uri(run.placement.tracking_uri, run.placement.storage_path)
    evaluated = with_findings(evaluate(run))
    try:
        complete = track(evaluated, tracking_uri)
    except TrackingError as error:  # the scores are there, whatever became of MLflow
        context.err.write(f"error: {error}\n")
        complete = False
    print_evaluated(evaluated, context.out, tracking_uri=tracking_uri)
    if not complete:
        context.out.write(
            "MLflow     lacks some data: run the same command again to send the rest\n"
        )
    return 0 if complete and not evaluated.failed else 1


def _show(run: EvaluationRun, context: JobContext) -> None:
    """Print the resolved evaluation and the prompt of each task's texts."""
    check_task_names(run)
    from rayembed.evaluation.bm25 import Bm25
    from rayembed.evaluation.plan import task_factories
    from rayembed.evaluation.prompts_table import format_prompts, prompts_table
    from rayembed.pipeline.evaluate.evaluate import evaluated_model, further_jobs

    factories = task_factories(run)
    tasks = [*factories, *(job for jobs in further_jobs(run).values() for job in jobs)]
    count = sum(task.num_texts for task in tasks)
    # Behind what may be refused, so that no file of settings is left that cannot be run.
    context.out.write(f"# evaluation, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    context.out.flush()
    context.err.write(f"{len(tasks)} tasks, about {count:,} texts\n")
    model = evaluated_model(run, factories)
    if not isinstance(model, Bm25):
        context.err.write(f"model {model.meta.name}, revision {model.meta.revision}\n")
        loaded = [factory.load() for factory in factories]
        context.err.write(format_prompts(prompts_table(model, loaded)) + "\n")


def check_task_names(scores: Scores) -> None:
    """Check that the named benchmarks and tasks exist, without importing mteb.

    Raises:
        ConfigError: one is not.
    """
    from rayembed.evaluation.mteb_names import check_names

    check_names("", scores, further_benchmark_names())


def _list(context: JobContext) -> None:
    from rayembed.evaluation.benchmarks import benchmark_names

    further = (*(b.name for b in named_benchmarks()), *job_benchmark_names())
    for name in (*further, *benchmark_names()):
        context.out.write(f"{name}\n")


def _write_submission(context: JobContext) -> None:
    from rayembed.pipeline.storage import absolute_storage

    args = context.args
    if args.retriever is None:
        raise ConfigError("--submission needs --retriever, the name that the evaluation printed")
    values = {} if args.recipe is None else {"placement": EvaluationRun.read(args.recipe).placement}
    placement = override(parse(ResultsPlace, values), args.assignments).placement
    benchmark = job_benchmark(args.submission, "--submission")
    path = benchmark.write_submission(absolute_storage(placement.storage_path), args.retriever)
    context.out.write(f"Submission {path}\n")
    context.out.write("Next       upload it to the leaderboard of the benchmark\n")


_READER = Reader(
    kind=EvaluationRun,
    base=EvaluationRun.read,
    examples="placement.workers=8",
    own=(
        option(
            "--model REFERENCE",
            "a folder, hf://…, s3://…, pypi://…, models:/name@alias, any mteb model by its name, "
            "st:<folder> (through sentence-transformers), or bm25",
            sets="model.reference",
            missing="no model: give --model, a folder, hf://…, models:/name@alias or a name",
        ),
        *score_options("a benchmark, see --list"),
        option(
            "--baselines own_sets|all|none",
            "retrieval tasks with rows of BM25 and hybrid search; own sets by default",
            sets="baselines",
        ),
        option(
            "--reranker REFERENCE",
            "a cross-encoder for rows with the best documents reranked",
            sets="reranker.model",
        ),
        option(
            "--price-per-hour PRICE",
            "of one worker, for the price of a million documents",
            sets="placement.price_per_hour",
        ),
    ),
)

_SUBMISSION = option(
    "--submission BENCHMARK", "write the file for the leaderboard of AIR-Bench_24.05"
)

run_evaluation_job = Job(
    options=(*_READER.options, option("--retriever NAME", "whose results --submission takes")),
    read=_READER,
    run=_evaluate,
    lists=("the benchmarks", _list),
    example="--model bm25 --tasks NFCorpus",
    shows=("the evaluation", "every task's prompts", _show),
    alone=[(_SUBMISSION, _write_submission)],
)
"""The job that scores a model; its exit code is 1 where a task has no score."""


def track(evaluated: "EvaluationResult", tracking_uri: str) -> bool:
    """Send an evaluation's results to MLflow, and return whether all of them arrived.

    The run of a model at its revision is one, however often and with whichever tasks it is scored:
    a score that MLflow has already makes no second point.

    Raises:
        TrackingError: MLflow is away or refuses.
    """
    from rayembed.pipeline.evaluate.findings import log_findings
    from rayembed.pipeline.evaluate.report import benchmark_averages

    run, meta = evaluated.run, evaluated.scored.meta
    key = fingerprint([str(meta.name), str(meta.revision)])
    name = f"{meta.name}@{meta.revision}"
    place = hashlib.sha256(f"{tracking_uri} {name}".encode()).hexdigest()[:12]
    storage = absolute_storage(run.placement.storage_path)
    with Tracker.open(
        tracking_uri,
        run.placement.experiment,
        name.replace("/", "__"),
        key,
        flatten({"model": published_values(run.model, storage)}),
        {
            "rayembed.results": evaluated.scored.results,
            "rayembed.model_revision": str(meta.revision),
        },
        folder=cache_folder() / "evaluation-runs" / place,
        total_steps=1,
        storage=storage,
    ) as tracker:
        tracker.log_provenance(collect_provenance({}))
        tracker.log_scores("score", evaluated.scored.scores, 0)
        for benchmark, values in benchmark_averages(evaluated).items():
            tracker.log_scores(f"average/{benchmark}", values, 0)
        for name, done in evaluated.further.items():
            if scores := job_benchmark(name).scores(run, done):
                tracker.log_scores(f"dev/{name}", scores, 0)
        log_findings(evaluated.findings, tracker, 0)
        tracker.log_artifact(evaluated.scored.local, "results")
        tracker.status = "FAILED" if evaluated.failed else "FINISHED"
    return tracker.complete
