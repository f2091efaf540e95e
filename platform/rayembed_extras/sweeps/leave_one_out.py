"""Runs that leave out one data set each, to show what every data set is worth."""

from collections.abc import Mapping
from typing import Any

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import ConfigError

ALL = "all data sets"
"""Label of the run with all data sets, to which the others are compared."""


def leave_one_out(runs: Mapping[str, Run]) -> tuple[dict[str, Run], dict[str, Any]]:
    """Make a run with all data sets and one without each of them; return them with the metric.

    All are compared by the tasks that every run is scored on, each with weight 1: held-out parts
    do not count, because a run without a data set has no score of its part.

    Args:
        runs: a single run by its label, with at least two data sets.

    Raises:
        ConfigError: there are several runs, a stage has a single data set, or there are no tasks.
    """
    if len(runs) != 1:
        raise ConfigError(
            f"--leave-one-out compares the data sets of one run, but the sweep has {len(runs)} "
            "runs; name a single recipe"
        )
    (run,) = runs.values()
    for stage in run.stages:
        if len(stage.datasets) < 2:
            raise ConfigError(
                f"--leave-one-out: the stage {stage.name!r} has the single data set "
                f"{next(iter(stage.datasets))!r}, and nothing is left without it; name stages "
                "with several data sets by --stage"
            )
    evaluation = run.evaluation
    tasks = [*evaluation.tasks, *(own.name for own in evaluation.own_sets)]
    if not tasks:
        raise ConfigError(
            "--leave-one-out needs tasks that all runs are scored on, since a run without a data "
            "set has no score of its held-out part; set evaluation.own_sets, "
            "evaluation.benchmarks or evaluation.tasks"
        )
    names = [dataset.name for dataset in run.used_datasets]
    made = {ALL: run, **{f"without {name}": _without(run, name) for name in names}}
    return made, {"of": "evaluation", "weights": dict.fromkeys(tasks, 1.0)}


def _without(run: Run, name: str) -> Run:
    """Copy a run without a data set in any of its stages."""
    values = run.model_dump(mode="json")
    for stage in values["stages"]:
        stage["datasets"].pop(name, None)
    values["data"]["datasets"] = [d for d in values["data"]["datasets"] if d["name"] != name]
    return parse(Run, values)
