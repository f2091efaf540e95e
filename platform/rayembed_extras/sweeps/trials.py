"""Build the trials of a sweep, and find the data that they need. Independent of Ray."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rayembed.config.data import DatasetConfig
from rayembed.config.data_steps import data_steps
from rayembed.config.document import fingerprint
from rayembed.config.run import Run, without_general
from rayembed.data.epochs import estimated_steps, expected_records, resolve
from rayembed.data.plan.order import columns_for
from rayembed.errors import ConfigError, require_packages
from rayembed_extras.sweeps.settings import (
    GridSearch,
    OptunaSearch,
    RandomSearch,
    Sweep,
    check_metric,
    held_out_decides,
)
from rayembed_extras.sweeps.space import Domain, all_values, apply, corners, draws
from rayembed_extras.sweeps.trial_store import TrialRecord

MOST_CORNERS = 512
"""Maximum combinations of a space's extremes that are validated before the start."""

MOST_DATA = 64
"""Maximum number of distinct data sets prepared for settings that a search may choose."""


@dataclass(frozen=True)
class Trial:
    """One training run of a sweep, with its setting values."""

    run: Run
    """Run under the trial's name, scored only on the tasks that the sweep compares."""
    label: str
    """Label of the base run that the trial varies."""
    values: Mapping[str, str]
    """Setting values from the space."""

    @property
    def key(self) -> str:
        """Name of the trial; equal values in the same sweep give the same name."""
        return self.run.name


def make_trial(sweep: Sweep, label: str, values: Mapping[str, str]) -> Trial:
    """Build the trial that has the given setting values.

    Raises:
        ConfigError: the settings refuse the values.
    """
    run = apply(sweep.runs[label], values)
    name = _name(sweep, label, values, run)
    return Trial(compared_as(counted(run), name, sweep.metric.weights), label, dict(values))


def compared_as(run: Run, name: str, weighted: Collection[str] = ()) -> Run:
    """Copy a run under another name so that it computes only the scores that the sweep
    compares.

    Baselines, the untrained model, the guard's mixtures and its general tasks are left out: they
    would be scored again for each trial.

    Args:
        weighted: names of the tasks that the sweep's metric weights, general ones among them.
    """
    only = {"baselines": (), "before_training": False, "guard": None}
    evaluation = without_general(run, weighted).model_copy(update=only)
    return run.model_copy(update={"name": name, "evaluation": evaluation})


def _name(sweep: Sweep, label: str, values: Mapping[str, str], run: Run) -> str:
    decided_by = {"label": label, "values": dict(values), "run": run.fingerprint}
    return f"{sweep.name}-{fingerprint(decided_by)[:8]}"


def counted(run: Run) -> Run:
    """Compute the run's steps from its stages' `epochs`, and drop clusters that no stage uses; data
    sets are counted once for all trials.

    Raises:
        ConfigError: as `resolve`.
    """
    return resolve(run, _once)


def _once(dataset: DatasetConfig, root: str) -> int | None:
    """Estimate the number of training records of a data set, cached for all trials."""
    return _records(dataset.model_dump_json(), root)


@lru_cache(maxsize=1024)
def _records(dataset: str, root: str) -> int | None:
    return expected_records(DatasetConfig.model_validate_json(dataset), root)


def _are_steps_known(run: Run) -> bool:
    """Whether the number of steps of each stage is known, from settings or an estimate of its
    records.
    """
    of_epochs = [stage for stage in run.stages if stage.epochs is not None]
    return len(estimated_steps(run, _once)) == len(of_epochs)


def key_of(sweep: Sweep, label: str, values: Mapping[str, str]) -> str:
    """Key of a trial by its values; also defined for invalid values, whose trial then fails at its
    start.
    """
    try:
        return _name(sweep, label, values, apply(sweep.runs[label], values))
    except ConfigError:
        return f"{sweep.name}-{fingerprint([label, dict(values)])[:8]}"


def unfinished(trials: Sequence[Trial], past: Mapping[str, TrialRecord]) -> list[Trial]:
    """Select the trials that must still run or resume."""
    return [t for t in trials if not (t.key in past and past[t.key].is_done)]


def number_left(sweep: Sweep, trials: Sequence[Trial], past: Mapping[str, TrialRecord]) -> int:
    """Number of trials that remain to run; trials that Optuna repeats are counted once.

    Args:
        trials: those that are known beforehand; none with Optuna.
        past: records of earlier submissions.
    """
    if not isinstance(sweep.search, OptunaSearch):
        return len(unfinished(trials, past))
    wanted = sweep.search.trials
    if all(domain.is_finite for domain in sweep.domains.values()):
        wanted = min(wanted, math.prod(len(domain.values) for domain in sweep.domains.values()))
    return max(0, wanted - sum(record.is_done for record in past.values()))


def known_trials(sweep: Sweep) -> list[Trial]:
    """List the trials that are known before the sweep starts; none with Optuna, which chooses them
    later.

    Raises:
        ConfigError: a combination that the settings refuse.
    """
    values: list[dict[str, str]]
    match sweep.search:
        case GridSearch():
            values = list(all_values(sweep.domains))
        case RandomSearch(trials=number, seed=seed):
            values = list(draws(sweep.domains, number, seed))
        case OptunaSearch():
            return []
    trials = [make_trial(sweep, label, one) for one in values for label in sweep.runs]
    return list({trial.key: trial for trial in trials}.values())


