"""Print the dry run of a sweep: its trials, the data they need, and how many run at the
same time.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TextIO

from rayembed.config.data_steps import step_folders
from rayembed.config.placement import Placement
from rayembed.display.tables import Table, console, facts_table
from rayembed.errors import PlacementError
from rayembed.machine.cores import num_cores
from rayembed.machine.device import gpus_here, placed_here
from rayembed.machine.hardware import Precision, auto_precision
from rayembed.pipeline.run.dry_run import estimates
from rayembed.training.memory.capacity import validation_resources, worker_resources
from rayembed_extras.sweeps.concurrency import trials_at_once
from rayembed_extras.sweeps.folder import sweep_settled
from rayembed_extras.sweeps.settings import Sweep, metric_source
from rayembed_extras.sweeps.trials import (
    Trial,
    compared_as,
    counted,
    data_folders,
    data_runs,
    known_trials,
)


def print_sweep(sweep: Sweep, *, out: TextIO, tables: TextIO) -> None:
    """Write the sweep as YAML to `out` and tables of its trials and data to `tables`.

    They are apart so that `--dry-run > sweep.yaml` gives a file which `--sweep sweep.yaml` takes.

    Raises:
        ConfigError: a trial that cannot be.
    """
    out.write(f"# sweep {sweep.name}, fingerprint {sweep.fingerprint}\n{sweep.to_yaml()}")
    out.flush()
    printer = console(tables)
    sweep = sweep.placed(use_gpu=placed_here(sweep.base.placement).use_gpu)
    # Names of trials hold the number type, which the sweep asks its nodes for.
    trials = known_trials(sweep_settled(sweep, _precision_here))
    printer.print(_trials(sweep, trials))
    printer.print(_data(sweep, trials))
    printer.print(_at_once(sweep))
    printer.print(expected_time(sweep, trials, len(trials) or _number(sweep)))


def _precision_here(placement: Placement) -> Precision:
    return auto_precision("cuda" if placement.on_gpu else "cpu")


def expected_time(sweep: Sweep, trials: Sequence[Trial], number: int) -> str:
    """Estimate the time of trials, as one line of text.

    Args:
        trials: that are known and have to run; none: the search chooses them later.
        number: of trials that have to run.
    """
    runs = [trial.run for trial in trials]
    base = counted(sweep.base)
    taken = runs or [compared_as(base, base.name, sweep.metric.weights)] * number
    steps = sum(run.total_steps for run in taken)
    most = (
        ""
        if sweep.scheduler.kind == "none"
        else " at most, because the scheduler stops some trials early"
    )
    summary = f"{number} trial{'' if number == 1 else 's'} with {steps:,} steps in all{most}"
    found = estimates().time(taken, data_runs(sweep, runs), base)
    return f"{summary}. {found or 'How long they take is not known'}"


def _trials(sweep: Sweep, trials: list[Trial]) -> Table:
    paths = list(sweep.domains)
    if not trials:
        domains = [[path, f"{d.kind}({', '.join(d.ends)})"] for path, d in sweep.domains.items()]
        title = f"{sweep.name}: {_number(sweep)} trials, drawn one after the other"
        return Table(["setting", "values"], domains, title=title)
    rows = []
    for trial in trials:
        values = [trial.values.get(path, "") for path in paths]
        run = trial.run
        expected = any(stage.epochs for stage in run.stages)
        steps = f"{'about ' if expected else ''}{run.total_steps:,}"
        rows.append([trial.key, trial.label or sweep.base.name, *values, steps])
    title = f"{sweep.name}, fingerprint {sweep.fingerprint}: {len(trials)} trials, compared by "
    heads = ["trial", "run", *paths, "steps"]
    align = "l" * (len(heads) - 1) + "r"
    return Table(heads, rows, title=title + metric_source(sweep), align=align)


def _data(sweep: Sweep, trials: list[Trial]) -> Table:
    """List each result of data preparation with the number of trials that use it."""
    runs = data_runs(sweep, [trial.run for trial in trials])
    all_trials = [trial.run for trial in trials] or runs
    of_trials = Counter(folder for run in all_trials for folder in data_folders(run))
    order = (*step_folders(), "plan")
    rows = [
        [folder.kind, folder.name, folder.made_of, of_trials[folder]]
        for folder in sorted(of_trials, key=lambda f: (order.index(f.kind), f.name, f.made_of))
    ]
    title = f"Data: {len(of_trials)} results of preparation for {len(runs)} different plans; those "
    title += "that are already in the storage are reused"
    return Table(["step", "of", "settings", "trials that take it"], rows, title=title)


def _at_once(sweep: Sweep) -> Table:
    placement, validates = sweep.base.placement, sweep.validates
    workers = " to ".join(map(str, sorted({placement.fewest_workers, placement.workers})))
    facts = {"a trial takes": f"{workers} × {worker_resources(placement)}"}
    if validates:
        beside = f"{placement.validations_at_once} × {validation_resources(placement)}"
        facts["validation beside it"] = beside
    cpus, gpus = float(num_cores()), gpus_here().number
    here = {"CPU": cpus, "GPU": float(gpus)}
    try:
        number = trials_at_once(placement, [here], validates=validates)
        summary = str(min(number, sweep.trials_at_once or number))
    except PlacementError:
        summary = "none"
    facts[f"on a machine like this one ({cpus:g} CPUs, {gpus or 'no'} GPU)"] = summary
    facts["at most (trials_at_once)"] = str(sweep.trials_at_once or "as many as fit")
    facts["scheduler"] = sweep.scheduler.kind
    return facts_table("Trials at once", facts)


def _number(sweep: Sweep) -> int:
    return getattr(sweep.search, "trials", 0)
