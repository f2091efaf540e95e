"""From the arguments of a training job to its run. Imports neither Ray nor torch by itself."""

import argparse
import logging
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path

from rayembed.config.override import override
from rayembed.config.run import Run, read_run
from rayembed.errors import ConfigError, RayembedError
from rayembed.pipeline.dry_run import print_dry_run, print_recipes
from rayembed.recipes.catalogue import get_recipe, recipe_names


class Action(Enum):
    """What a job is asked to do."""

    TRAIN = "train"
    DRY_RUN = "dry-run"
    LIST = "list"


def run_job(argv: Sequence[str], *, default_recipe: str, about: str | None) -> int:
    """The exit code of a training job: 0, 1 when it failed, 2 when it was asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
    """
    try:
        run, action = resolve(argv, default_recipe, about=about)
        match action:
            case Action.LIST:
                print_recipes(map(get_recipe, recipe_names()), out=sys.stdout)
            case Action.DRY_RUN:
                print_dry_run(run, out=sys.stdout, tables=sys.stderr)
            case Action.TRAIN:
                log_to_stderr()
                from rayembed.pipeline.train import train  # Ray and torch; a dry run needs neither

                train(run)
    except RayembedError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return told_as_stopped()
    return 0


def told_as_stopped() -> int:
    """The exit code of a job that was interrupted, after one line about it."""
    sys.stderr.write("stopped; the same command goes on from what is finished\n")
    return 130


def log_to_stderr() -> None:
    """Show the run's own progress; of the libraries only warnings."""
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s  %(message)s", datefmt="%H:%M:%S"
    )
    logging.getLogger("rayembed").setLevel(logging.INFO)


def resolve(
    argv: Sequence[str], default_recipe: str, *, about: str | None = None
) -> tuple[Run, Action]:
    """The run that the arguments describe, and what to do with it.

    The recipe comes first, then each `--set` in its order, then `--name`.

    Raises:
        ConfigError: an unknown recipe or setting, a file that is no run, a wrong value.
        SystemExit: as argparse has it, for `--help` (0) and unknown options (2).
    """
    args = _parser(default_recipe, about).parse_args(list(argv))
    assignments = [*args.assignments]
    if args.name is not None:
        assignments.append(f"name={args.name}")
    run = override(_base(args.recipe), assignments)
    if args.list:
        return run, Action.LIST
    return run, Action.DRY_RUN if args.dry_run else Action.TRAIN


def _base(recipe: str) -> Run:
    """The run of a recipe's name or of a YAML file."""
    if recipe in recipe_names():
        return get_recipe(recipe)
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe or Path(recipe).is_file():
        return read_run(recipe)
    return get_recipe(recipe)


def _parser(default_recipe: str, about: str | None) -> argparse.ArgumentParser:
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
        help="change a setting; may be given often. Elements of lists go by their name: "
        "stages.blend.steps=10",
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
    return parser
