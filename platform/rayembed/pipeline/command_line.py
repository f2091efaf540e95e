"""From the arguments of a training job to its run. Imports neither Ray nor torch by itself."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

from rayembed.config.document import Document
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import nearest, parse
from rayembed.errors import ConfigError, RayembedError
from rayembed.pipeline.dry_run import print_dry_run, print_recipes
from rayembed.pipeline.stopping import hearing
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.samples.wikipedia import with_own_sets

AnyDocument = TypeVar("AnyDocument", bound=Document)


class Action(Enum):
    """What a job is asked to do."""

    TRAIN = "train"
    DRY_RUN = "dry-run"
    LIST = "list"
    SEND_METRICS = "send-metrics"
    TRACE_BATCH = "trace-batch"


def run_job(argv: Sequence[str], *, default_recipe: str, about: str | None) -> int:
    """The exit code of a training job: 0, 1 when it failed, 2 when it was asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """

    def work() -> None:
        args = _parser(default_recipe, about).parse_args(list(argv))
        run, action = _asked(args)
        match action:
            case Action.LIST:
                print_recipes(map(get_recipe, recipe_names()), out=sys.stdout)
            case Action.DRY_RUN:
                print_dry_run(run, out=sys.stdout, tables=sys.stderr)
            case Action.SEND_METRICS:
                from rayembed.pipeline.pending_metrics import send_pending

                send_pending(run, sys.stdout)
            case Action.TRACE_BATCH:
                from rayembed.pipeline.batch_trace import print_trace

                stage, step = args.trace_batch
                print_trace(run, stage, step, sys.stdout)
            case Action.TRAIN:
                log_to_stderr()
                from rayembed.pipeline.train import train  # Ray and torch; a dry run needs neither

                train(run)

    return exit_code(work)


def exit_code(
    work: Callable[[], int | None],
    *,
    stopped: str = "stopped; the same command goes on from what is finished",
) -> int:
    """What a job ends with: what `work` returns (None: 0), 1 when it failed, 2 when it was asked
    wrongly, 130 or 143 when SIGINT or SIGTERM stopped it.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        stopped: the line that an interrupted job ends with.
    """
    with hearing() as heard:
        try:
            return work() or 0
        except RayembedError as error:
            if heard.number is None:
                sys.stderr.write(f"error: {error}\n")
                return 2 if isinstance(error, ConfigError) else 1
        except KeyboardInterrupt:
            pass
        except Exception:
            if heard.number is None:  # else it is what came of ending in the middle
                raise
        sys.stderr.write(f"{stopped}\n")
        return heard.exit_code


def log_to_stderr(*packages: str) -> None:
    """Show the run's own progress; of the libraries only warnings.

    Args:
        packages: beside rayembed, whose progress is shown too.
    """
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S"
    )
    for package in ("rayembed", *packages):
        logging.getLogger(package).setLevel(logging.INFO)


def resolve(
    argv: Sequence[str], default_recipe: str, *, about: str | None = None
) -> tuple[Run, Action]:
    """The run that the arguments describe, and what to do with it.

    The recipe comes first, then each `--set` in its order, then `--name`.

    Raises:
        ConfigError: an unknown recipe or setting, a file that is no run, a wrong value.
        SystemExit: as argparse has it, for `--help` (0) and unknown options (2).
    """
    return _asked(_parser(default_recipe, about).parse_args(list(argv)))


def _asked(args: argparse.Namespace) -> tuple[Run, Action]:
    run = of_stages(with_sample(assigned(base_run(args.recipe), args)), args.stages)
    action = action_of(args)
    traces = args.trace_batch is not None and action is Action.TRAIN
    return run, Action.TRACE_BATCH if traces else action


def assigned(run: AnyDocument, args: argparse.Namespace) -> AnyDocument:
    """The run with the settings and the name of `recipe_parser`'s arguments.

    Raises:
        ConfigError: an unknown setting or a wrong value.
    """
    named = [] if args.name is None else [f"name={args.name}"]
    return override(run, [*args.assignments, *named])


def with_sample(run: Run) -> Run:
    """The run with the sample's own sets in place of the benchmark's name, where it is named.

    Raises:
        ConfigError: an unknown size of the benchmark, or its sets do not fit the run.
    """
    evaluation = with_own_sets(run.evaluation)
    if evaluation is run.evaluation:
        return run
    return parse(Run, {**dict(run), "evaluation": evaluation})


def action_of(args: argparse.Namespace) -> Action:
    """What `recipe_parser`'s arguments ask to do."""
    if args.list:
        return Action.LIST
    if args.dry_run:
        return Action.DRY_RUN
    return Action.SEND_METRICS if args.send_metrics else Action.TRAIN


