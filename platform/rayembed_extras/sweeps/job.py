"""Run the sweep job, from its command-line arguments to its report. Its functions import what they
need.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TextIO

from rayembed.config.data import DatasetConfig
from rayembed.config.document import read_mapping
from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.override import assign_all, override
from rayembed.config.run import Run, of_stages
from rayembed.config.settings import Settings, nearest, parse
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError
from rayembed.pipeline.job import Job, JobContext, named_or_read, option
from rayembed.pipeline.run.training_job import SEND_METRICS, STAGE
from rayembed.recipes.catalogue import get_recipe, recipe_names
from rayembed_extras.sweeps.leave_one_out import leave_one_out
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.space import (
    as_text,
    is_domain,
    is_nearly_domain,
    parse_domain,
    parse_space,
)


@dataclass(frozen=True)
class PrintedSweep:
    """A sweep with published scores to compare its results with."""

    sweep: Sweep
    printed: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Row of the sweep → column → published score in percent. Rows that the sweep leaves out have
    figures alone."""
    source: str = ""
    """The paper and the table."""
    about: str = ""
    """Description of the comparison that the sweep makes."""


Sweeps = Mapping[str, Callable[[], PrintedSweep]]
"""Sweeps that can be selected by name."""

NO_SWEEPS: Sweeps = MappingProxyType({})

_RECIPE = "nvembed-quickstart"
"""Recipe that is searched if none is named."""


def sweep_job(sweeps: Sweeps = NO_SWEEPS) -> Job[PrintedSweep]:
    """Create the job that searches the settings of a recipe.

    Args:
        sweeps: what `--sweep` takes beside files.
    """
    named = "a sweep by its name (see --list) or a file" if sweeps else "a file that is a sweep"
    return Job(
        options=(option("--sweep NAME|sweep.yaml", named), *_OPTIONS),
        read=lambda args: _read(args, sweeps),
        run=_sweep,
        lists=("what can be named", lambda context: _print_list(sweeps, context.out)),
        shows=("the sweep", "its trials, their data and how many run at once", _show),
        instead=[(SEND_METRICS, _send_metrics)],
        example="--sweep " + next(iter(sweeps)) if sweeps else "--set 'seed=grid(1, 2)'",
    )


def _send_metrics(asked: PrintedSweep, context: JobContext) -> None:
    from rayembed_extras.sweeps.folder import send_pending_sweep

    send_pending_sweep(asked.sweep, context.out)


def _show(asked: PrintedSweep, context: JobContext) -> None:
    from rayembed.pipeline.checks.files import look_at
    from rayembed_extras.sweeps.dry_run import print_sweep
    from rayembed_extras.sweeps.trials import check_sweep

    check_sweep(asked.sweep)
    if problems := look_at(asked.sweep.base, _no_records).problems:
        raise ConfigError("\n".join(problems))
    print_sweep(asked.sweep, out=context.out, tables=context.err)


def _sweep(asked: PrintedSweep, _: JobContext) -> None:
    # What is asked wrongly is told without Ray and torch.
    from rayembed.pipeline.checks.files import check_at_hand
    from rayembed_extras.sweeps.trials import check_sweep

    check_sweep(asked.sweep)
    check_at_hand(asked.sweep.base, _no_records)
    from rayembed_extras.sweeps.sweep import sweep_runs

    sweep_runs(asked.sweep, asked.printed, asked.source)


def _no_records(_dataset: DatasetConfig, _root: str) -> None:
    """Always return None, so that no steps are computed for the base run; each trial sets its own
    number.
    """


def _check_together(run: Run, assignments: Sequence[str]) -> None:
    """Check that the assignments do not contradict each other, whichever values they set.

    Raises:
        ConfigError: they cannot.
    """
    assign_all(type(run), run.model_dump(mode="json"), assignments)


