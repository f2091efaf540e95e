"""Output of `--dry-run` of a sweep: its trials, the data that they need, how many run at once."""

import os
from collections import Counter
from typing import TextIO

from rich.console import Console
from rich.table import Table

from rayembed.config.sweep import Sweep, metric_source
from rayembed.errors import PlacementError
from rayembed.training.capacity import validation_resources, worker_resources
from rayembed.tuning.concurrency import trials_at_once
from rayembed.tuning.trials import Trial, data_folders, data_runs, known_trials

_WIDTH = 140


def print_sweep(sweep: Sweep, *, out: TextIO, tables: TextIO) -> None:
    """Write the sweep as YAML to `out` and tables of what it would do to `tables`.

    They are apart so that `--dry-run > sweep.yaml` gives a file which `--sweep sweep.yaml` takes.

    Raises:
        ConfigError: a trial that cannot be.
    """
    out.write(f"# sweep {sweep.name}, fingerprint {sweep.fingerprint}\n{sweep.to_yaml()}")
    out.flush()
    console = Console(
        file=tables, width=None if tables.isatty() else _WIDTH, highlight=False, markup=False
    )
    trials = known_trials(sweep)
    console.print(_trials(sweep, trials))
    console.print(_data(sweep, trials))
    console.print(_at_once(sweep))


def _trials(sweep: Sweep, trials: list[Trial]) -> Table:
    paths = list(sweep.domains)
    if not trials:
        table = Table(
            "setting",
            "values",
            title=f"{sweep.name}: {_number(sweep)} trials, drawn one after the other",
            title_justify="left",
        )
        for path, domain in sweep.domains.items():
            table.add_row(path, f"{domain.kind}({', '.join(domain.ends)})")
        return table
    title = f"{sweep.name}, fingerprint {sweep.fingerprint}: {len(trials)} trials, compared by "
    table = Table(title=title + metric_source(sweep), title_justify="left")
    table.add_column("trial", no_wrap=True)
    for column in ("run", *paths):
        table.add_column(column, overflow="fold")
    table.add_column("steps", justify="right")
    for trial in trials:
        steps = sum(stage.steps for stage in trial.run.stages)
        label = trial.label or sweep.base.name
        values = [trial.values.get(path, "") for path in paths]
        table.add_row(trial.key, label, *values, f"{steps:,}")
    return table


def _data(sweep: Sweep, trials: list[Trial]) -> Table:
    """Each result of preparation once, with how many of the different data take it."""
    runs = data_runs(sweep, [trial.run for trial in trials])
    taken = Counter(folder for run in runs for folder in data_folders(run))
    all_trials = [trial.run for trial in trials] or runs
    of_trials = Counter(folder for run in all_trials for folder in data_folders(run))
    table = Table(
        "step",
        "of",
        "settings",
        "trials that take it",
        title=f"Data: {len(taken)} results of preparation for {len(runs)} different plans; those "
        "that lie in storage already are taken as they are",
        title_justify="left",
    )
    for folder in sorted(taken, key=lambda f: (_ORDER.index(f.kind), f.name, f.made_of)):
        table.add_row(folder.kind, folder.name, folder.made_of, str(of_trials[folder]))
    return table


_ORDER = ("records", "filtered", "mined", "clustered", "plan")


def _at_once(sweep: Sweep) -> Table:
    placement = sweep.base.placement
    validates = any(run.evaluation.validation is not None for run in sweep.runs.values())
    table = Table(show_header=False, title="Trials at once", title_justify="left")
    workers = " to ".join(map(str, sorted({placement.fewest_workers, placement.workers})))
    table.add_row("a trial takes", f"{workers} × {worker_resources(placement)}")
    if validates:
        beside = f"{placement.validations_at_once} × {validation_resources(placement)}"
        table.add_row("validation beside it", beside)
    cpus = float(os.cpu_count() or 1)
    try:
        number = trials_at_once(placement, [{"CPU": cpus}], validates=validates)
        told = str(min(number, sweep.trials_at_once or number))
    except PlacementError:
        told = "none"
    table.add_row(f"on a machine like this one ({cpus:g} CPUs, no GPU)", told)
    table.add_row("at most (trials_at_once)", str(sweep.trials_at_once or "as many as fit"))
    table.add_row("scheduler", sweep.scheduler.kind)
    return table


def _number(sweep: Sweep) -> int:
    return getattr(sweep.search, "trials", 0)
