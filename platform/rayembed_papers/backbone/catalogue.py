"""Look up tasks and finetunings by name, and select the ones that a run needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rayembed.config.settings import nearest
from rayembed.errors import ConfigError
from rayembed_papers.backbone import glue, xtreme_r
from rayembed_papers.backbone.settings import BackboneRun
from rayembed_papers.backbone.tasks import Finetuning, Task

FINETUNINGS: Mapping[str, Finetuning] = {
    one.name: one for one in (*glue.FINETUNINGS, *xtreme_r.FINETUNINGS)
}

TASKS: Mapping[str, Task] = {task.name: task for task in (*glue.TASKS, *xtreme_r.TASKS)}

BENCHMARKS = (glue.BENCHMARK, xtreme_r.BENCHMARK)

_ON_THE_WAY = {task.name: task for task in xtreme_r.STEPS_ON_THE_WAY}


@dataclass(frozen=True)
class Plan:
    """The tasks of a run, and the finetunings that their scores require."""

    tasks: tuple[Task, ...]
    """Requested tasks, in the tables' order."""
    finetunings: tuple[Finetuning, ...]
    """Finetunings with the run's protocol; each comes after the one that it starts from."""


def plan_of(run: BackboneRun) -> Plan:
    """Select the tasks and finetunings of a run.

    Raises:
        ConfigError: an unknown benchmark or task (with the nearest name), one that cannot be had,
            or a changed protocol that is out of range.
    """
    tasks = _selected(run.benchmarks, run.tasks)
    names: list[str] = []
    for task in tasks:
        _add(task.finetuning, names, from_mnli=run.from_mnli)
    wanted = [task.name for task in tasks]
    found = []
    for name in names:
        one = FINETUNINGS[name]
        changed = run.protocol.applied_to(one.protocol)
        start = _start(one, from_mnli=run.from_mnli)
        found.append(replace(one, protocol=changed, start=start).only(wanted))
    return Plan(tuple(tasks), tuple(found))


def task_named(name: str) -> Task:
    """Find a task by name among those on which a finetuning is scored."""
    return TASKS.get(name) or _ON_THE_WAY[name]


def _selected(benchmarks: Sequence[str], names: Sequence[str]) -> list[Task]:
    for benchmark in benchmarks:
        if benchmark not in BENCHMARKS:
            raise ConfigError(f"no benchmark {benchmark!r}; {nearest(benchmark, BENCHMARKS)}")
    for name in names:
        if name in xtreme_r.LEFT_OUT:
            raise ConfigError(f"the task {name!r} cannot be scored: {xtreme_r.LEFT_OUT[name]}")
        if name not in TASKS:
            raise ConfigError(f"no task {name!r}; {nearest(name, TASKS)}")
    return [task for task in TASKS.values() if task.benchmark in benchmarks or task.name in names]


def _add(name: str, names: list[str], *, from_mnli: bool) -> None:
    """Append a finetuning, preceded by the finetuning whose model it starts from."""
    start = _start(FINETUNINGS[name], from_mnli=from_mnli)
    if start is not None:
        _add(start, names, from_mnli=from_mnli)
    if name not in names:
        names.append(name)


def _start(one: Finetuning, *, from_mnli: bool) -> str | None:
    return None if one.start == glue.MNLI and not from_mnli else one.start