def _read(args: argparse.Namespace, sweeps: Sweeps) -> PrintedSweep:
    """Build the sweep: from its name, file or recipe, then each `--set` in order, the search, each
    `--with`, and `--name`.
    """
    given, printed, source = _given(args, sweeps)
    fixed = [text for text in args.assignments if not is_domain(text.partition("=")[2])]
    set_here = {path for path, _, value in map(_parted, args.assignments) if value != "null"}
    space: dict[str, Any] = {
        path: domain
        for path, domain in dict(given.get("space", {})).items()
        if _said_otherwise(path) not in set_here
    }
    for text in args.assignments:
        path, equals, domain = _parted(text)
        if equals and is_domain(domain):
            space[path] = domain
        else:
            space.pop(path, None)  # set in all trials, it is searched no more
    runs = {
        label: of_stages(with_named_benchmarks(_fixed(run, fixed)), args.stages)
        for label, run in given["runs"].items()
    }
    if args.leave_one_out:
        runs, given["metric"] = leave_one_out(runs)
    domains = parse_space(space)
    for run in given["runs"].values():
        _check_together(run, [*fixed, *_lengths(space)])
    search = dict(given.get("search", {"kind": _usual_search(domains)}))
    if args.search is not None and args.search != search.get("kind"):
        search = {"kind": args.search}
    if args.trials is not None:
        if search["kind"] == "grid":
            raise ConfigError(
                f"--trials {args.trials} limits the number of random draws, but a grid search "
                "runs every combination; add --search random or optuna, or leave --trials out"
            )
        search["trials"] = args.trials
    scheduler = given.get("scheduler", {})
    if args.scheduler is not None and args.scheduler != scheduler.get("kind"):
        scheduler = {"kind": args.scheduler}
    _check_options(args.options, search["kind"], scheduler.get("kind", "none"))
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


def _fixed(run: Run, assignments: Sequence[str]) -> Run:
    """Apply to a run the settings that all trials share.

    Raises:
        ConfigError: as `override`; of a value that was meant for a domain, what is wrong with it.
    """
    try:
        return override(run, assignments)
    except ConfigError:
        for text in assignments:
            path, _, value = text.partition("=")
            if is_nearly_domain(value):
                parse_domain(path, value)
        raise


def _parted(assignment: str) -> tuple[str, str, str]:
    return assignment.partition("=")


def _said_otherwise(path: str) -> str | None:
    """Return the path of the alternative stage setting, such as `epochs` for `steps`; None if there
    is no alternative.
    """
    pairs = StageConfig.replaces
    other = {**pairs, **{second: first for first, second in pairs.items()}}
    stage, _, name = path.rpartition(".")
    return f"{stage}.{other[name]}" if name in other else None


def _lengths(space: Mapping[str, Any]) -> list[str]:
    """Assign a valid value to each searched setting that has an alternative, so that the base run
    is valid.
    """
    chosen = {path: domain for path, domain in space.items() if _said_otherwise(path)}
    return [f"{path}={domain.ends[0]}" for path, domain in parse_space(chosen).items()]


def _check_options(options: Sequence[str], search: str, scheduler: str) -> None:
    """Raise if a `--with` option does not belong to the chosen search or scheduler."""
    kinds = {path: value for path, _, value in (option.partition("=") for option in options)}
    for part, kind, none, instead in (
        ("search", search, "grid", "--search random or optuna"),
        ("scheduler", scheduler, "none", "--scheduler asha"),
    ):
        given = [path for path in kinds if path.startswith(f"{part}.") and path != f"{part}.kind"]
        if given and kinds.get(f"{part}.kind", kind) == none:
            raise ConfigError(
                f"--with {given[0]}: the {part} is {none!r}, which has no settings; add {instead}"
            )


def named_sweep(name: str, sweeps: Sweeps) -> PrintedSweep:
    """Return the predefined sweep with this name.

    Raises:
        ConfigError: no such sweep; the message names the nearest one.
    """
    if name not in sweeps:
        raise ConfigError(f"no sweep {name!r}; {nearest(name, sweeps)}")
    return sweeps[name]()


