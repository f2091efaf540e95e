"""Data jobs from their arguments to finished folders: prepare, filter, mine, cluster."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rayembed.config.data_run import DataRun, data_of
from rayembed.config.override import override
from rayembed.config.settings import nearest
from rayembed.data.steps import Step
from rayembed.errors import ConfigError
from rayembed.pipeline.command_line import exit_code, log_to_stderr, named_or_read
from rayembed.pipeline.data_tables import print_catalogue, print_data_run
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed.recipes.datasets.catalogue import data_recipe_names, get_data_recipe

OWN_PAIRS = "pairs"
"""The recipe of a job that names none: the user's own pairs."""


_ASKS_FOR: dict[Step, tuple[str, tuple[str, ...]]] = {
    "filtered": ("consistency", ("teacher=hf://owner/model",)),
    "mined": ("mining", ("teacher=hf://owner/model",)),
    "clustered": ("clusters", ("teacher=hf://owner/model", "batch_pairs=512")),
}
"""The setting of a data set that asks for a step, and what it needs at least."""


@dataclass(frozen=True)
class Asked:
    """What a data job is asked to do."""

    run: DataRun
    names: tuple[str, ...]
    """Of the data sets to prepare."""
    dry_run: bool
    list: bool


def run_data_job(argv: Sequence[str], *, until: Step, about: str | None) -> int:
    """The exit code of a data job: 0, 1 when it failed, 2 when it was asked wrongly.

    Errors that a user can act on are printed as their message, without a traceback.

    Args:
        argv: arguments without the script's name.
        until: the last step that the job does.
        about: what `--help` begins with.
    """

    def work() -> None:
        asked = resolve(argv, until, about=about)
        if asked.list:
            print_catalogue(sys.stdout)
        elif asked.dry_run:
            _print_dry_run(asked, out=sys.stdout, tables=sys.stderr)
        else:
            log_to_stderr()
            # Ray and torch; a dry run needs neither.
            from rayembed.pipeline.data_steps import do_steps

            do_steps(asked.run, asked.names, until)

    return exit_code(work)


def resolve(argv: Sequence[str], until: Step, *, about: str | None = None) -> Asked:
    """What the arguments ask for. The recipe comes first, then each `--set` in its order.

    Raises:
        ConfigError: an unknown recipe, data set or setting, a wrong value, or no data set that asks
            for the job's step.
        SystemExit: as argparse has it, for `--help` (0) and unknown options (2).
    """
    args = _parser(about).parse_args(list(argv))
    run = override(_base(args.recipe), args.assignments)
    if args.list:
        return Asked(run, (), dry_run=False, list=True)
    return Asked(run, _chosen(run, args.datasets, until), dry_run=args.dry_run, list=False)


def _chosen(run: DataRun, names: str | None, until: Step) -> tuple[str, ...]:
    """The data sets to prepare: those that are named, or all that ask for the step."""
    known = {dataset.name: dataset for dataset in run.data.datasets}
    given = [name.strip() for name in names.split(",")] if names else list(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"--datasets: no data set {name!r}; {nearest(name, known)}")
    if until == "records":
        return tuple(given)
    setting, needed = _ASKS_FOR[until]
    asking = tuple(name for name in given if getattr(known[name], setting) is not None)
    if not asking:
        path = f"data.datasets.{given[0]}.{setting}"
        example = " ".join(f"--set {path}.{assignment}" for assignment in needed)
        raise ConfigError(
            f"no data set of the run {run.name!r} asks for this step: {path} is null; set it, for "
            f"instance {example}"
        )
    return asking


def _base(recipe: str) -> DataRun:
    """The data run of a recipe's name or of a YAML file; of training recipes their data part."""
    names = [*data_recipe_names(), *recipe_names()]

    def get(name: str) -> DataRun:
        if name not in names:
            raise ConfigError(f"no recipe {name!r}; {nearest(name, names)}")
        return get_data_recipe(name) if name in data_recipe_names() else data_of(get_recipe(name))

    return named_or_read(recipe, names, get, DataRun)


def _print_dry_run(asked: Asked, *, out: TextIO, tables: TextIO) -> None:
    out.write(f"# data run {asked.run.name}, fingerprint {asked.run.fingerprint}\n")
    out.write(asked.run.to_yaml())
    out.flush()
    print_data_run(asked.run, asked.names, tables)


def _parser(about: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    parser.add_argument(
        "--recipe",
        default=OWN_PAIRS,
        metavar="NAME|run.yaml",
        help="a data recipe, a training recipe (its data), or a file that --dry-run printed; "
        "default: %(default)s, one file with a query and a positive a row",
    )
    parser.add_argument(
        "--datasets", metavar="A,B", help="prepare only these data sets of the recipe"
    )
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="path.to.setting=value",
        help="change a setting; may be given often. Data sets go by their name: "
        "data.datasets.pairs.source.path=pairs.jsonl",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved run (stdout) and what it does (stderr); start nothing",
    )
    parser.add_argument(
        "--list", action="store_true", help="print data recipes and the catalogue; start nothing"
    )
    return parser
