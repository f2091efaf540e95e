"""The backbone job: from its arguments to scores, exit codes and messages."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.pipeline.command_line import exit_code, log_to_stderr
from rayembed.tables import Table, console
from rayembed_papers.backbone.settings import BackboneRun


def run_backbone_job(argv: Sequence[str], *, about: str | None) -> int:
    """The exit code: 0, 1 when a task has no score or the job failed, 2 when asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> int:
        args = _parser(about).parse_args(list(argv))
        if args.list:
            _print_tasks(sys.stdout)
            return 0
        run = asked_run(args)
        if args.dry_run:
            _print_dry_run(run, sys.stdout, sys.stderr)
            return 0
        log_to_stderr(__package__)
        return _evaluate(run)

    return exit_code(work)


def asked_run(args: argparse.Namespace) -> BackboneRun:
    """The evaluation that the arguments describe: the file first, then options, then each `--set`.

    Raises:
        ConfigError: an unknown setting, a wrong value, no backbone or nothing to do.
    """
    values: dict[str, Any] = {}
    if args.recipe is not None:
        values = BackboneRun.read(args.recipe).model_dump(mode="json")
    if args.backbone is not None:
        values["backbone"] = args.backbone
    if args.benchmark:
        values["benchmarks"] = args.benchmark
    if args.tasks is not None:
        values["tasks"] = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if "backbone" not in values:
        raise ConfigError(
            "no backbone: give --backbone, a folder, hf://org/name@revision or s3://…"
        )
    return override(parse(BackboneRun, values), args.assignments)


def _evaluate(run: BackboneRun) -> int:
    # torch, transformers and Ray; the rest of the job needs none of them.
    from rayembed.registry.tracking_uri import check_reachable, resolve_tracking_uri
    from rayembed_papers.backbone.evaluation import evaluate_backbone
    from rayembed_papers.backbone.tracking import track

    tracking_uri = resolve_tracking_uri(run.placement.tracking_uri, run.placement.storage_path)
    check_reachable(tracking_uri)
    scores = evaluate_backbone(run)
    complete = track(scores, tracking_uri)
    out = sys.stdout
    for name, text in scores.reports.items():
        if name.endswith(".md"):
            out.write(f"{text}\n")
    for name, error in scores.failed.items():
        out.write(f"Without a score  {name}: {error}\n")
    out.write(f"Backbone   {scores.backbone.name}, weights {scores.backbone.weights}\n")
    out.write(f"Results    {scores.folder} ({', '.join(scores.reports)})\n")
    ui = "" if tracking_uri.startswith("http") else "mlflow ui --backend-store-uri "
    out.write(f"MLflow     {ui}{tracking_uri}\n")
    if not complete:
        out.write("MLflow     has not got everything: the same command sends the rest\n")
    if scores.failed:
        out.write("Next       the same command again does what is missing, and nothing else\n")
    return 1 if scores.failed else 0


def _print_dry_run(run: BackboneRun, out: TextIO, tables: TextIO) -> None:
    """The resolved evaluation, and the protocol of each finetuning."""
    from rayembed_papers.backbone.catalogue import plan_of

    plan = plan_of(run)
    out.write(f"# backbone evaluation, fingerprint {run.fingerprint}\n{run.to_yaml()}")
    out.flush()
    rows = []
    total = 0
    for one in plan.finetunings:
        protocol = one.protocol
        grid = (protocol.learning_rates, protocol.batch_sizes, protocol.seeds)
        trials = len(grid[0]) * len(grid[1]) * len(grid[2])
        total += trials
        scored = [
            f"{task} ({number})" if number > 1 else task
            for task in one.tasks
            if (number := sum(s.task == task for s in one.scored))
        ]
        rates, batches = (", ".join(f"{value:g}" for value in values) for values in grid[:2])
        numbers = (str(protocol.epochs), str(protocol.max_length), rates, batches, str(trials))
        rows.append([one.name, one.start or "backbone", ", ".join(scored), *numbers])
    heads = ["Finetuning", "Starts from", "Scored on", "Epochs", "Tokens", "Rates", "Batches"]
    console(tables).print(Table([*heads, "Trials"], rows, align="lllllllr", look="open"))
    tables.write(f"{total} trials\n")


def _print_tasks(out: TextIO) -> None:
    from rayembed_papers.backbone.catalogue import TASKS
    from rayembed_papers.backbone.xtreme_r import LEFT_OUT

    for task in TASKS.values():
        out.write(f"{task.benchmark:9} {task.name:13} {task.metric}\n")
    for name, why in LEFT_OUT.items():
        out.write(f"left out  {name:13} {why}\n")


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--backbone",
        metavar="REFERENCE",
        help="an encoder: a folder, hf://org/name@revision, s3://…; a family of transformers "
        "(BERT, XLM-R, …) or a NomicBert, dense or with experts",
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        default=[],
        metavar="glue|xtreme-r",
        help="may be given often",
    )
    parser.add_argument("--tasks", metavar="A,B", help="single tasks; see --list")
    parser.add_argument("--recipe", metavar="evaluation.yaml", help="a file that --dry-run printed")
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="path.to.setting=value",
        help="change a setting, such as protocol.seeds=[0] or placement.use_gpu=true; may be given "
        "often",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the evaluation (stdout) and its grid (stderr); start nothing",
    )
    parser.add_argument("--list", action="store_true", help="print the tasks; start nothing")
    return parser
