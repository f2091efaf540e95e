"""The training job: from its arguments to a run.

Each of the functions below imports what it needs: `--help` takes no second, a dry run no Ray.
"""

import argparse

from rayembed.config.adaptation import AnyRun
from rayembed.config.run import Run, of_stages
from rayembed.config.sweep import Sweep
from rayembed.pipeline.job import Job, JobContext, Reader, named_or_read, option
from rayembed.recipes.building_blocks import PUBLISHED_SCORES
from rayembed.recipes.catalogue import get_recipe, recipe_names

A_RECIPE = "a recipe (see --list) or a file that --dry-run printed"

SEND_METRICS = option(
    "--send-metrics",
    "send MLflow what it has not got of the run of that name, because it was away; start nothing",
)

STAGE = option(
    "--stage NAME",
    "run only this stage. It starts from model.backbone.path, which may be the model of an "
    "earlier run",
    often=True,
    dest="stages",
)


def training_job(default_recipe: str) -> Job[Run]:
    """The job that trains a recipe, evaluates the model and registers it."""
    read = Reader(
        kind=Run,
        base=base_run,
        recipe=A_RECIPE,
        default=default_recipe,
        examples="elements of lists go by their name, as in stages.blend.steps=10",
        named=True,
    )
    trace = option(
        "--trace-batch STAGE:STEP",
        "print which rows of which sources that step of the run trains on (from 0), and what was "
        "done with them; start nothing",
        type=_stage_and_step,
    )
    return Job(
        options=(*read.options, STAGE),
        read=lambda args: _with_steps(of_stages(read(args), args.stages)),
        run=_train,
        lists=("the recipes", _list),
        shows=("the resolved run", "what it needs", _show),
        instead=[(SEND_METRICS, send_metrics), (trace, _trace)],
    )


def _with_steps(run: Run) -> Run:
    if all(stage.epochs is None for stage in run.stages):
        return run
    from rayembed.data.epochs import with_steps

    return with_steps(run)


def _train(run: Run, _: JobContext) -> None:
    from rayembed.pipeline.train import train

    train(run)


def _list(context: JobContext) -> None:
    from rayembed.pipeline.dry_run import print_recipes

    print_recipes(map(get_recipe, recipe_names()), out=context.out)


def _show(run: Run, context: JobContext) -> None:
    from rayembed.pipeline.dry_run import print_dry_run

    # Own sets and the recipes' own benchmark need no mteb, which takes seconds.
    if {*run.scores.benchmarks, *run.scores.tasks} - {*PUBLISHED_SCORES}:
        from rayembed.evaluation.plan import task_factories

        task_factories(run.scores)
    print_dry_run(run, out=context.out, tables=context.err)


def _trace(run: Run, context: JobContext) -> None:
    from rayembed.pipeline.batch_trace import print_trace

    stage, step = context.args.trace_batch
    print_trace(run, stage, step, context.out)


def send_metrics(run: AnyRun | Sweep, context: JobContext) -> None:
    """Send MLflow what it has not got of a run or a sweep."""
    from rayembed.pipeline.pending_metrics import send_pending

    send_pending(run, context.out)


def base_run(recipe: str) -> Run:
    """The run of a recipe's name or of a YAML file.

    Raises:
        ConfigError: no such recipe, or a file that is no run.
    """
    return named_or_read(recipe, recipe_names(), get_recipe, Run)


def _stage_and_step(text: str) -> tuple[str, int]:
    stage, colon, step = text.rpartition(":")
    if not colon or not stage or not step.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE:STEP, such as blend:12")
    return stage, int(step)