def of_stages(run: Run, names: Sequence[str]) -> Run:
    """The run with the named stages alone, in its own order; with all where none is named.

    Raises:
        ConfigError: a name that no stage has.
    """
    known = [stage.name for stage in run.stages]
    for name in names:
        if name not in known:
            raise ConfigError(f"the run {run.name!r} has no stage {name!r}; {nearest(name, known)}")
    kept = tuple(stage for stage in run.stages if stage.name in names or not names)
    return run.model_copy(update={"stages": kept})


def base_run(recipe: str) -> Run:
    """The run of a recipe's name or of a YAML file.

    Raises:
        ConfigError: no such recipe, or a file that is no run.
    """
    return named_or_read(recipe, recipe_names(), get_recipe, Run)


def named_or_read(
    recipe: str, names: Iterable[str], get: Callable[[str], AnyDocument], kind: type[AnyDocument]
) -> AnyDocument:
    """The recipe of one of the names, or what a YAML file holds.

    Args:
        get: the recipe of a name; refuses a name that it does not know.

    Raises:
        ConfigError: no such recipe, or a file that is none of the kind.
    """
    is_file = recipe.endswith((".yaml", ".yml")) or "/" in recipe or Path(recipe).is_file()
    return kind.read(recipe) if is_file and recipe not in names else get(recipe)


def recipe_parser(
    default_recipe: str, about: str | None, *, example: str
) -> argparse.ArgumentParser:
    """Options of every job that trains a recipe.

    Args:
        example: a setting in a list, as `--set` takes it.
    """
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--recipe",
        default=default_recipe,
        metavar="NAME|run.yaml",
        help="a recipe (see --list) or a file that --dry-run printed; default: %(default)s",
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="path.to.setting=value",
        help=f"change a setting; may be given often. Elements of lists go by their name: {example}",
    )
    parser.add_argument(
        "--name", help="name of the run; one submitted again under its name goes on"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved run (stdout) and what it needs (stderr); start nothing",
    )
    parser.add_argument("--list", action="store_true", help="print the recipes; start nothing")
    add_send_metrics(parser)
    return parser


def add_send_metrics(parser: argparse.ArgumentParser) -> None:
    """The option that all jobs have whose metrics may wait for MLflow."""
    parser.add_argument(
        "--send-metrics",
        action="store_true",
        help="send MLflow what it has not got of the run of that name, because it was away; start "
        "nothing",
    )


def _parser(default_recipe: str, about: str | None) -> argparse.ArgumentParser:
    parser = recipe_parser(default_recipe, about, example="stages.blend.steps=10")
    parser.add_argument(
        "--stage",
        dest="stages",
        action="append",
        default=[],
        metavar="NAME",
        help="run only this stage; may be given often. It starts from model.backbone.path, which "
        "may be the model of an earlier run",
    )
    parser.add_argument(
        "--trace-batch",
        type=_stage_and_step,
        metavar="STAGE:STEP",
        help="print which rows of which sources that step of the run trains on (from 0), and what "
        "was done with them; start nothing",
    )
    return parser


def _stage_and_step(text: str) -> tuple[str, int]:
    stage, colon, step = text.rpartition(":")
    if not colon or not stage or not step.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not STAGE:STEP, such as blend:12")
    return stage, int(step)
