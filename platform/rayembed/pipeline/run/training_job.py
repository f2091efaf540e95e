"""Turn the command-line arguments of a training job into a run, and train it.

Each of the functions below imports what it needs: `--help` takes no second, a dry run no Ray.
"""

import argparse
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TextIO

from rayembed.assets.storage import is_remote
from rayembed.config.document import NamedRun
from rayembed.config.run import Run, of_stages
from rayembed.data.plan.audit import folders_of, lineage
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.display.tables import Table, console
from rayembed.errors import ConfigError
from rayembed.pipeline.job import (
    Job,
    JobContext,
    Option,
    Reader,
    Work,
    named_or_read,
    option,
)
from rayembed.pipeline.run.folders import plan_of
from rayembed.recipes.catalogue import (
    OWN_CORPUS,
    OWN_PAIRS,
    check_job,
    get_recipe,
    recipe_names,
)

logger = logging.getLogger(__name__)

A_RECIPE = "a recipe (see --list) or a file that --dry-run printed"

SEND_METRICS = option(
    "--send-metrics",
    "send MLflow the data of this run that it lacks because it was unreachable; start nothing",
)

STAGE = option(
    "--stage NAME",
    "run only this stage; hard negatives that only other stages use are not mined. It starts "
    "from model.backbone.path, which may be the model of an earlier run",
    often=True,
    dest="stages",
)


PAIRS = option(
    "--pairs FILE",
    "train on this JSONL, CSV or Parquet file with a query and a positive a row: "
    f"data.datasets.pairs.source.path of the recipe, {OWN_PAIRS} where none is named",
)


def training_job(
    default_recipe: str | None,
    *,
    own: tuple[Option, ...] = (),
    take: Callable[[argparse.Namespace], None] | None = None,
    work: Work[Run] | None = None,
) -> Job[Run]:
    """Make the job that trains recipes, scores the model and registers it.

    Args:
        default_recipe: where the command names none; its architecture is the only one that the job
            trains. None: a command names a recipe of any architecture, or pairs.
        own: further options of this job.
        take: converts these options to a recipe and assignments, in place.
        work: what the job does with its run; None: train, score and register an embedding model.
    """
    kind = None if default_recipe is None else get_recipe(default_recipe).model.kind
    read = Reader(
        kind=Run,
        base=base_run,
        recipe=A_RECIPE,
        default=default_recipe,
        names=recipe_names,
        examples="elements of lists go by their name, as in stages.blend.steps=10",
        named=True,
    )
    trace = option(
        "--trace-batch STAGE:STEP",
        "print which rows of which sources that step of the run trains on (from 0), and what was "
        "done with them; start nothing",
        type=_stage_and_step,
    )

    def run_of(args: argparse.Namespace) -> Run:
        if kind is None:
            take_pairs(args, OWN_PAIRS)
        if take is not None:
            take(args)
        run = read(args)
        if kind is not None:
            check_job(run, kind)
        return of_stages(run, args.stages)

    return Job(
        options=(*([PAIRS] if kind is None else []), *own, *read.options, STAGE),
        read=run_of,
        run=work or _train,
        lists=("the recipes", partial(_list, kind)),
        shows=("the resolved run", "what it needs", _show),
        instead=[(SEND_METRICS, send_metrics), (trace, _trace)],
        example="--recipe biencoder-quickstart" if kind is None else "",
    )


def take_pairs(args: argparse.Namespace, recipe: str) -> None:
    """Convert `--pairs FILE` to a recipe and a `--set` assignment, which later ones may
    override.

    Args:
        recipe: the recipe of own pairs, where none is named.

    Raises:
        ConfigError: neither pairs nor a recipe is named.
    """
    if args.pairs is None and args.recipe is None:
        raise ConfigError(
            "say what to train: a recipe, --recipe NAME (--list prints all), or a file with a "
            "query and a positive in each row, --pairs FILE"
        )
    if args.pairs is not None:
        args.recipe = args.recipe or recipe
        path = args.pairs if is_remote(args.pairs) else Path(args.pairs).expanduser().absolute()
        args.assignments = [f"data.datasets.pairs.source.path={path}", *args.assignments]


def _train(run: Run, _: JobContext) -> None:
    run = checked_at_hand(run)  # in a second; what follows imports torch, and perhaps Ray
    from rayembed.pipeline.run.train import train

    train(run)


