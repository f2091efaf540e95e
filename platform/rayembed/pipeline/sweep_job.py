"""From the arguments of the sweep job to its sweep. Imports neither Ray nor torch by itself."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TextIO

from rayembed.config.document import read_mapping
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import nearest, parse
from rayembed.config.space import as_text, is_domain, parse_space, read_space
from rayembed.config.sweep import Sweep
from rayembed.errors import ConfigError
from rayembed.pipeline.command_line import (
    add_send_metrics,
    base_run,
    exit_code,
    log_to_stderr,
    of_stages,
)
from rayembed.pipeline.dry_run import print_recipes
from rayembed.recipes.catalogue import get_recipe, recipe_names


@dataclass(frozen=True)
class PrintedSweep:
    """A sweep with figures in print to stand beside its own."""

    sweep: Sweep
    printed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Row of the sweep → column → figure, of 100. Rows that the sweep leaves out have figures
    alone."""
    source: str = ""
    """The paper and the table."""
    about: str = ""
    """What the sweep compares."""


Sweeps = Mapping[str, Callable[[], PrintedSweep]]
"""Sweeps that are asked for by name."""

NO_SWEEPS: Sweeps = MappingProxyType({})


def run_sweep_job(argv: Sequence[str], *, about: str | None, sweeps: Sweeps = NO_SWEEPS) -> int:
    """The exit code of the sweep job: 0, 1 when it failed, 2 when it was asked wrongly.

    Args:
        argv: arguments without the script's name.
        about: what `--help` begins with.
        sweeps: what `--sweep` takes beside files.
    """
    args = _parser(about, sweeps).parse_args(list(argv))

    def work() -> None:
        if args.list:
            _print_list(sweeps, sys.stdout)
            return
        asked = resolve(args, sweeps)
        if args.send_metrics:
            from rayembed.pipeline.pending_metrics import send_pending

            send_pending(asked.sweep, sys.stdout)
            return
        # Ray and torch; what is asked wrongly is told without them.
        from rayembed.pipeline.sweep_check import check_all

        check_all(asked.sweep)
        if args.dry_run:
            from rayembed.pipeline.sweep_dry_run import print_sweep

            print_sweep(asked.sweep, out=sys.stdout, tables=sys.stderr)
            return
        log_to_stderr()
        from rayembed.pipeline.sweep import sweep_runs

        sweep_runs(asked.sweep, asked.printed, asked.source)

    return exit_code(work)


def parse_arguments(argv: Sequence[str], sweeps: Sweeps = NO_SWEEPS) -> PrintedSweep:
    """The sweep that the arguments describe.

    Raises:
        ConfigError: as `resolve`.
        SystemExit: as argparse has it.
    """
    return resolve(_parser(None, sweeps).parse_args(list(argv)), sweeps)


def resolve(args: argparse.Namespace, sweeps: Sweeps) -> PrintedSweep:
    """The sweep that the arguments describe: first its name, file or recipe, then the space, each
    `--set` in its order, the search, each `--with`, the name.

    Raises:
        ConfigError: an unknown sweep, recipe or setting, a file that is no sweep, a wrong value.
    """
    given, printed, source = _given(args, sweeps)
    fixed = [text for text in args.assignments if not is_domain(text.partition("=")[2])]
    space: dict[str, Any] = dict(given.get("space", {}))
    if args.space is not None:
        space.update(read_space(args.space))
    for text in args.assignments:
        path, equals, domain = text.partition("=")
        if equals and is_domain(domain):
            space[path] = domain
        else:
            space.pop(path, None)  # set in all trials, it is searched no more
    runs = {
        label: of_stages(override(run, fixed), args.stages) for label, run in given["runs"].items()
    }
    domains = parse_space(space)
    search = dict(given.get("search", {"kind": _usual_search(domains)}))
    if args.search is not None and args.search != search.get("kind"):
        search = {"kind": args.search}
    if args.trials is not None:
        search["trials"] = args.trials
    scheduler = given.get("scheduler", {})
    if args.scheduler is not None and args.scheduler != scheduler.get("kind"):
        scheduler = {"kind": args.scheduler}
    values: dict[str, Any] = {
        **{name: given[name] for name in given if name not in ("space", "runs", "scheduler")},
        "name": args.name or given["name"],
        "runs": {label: run.model_dump(mode="json") for label, run in runs.items()},
        "space": {
            path: entry if isinstance(entry, str) else tuple(as_text(value) for value in entry)
            for path, entry in space.items()
        },
        "search": search,
    }
    if scheduler:
        values["scheduler"] = scheduler
    return PrintedSweep(override(parse(Sweep, values), args.options), printed, source)