def check_sweep(sweep: Sweep) -> None:
    """Check a sweep's settings: every run is valid, yields the compared score, and uses data
    prepared in advance.

    Raises:
        ConfigError: a setting, a value, a metric or a scheduler that does not fit; or what draws
            values and weighs settings is not installed.
    """
    require_packages("a sweep", "sweeps", "optuna")
    check_metric(sweep)
    _records.cache_clear()  # files may have changed since an earlier sweep of this process
    if sweep.base.placement.runtime == "local":
        raise ConfigError(
            "placement.runtime=local runs in one process, but Ray Tune runs the trials of a "
            "sweep in processes of their own; set placement.runtime=auto"
        )
    known = known_trials(sweep)
    trials = known or list(_corner_trials(sweep))
    _check_held_out(sweep, trials)
    if sweep.scheduler.kind == "asha":
        grace = sweep.scheduler.grace_steps
        total = max(trial.run.total_steps for trial in trials)
        if (
            grace is not None
            and grace > total
            and all(_are_steps_known(trial.run) for trial in trials)
        ):
            raise ConfigError(
                f"scheduler.grace_steps {grace} exceeds the {total} steps of a trial, so no trial "
                "would be stopped; lower scheduler.grace_steps, or set scheduler=none"
            )
    if not known:
        data_runs(sweep, [])


def _check_held_out(sweep: Sweep, trials: Sequence[Trial]) -> None:
    """Check that trials compared on held-out rows hold out the same rows."""
    parts = {
        fingerprint(
            [
                d.model_dump(mode="json", include={"name", "source", "held_out"})
                for d in trial.run.held_out_datasets
            ]
        )
        for trial in trials
        if held_out_decides(sweep, trial.run)
    }
    if len(parts) > 1:
        raise ConfigError(
            "the trials are compared by held-out rows, but they hold out different rows. Make "
            "source and held_out of the data sets the same in all trials (--set path=value), or "
            "compare trials by sets of their own (evaluation.own_sets, with metric.of=evaluation)"
        )


def _corner_trials(sweep: Sweep) -> Iterator[Trial]:
    for label in sweep.runs:
        for values in corners(sweep.domains, MOST_CORNERS):
            yield make_trial(sweep, label, values)


@dataclass(frozen=True)
class DataFolder:
    """A result of data preparation (records, mined negatives, plan, …), identified by its
    inputs.
    """

    kind: str
    """Kind of the result: `records`, `filtered`, `mined`, `clustered`, `plan`."""
    name: str
    """Name of the data set, or of the stage."""
    made_of: str
    """Fingerprint of the settings that affect it, without the content of files."""


def data_folders(run: Run) -> tuple[DataFolder, ...]:
    """List the results of data preparation that a run needs, in order; equal settings give equal
    entries.
    """
    common: list[Any] = [run.data.root]
    # A held-out part decides the records of all data sets, which must not have its texts.
    for dataset in run.held_out_datasets:
        common.append(dataset.model_dump(mode="json", include={"name", "source", "held_out"}))
    found: list[DataFolder] = []
    last: dict[str, str] = {}
    for dataset in run.used_datasets:
        values = dataset.model_dump(mode="json")
        steps = {step.kind: values.pop(step.kind, None) for step in data_steps()}
        made_of = fingerprint([*common, values, run.seed if dataset.draws_by_seed else None])
        found.append(DataFolder("records", dataset.name, made_of))
        for step in dataset.steps:
            seed = run.seed if step.draws_by_seed else None
            made_of = fingerprint([made_of, step.folder, steps[step.kind], seed])
            found.append(DataFolder(step.folder, dataset.name, made_of))
        last[dataset.name] = made_of
    for stage in run.stages:
        inputs = {name: last[name] for name in stage.datasets}
        batch = stage.batch.model_dump(mode="json")
        teachers = [teacher.model_dump(mode="json") for teacher in stage.teachers]
        decided_by = [stage.name, stage.datasets, batch, stage.length, run.seed, inputs]
        decided_by += [teachers, columns_for(stage.loss)]
        found.append(DataFolder("plan", stage.name, fingerprint(decided_by)))
    return tuple(found)


def runs_of_data(runs: Sequence[Run]) -> list[Run]:
    """Select one run for each distinct data preparation, in order."""
    return list({data_folders(run): run for run in reversed(runs)}.values())[::-1]


def data_runs(sweep: Sweep, runs: Sequence[Run]) -> list[Run]:
    """Select one run for each distinct data preparation that the sweep's present and future trials
    need.

    Args:
        runs: of the trials that are known; none: the search chooses them later.

    Raises:
        ConfigError: a search would choose data among more than are prepared beforehand.
    """
    if runs:
        return runs_of_data(runs)
    label, domains = next(iter(sweep.runs)), sweep.domains
    first = {path: domain.ends[0] for path, domain in domains.items()}
    changing = [path for path in domains if _changes_data(sweep, label, path, domains, first)]
    for path in changing:
        if not domains[path].is_finite:
            raise ConfigError(
                f"{path} changes the data, which are prepared before the first trial, but its "
                f"{domains[path].kind}(…) has infinitely many values; write choice(…), or use "
                "--search random, whose values are known beforehand"
            )
    if math.prod(len(domains[path].values) for path in changing) > MOST_DATA:
        raise ConfigError(
            f"{', '.join(changing)} need more than {MOST_DATA} distinct data preparations; offer "
            "fewer values, or use --search random"
        )
    combinations = itertools.product(*(domains[path].values for path in changing))
    values = [{**first, **dict(zip(changing, one, strict=True))} for one in combinations]
    return runs_of_data([make_trial(sweep, label, one).run for one in values])


def _changes_data(
    sweep: Sweep, label: str, path: str, domains: Mapping[str, Domain], first: Mapping[str, str]
) -> bool:
    made = {
        data_folders(make_trial(sweep, label, {**first, path: end}).run)
        for end in domains[path].ends
    }
    return len(made) > 1