def checked_at_hand(run: Run) -> Run:
    """Check a run's files, names and addresses, log warnings, and return the run as resolved.

    Raises:
        RayembedError: one of them is missing or wrong.
    """
    from rayembed.pipeline.checks.files import check_at_hand

    found = check_at_hand(run)
    for warning in found.warnings:
        logger.warning("%s", warning)
    from rayembed.pipeline.checks.network import unreachable

    if problems := unreachable(found.run):
        raise ConfigError("\n".join(problems))
    return found.run


def _list(kind: str | None, context: JobContext) -> None:
    from rayembed.pipeline.run.dry_run import print_recipes

    runs = map(get_recipe, recipe_names())
    print_recipes((run for run in runs if kind in (None, run.model.kind)), out=context.out)


def _show(run: Run, context: JobContext) -> None:
    from rayembed.pipeline.checks.files import look_at
    from rayembed.pipeline.run.dry_run import print_dry_run

    found = look_at(run)
    run = found.run
    typed = {name for name in found.absent if _is_typed(name, context.args.assignments)}
    problems = [*found.problems, *(found.absent[name] for name in sorted(typed))]
    if not problems:
        print_dry_run(run, found, out=context.out, tables=context.err)
    from rayembed.pipeline.checks.network import unreachable

    absent = [why for name, why in found.absent.items() if name not in typed]
    absent += [] if problems else unreachable(run)  # which the cluster may reach
    for warning in (*absent, *found.warnings, *([found.room] if found.room else [])):
        context.err.write(f"warning: {warning}\n")
    if problems:
        raise ConfigError("\n".join(problems))


def _is_typed(dataset: str, assignments: Iterable[str]) -> bool:
    """Whether a `--set` of the command changes the data set's source, so that it is no longer the
    recipe's.
    """
    return any(text.strip().startswith(f"data.datasets.{dataset}.source") for text in assignments)


def _trace(run: Run, context: JobContext) -> None:

    stage, step = context.args.trace_batch
    print_trace(run, stage, step, context.out)


def send_metrics(run: NamedRun, context: JobContext) -> None:
    """Send the pending data of a run to MLflow."""
    from rayembed.pipeline.run.folders import send_pending

    send_pending(run, context.out)


def base_run(recipe: str) -> Run:
    """Return the run of the recipe with this name, or read a run from a YAML file.

    Raises:
        ConfigError: no such recipe, or a file that is no run.
    """
    return named_or_read(recipe, recipe_names(), get_recipe, Run.read)


def _stage_and_step(text: str) -> tuple[str, int]:
    stage, colon, step = text.rpartition(":")
    if not colon or not stage or not step.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE:STEP, such as blend:12")
    return stage, int(step)


run_training_job = training_job(None)
"""The job that trains recipes of all architectures."""

run_corpus_adaptation = training_job(OWN_CORPUS)
"""The job that adapts a bi-encoder to documents without a label."""


_SHOWN_CHARACTERS = 60


def print_trace(run: Run, stage: str, step: int, out: TextIO) -> None:
    """Print the rows that one step of a stage trains on, with their origin and the folders of each
    data step that made them.

    Raises:
        ArtifactError: no training of that name has a plan of the stage, or a folder that it was
            made of is gone.
        ConfigError: the run has no such stage.
        DataError: the plan has no such step.
    """
    of_stages(run, [stage])
    plan = BatchPlan.open(plan_of(run, stage))
    shown = []
    for slot, (record, _) in enumerate(lineage(plan, step)):
        rules = ", ".join(sorted({negative.rule for negative in record.negatives}))
        negatives = f"{len(record.negatives)} {rules}" if rules else ""
        query = " ".join(record.query.split())[:_SHOWN_CHARACTERS]
        origin = "\n".join(record.origin)
        shown.append([slot, record.dataset, record.id, origin, query, negatives])
    heads = ["slot", "data set", "record", "made of", "query", "negatives"]
    title = f"Step {step} of plan {plan.fingerprint}"
    printer = console(out)
    printer.print(Table(heads, shown, title=title, align="rl"))
    for name, chain in folders_of(plan).items():
        for prepared in chain:
            counts = f"{prepared.manifest['rows_in']:,} → {prepared.manifest['rows_out']:,} rows"
            printer.print(f"{name}  {prepared.folder}  {counts}", soft_wrap=True)