def named_sweep(name: str, sweeps: Sweeps) -> PrintedSweep:
    """The sweep of that name.

    Raises:
        ConfigError: no such sweep; the message names the nearest one.
    """
    if name not in sweeps:
        raise ConfigError(f"no sweep {name!r}; {nearest(name, sweeps)}")
    return sweeps[name]()


def _given(
    args: argparse.Namespace, sweeps: Sweeps
) -> tuple[dict[str, Any], Mapping[str, Mapping[str, float]], str]:
    """The settings to begin with, and the figures of a paper."""
    if args.sweep is None:
        run = base_run(args.recipe)
        return {"name": f"{run.name}-sweep", "runs": {"": run}}, {}, ""
    if not sweeps or args.sweep.endswith((".yaml", ".yml")):
        return _of_file(args.sweep), {}, ""
    table = named_sweep(args.sweep, sweeps)
    values = table.sweep.model_dump(mode="json", exclude={"runs"})
    return {**values, "runs": dict(table.sweep.runs)}, table.printed, table.source


def _of_file(path: str) -> dict[str, Any]:
    """The settings in a file; its runs are whole ones, or recipes with settings."""
    values = read_mapping(path)
    if "recipe" in values:
        entry = {"recipe": values.pop("recipe"), "set": values.pop("set", [])}
        values["runs"] = {"": entry}
    runs = values.get("runs")
    if not isinstance(runs, dict) or not runs:
        raise ConfigError(
            f"the sweep {path!r} has no runs: write recipe: <name>, or runs: with a recipe each "
            "(label: {recipe: <name>, set: [path=value]})"
        )
    values["runs"] = {label: _run_of(path, label, entry) for label, entry in runs.items()}
    values.setdefault("name", "sweep")
    return values


def _run_of(path: str, label: str, entry: Any) -> Run:
    if not isinstance(entry, dict):
        raise ConfigError(f"the run {label!r} of {path!r} must be a mapping with recipe, or a run")
    if "recipe" not in entry:
        return parse(Run, entry)
    unknown = sorted(set(entry) - {"recipe", "set"})
    if unknown:
        raise ConfigError(
            f"the run {label!r} of {path!r} has {unknown[0]!r}; beside recipe there is only set"
        )
    changes = entry.get("set", [])
    if not isinstance(changes, list):
        raise ConfigError(f"set of the run {label!r} of {path!r} must be a list of path=value")
    return override(base_run(str(entry["recipe"])), [str(change) for change in changes])


def _usual_search(domains: Mapping[str, Any]) -> str:
    return "grid" if all(domain.is_finite for domain in domains.values()) else "random"


def _print_list(sweeps: Sweeps, out: TextIO) -> None:
    """Write a line for each named sweep, or for each recipe that can be searched."""
    if not sweeps:
        print_recipes(map(get_recipe, recipe_names()), out=out)
        return
    from rayembed.tables import Table, console
    from rayembed.tuning.trials import known_trials

    named = {name: named_sweep(name, sweeps) for name in sweeps}
    rows = [[name, s.about, s.source, len(known_trials(s.sweep))] for name, s in named.items()]
    console(out).print(Table(["sweep", "what it compares", "source", "trials"], rows))


def _parser(about: str | None, sweeps: Sweeps) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--recipe",
        default="nvembed-quickstart",
        metavar="NAME|run.yaml",
        help="the run over whose settings is searched; default: %(default)s",
    )
    what.add_argument(
        "--sweep",
        metavar="NAME|sweep.yaml" if sweeps else "sweep.yaml",
        help="a sweep by its name (see --list) or a file" if sweeps else "a file that is a sweep",
    )
    parser.add_argument("--space", metavar="space.yaml", help="path.to.setting: choice(a, b), …")
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="path=value|domain",
        help="change a setting of all runs, or search it: path=grid(a, b), choice(a, b), "
        "uniform(low, high), loguniform(low, high), integers(low, high); may be given often",
    )
    parser.add_argument(
        "--stage", dest="stages", action="append", default=[], help="run only this stage"
    )
    parser.add_argument("--search", choices=("grid", "random", "optuna"))
    parser.add_argument("--trials", type=int, metavar="N", help="draws of random and optuna")
    parser.add_argument("--scheduler", choices=("none", "asha", "pbt"))
    parser.add_argument(
        "--with",
        dest="options",
        action="append",
        default=[],
        metavar="path=value",
        help="a setting of the sweep itself: metric.of=evaluation, scheduler.grace_steps=100, "
        "trials_at_once=2; may be given often",
    )
    parser.add_argument("--name", help="a sweep submitted again under its name goes on")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the sweep (stdout), its trials, their data and how many run at once (stderr)",
    )
    parser.add_argument(
        "--list", action="store_true", help="print what can be named; start nothing"
    )
    add_send_metrics(parser)
    return parser