def _given(
    args: argparse.Namespace, sweeps: Sweeps
) -> tuple[dict[str, Any], Mapping[str, Mapping[str, float]], str]:
    """Return the settings to start from, and the paper's scores if the sweep is a paper's table."""
    if args.sweep is not None and args.recipe is not None:
        raise ConfigError(
            "--sweep and --recipe exclude each other, because a sweep names its own runs; leave "
            "one out"
        )
    if args.sweep is None:
        run = _base_run(args.recipe or _RECIPE)
        return {"name": f"{run.name}-sweep", "runs": {"": run}}, {}, ""
    if not sweeps or args.sweep.endswith((".yaml", ".yml")):
        return _of_file(args.sweep), {}, ""
    table = named_sweep(args.sweep, sweeps)
    values = table.sweep.model_dump(mode="json", exclude={"runs"})
    return {**values, "runs": dict(table.sweep.runs)}, table.printed, table.source


def _of_file(path: str) -> dict[str, Any]:
    """Read a sweep's settings from a file, whose runs may be complete or recipes with changed
    settings.
    """
    values = read_mapping(path)
    if "recipe" in values:
        entry = {"recipe": values.pop("recipe"), "set": values.pop("set", [])}
        values["runs"] = {"": entry}
    runs = values.get("runs")
    if not isinstance(runs, dict) or not runs:
        raise ConfigError(
            f"the sweep {path!r} has no runs: add recipe: <name>, or add runs: with a recipe for "
            f"each run (label: {{recipe: <name>, set: [path=value]}})"
        )
    space = values.get("space")
    lengths = _lengths(space) if isinstance(space, dict) else []
    values["runs"] = {label: _run_of(path, label, entry, lengths) for label, entry in runs.items()}
    values.setdefault("name", "sweep")
    return values


def _base_run(recipe: str) -> Run:
    return named_or_read(recipe, recipe_names(), get_recipe, Run.read)


class _OfRecipe(Settings):
    """A run in a sweep's file that is written as a recipe with changed settings."""

    recipe: str
    set: tuple[str, ...] = ()


def _run_of(path: str, label: str, entry: Any, searched: Sequence[str]) -> Run:
    if not isinstance(entry, dict):
        raise ConfigError(
            f"the run {label!r} of {path!r} must be a mapping with the key recipe, or all "
            "settings of a run"
        )
    if "recipe" not in entry:
        return parse(Run, entry)
    given = parse(_OfRecipe, entry)
    base = _base_run(given.recipe)
    _check_together(base, [*given.set, *searched])
    return override(base, given.set)


def _usual_search(domains: Mapping[str, Any]) -> str:
    return "grid" if all(domain.is_finite for domain in domains.values()) else "random"


def _print_list(sweeps: Sweeps, out: TextIO) -> None:
    """Write a line for each named sweep, or for each recipe that can be searched."""
    if not sweeps:
        from rayembed.pipeline.run.dry_run import print_recipes

        print_recipes(map(get_recipe, recipe_names()), out=out)
        return
    from rayembed.display.tables import Table, console
    from rayembed_extras.sweeps.trials import known_trials

    named = {name: named_sweep(name, sweeps) for name in sweeps}
    rows = [[name, s.about, s.source, len(known_trials(s.sweep))] for name, s in named.items()]
    console(out).print(Table(["sweep", "what it compares", "source", "trials"], rows))


_OPTIONS = (
    option(
        "--recipe NAME|run.yaml",
        f"run whose settings are searched; default: {_RECIPE}",
        names=recipe_names,
    ),
    option(
        "--set path=value|domain",
        "change a setting of all runs, or search it: path=grid(a, b), choice(a, b), "
        "uniform(low, high), loguniform(low, high), integers(low, high)",
        often=True,
        dest="assignments",
    ),
    STAGE,
    option(
        "--leave-one-out",
        "compare the run with runs without one data set each, by its own sets and tasks",
    ),
    option("--search {grid,random,optuna}", "how values are drawn"),
    option("--trials N", "draws of random and optuna", type=int),
    option("--scheduler {none,asha}", "what ends trials early"),
    option(
        "--with path=value",
        "a setting of the sweep itself: metric.of=evaluation, scheduler.grace_steps=100, "
        "trials_at_once=2",
        often=True,
        dest="options",
    ),
    option("--name NAME", "name of the sweep; a sweep submitted again under its name resumes"),
)

run_sweep_job = sweep_job()
"""The job that searches the settings of a recipe."""
