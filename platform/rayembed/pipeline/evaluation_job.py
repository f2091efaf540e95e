"""The evaluation job: from its arguments to scores, exit codes and messages."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from rayembed.config.evaluation_run import EvaluationRun, ResultsPlace
from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.pipeline.command_line import exit_code, log_to_stderr
from rayembed.samples.wikipedia import BENCHMARK, with_own_sets


def run_evaluation_job(argv: Sequence[str], *, about: str | None) -> int:
    """The exit code: 0, 1 when a task has no score or the job failed, 2 when asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> int:
        args = _parser(about).parse_args(list(argv))
        if args.list:
            _print_benchmarks(sys.stdout)
            return 0
        if args.submission is not None:
            return _write_submission(args)
        run = asked_run(args)
        if args.dry_run:
            _print_dry_run(run, sys.stdout, sys.stderr)
            return 0
        log_to_stderr()
        return _evaluate(run)

    return exit_code(work)


def asked_run(args: argparse.Namespace) -> EvaluationRun:
    """The evaluation that the arguments describe: the file first, then options, then each `--set`.

    Raises:
        ConfigError: an unknown setting, a wrong value, no model or nothing to score it on.
    """
    values: dict[str, Any] = {}
    if args.recipe is not None:
        values = EvaluationRun.read(args.recipe).model_dump(mode="json")
    if args.model is not None:
        values["model"] = {**values.get("model", {}), "reference": args.model}
    if args.benchmark:
        values["benchmarks"] = args.benchmark
    if args.tasks is not None:
        values["tasks"] = _names(args.tasks)
    if args.languages is not None:
        values["languages"] = _names(args.languages)
    if args.own_set:
        values["own_sets"] = [_own_set(text) for text in args.own_set]
    if "model" not in values:
        raise ConfigError("no model: give --model, a folder, hf://…, models:/name@alias or a name")
    return with_own_sets(override(parse(EvaluationRun, values), args.assignments))


def _own_set(text: str) -> dict[str, str]:
    name, equals, path = text.partition("=")
    if not equals:
        name, path = Path(text.rstrip("/")).absolute().resolve().name, text
    return {"name": name, "path": path}


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _evaluate(run: EvaluationRun) -> int:
    # torch, mteb and Ray; the rest of the job needs none of them.
    from rayembed.pipeline.evaluate import evaluate
    from rayembed.pipeline.evaluation_report import print_evaluated
    from rayembed.pipeline.evaluation_tracking import track
    from rayembed.registry.tracking_uri import check_reachable, resolve_tracking_uri

    placement = run.placement
    tracking_uri = resolve_tracking_uri(placement.tracking_uri, placement.storage_path)
    check_reachable(tracking_uri)
    evaluated = evaluate(run)
    complete = track(evaluated, tracking_uri)
    print_evaluated(evaluated, sys.stdout, tracking_uri=tracking_uri)
    if not complete:
        sys.stdout.write("MLflow     has not got everything: the same command sends the rest\n")
    return 1 if evaluated.failed else 0


def _print_dry_run(run: EvaluationRun, out: TextIO, tables: TextIO) -> None:
    """The resolved evaluation, and what stands before the texts of each task."""
    from rayembed.evaluation.bm25 import Bm25
    from rayembed.evaluation.plan import task_factories
    from rayembed.evaluation.prompts_table import format_prompts, prompts_table
    from rayembed.pipeline.evaluate import air_bench_of, evaluated_model

    out.write(f"# evaluation, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    out.flush()
    factories = task_factories(run)
    air = air_bench_of(run)
    count = sum(f.num_texts for f in factories) + sum(job.num_texts for job in air)
    tables.write(f"{len(factories) + len(air)} tasks, about {count:,} texts\n")
    model = evaluated_model(run, factories)
    if not isinstance(model, Bm25):
        tables.write(f"model {model.meta.name}, revision {model.meta.revision}\n")
        loaded = [factory.load() for factory in factories]
        tables.write(format_prompts(prompts_table(model, loaded)) + "\n")


def _print_benchmarks(out: TextIO) -> None:
    from rayembed.evaluation.air_bench.catalogue import VERSIONS
    from rayembed.evaluation.benchmarks import benchmark_names

    for name in (BENCHMARK, *VERSIONS, *benchmark_names()):
        out.write(f"{name}\n")


def _write_submission(args: argparse.Namespace) -> int:
    from rayembed.assets.storage import join
    from rayembed.evaluation.air_bench.submission import write_submission
    from rayembed.pipeline.evaluate import AIR_BENCH
    from rayembed.pipeline.storage import absolute_storage

    if args.retriever is None:
        raise ConfigError("--submission needs --retriever, the name that the evaluation printed")
    values = {} if args.recipe is None else {"placement": EvaluationRun.read(args.recipe).placement}
    placement = override(parse(ResultsPlace, values), args.assignments).placement
    folder = join(absolute_storage(placement.storage_path), AIR_BENCH)
    path = write_submission(folder, args.submission, args.retriever, join(folder, "submissions"))
    sys.stdout.write(f"Submission {path}\n")
    sys.stdout.write("Next       upload it to AIR-Bench's leaderboard on the hub\n")
    return 0


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--model",
        metavar="REFERENCE",
        help="a folder, hf://…, s3://…, pypi://…, models:/name@alias, any mteb model by its name, "
        "st:<folder> (through sentence-transformers), or bm25",
    )
    parser.add_argument(
        "--benchmark", action="append", default=[], metavar="NAME", help="see --list; may be often"
    )
    parser.add_argument("--tasks", metavar="A,B", help="single tasks of mteb")
    parser.add_argument("--languages", metavar="eng,deu", help="only subsets in these")
    parser.add_argument(
        "--own-set",
        action="append",
        default=[],
        metavar="[NAME=]FOLDER",
        help="your own corpus, queries and qrels (BEIR's layout) as a task; may be given often",
    )
    parser.add_argument("--recipe", metavar="evaluation.yaml", help="a file that --dry-run printed")
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="path.to.setting=value",
        help="change a setting, such as placement.workers=8; may be given often",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the evaluation (stdout) and every task's prompts (stderr); start nothing",
    )
    parser.add_argument("--list", action="store_true", help="print the benchmarks; start nothing")
    parser.add_argument(
        "--submission", metavar="VERSION", help="write AIR-Bench's zip file for its leaderboard"
    )
    parser.add_argument("--retriever", metavar="NAME", help="whose results --submission takes")
    return parser
