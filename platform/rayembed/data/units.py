"""Units of work: a task over many independent units, which goes on where it was killed.

The task and its units are plain picklable objects. What runs them, this process or Ray Data, is
an `Execute`; results and files are the same.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol

from rayembed.assets.storage import join, list_files, read_bytes, write_atomic

log = logging.getLogger(__name__)

Result = dict[str, Any]
"""What a task tells of a unit: plain values for JSON. `rows_in`, `rows_out` and `rejected` (reason
→ count) where it makes rows of rows; see `add_up`."""

_SECONDS_BETWEEN_LOGS = 5.0
_BAR = 20
"""Characters of the bar."""


class Unit(Protocol):
    """A piece of work."""

    @property
    def key(self) -> str:
        """Names the unit among those of its task: letters, digits, `-` and `_`."""
        ...


Task = Callable[..., Result]
"""Does one unit. Doing it twice, also at the same time, gives the same files and result.

Called with the unit, and with `"cuda"` after it in a process that has a GPU to itself; no other may
use a GPU.
"""

Needs = Literal["cpu", "gpu or cpu", "gpu or machine"]
"""What a task gets to itself: a GPU only where there are some; a machine for a model that uses
all of its CPUs. With a GPU or a machine its processes stay, and with them what they have loaded."""

Execute = Callable[[Task, Sequence[Any], Needs], Iterator[Result]]
"""Runs the task on every unit and yields the results in the units' order."""


def in_process(task: Task, units: Sequence[Any], needs: Needs = "cpu") -> Iterator[Result]:
    """Results of the units, one after the other in this process, without a GPU."""
    for unit in units:
        yield task(unit)


class _Kept:
    """The task, whose results are written beside its output as soon as they are there."""

    def __init__(self, task: Task, folder: str, what: str) -> None:
        self.task, self.folder, self.what = task, folder, what

    def __call__(self, unit: Unit, *device: str) -> Result:
        result = self.task(unit, *device)
        content = json.dumps(result, sort_keys=True, ensure_ascii=False).encode()
        write_atomic(_result_path(self.folder, self.what, unit.key), content)
        return result


def run_units(
    folder: str,
    what: str,
    task: Task,
    units: Sequence[Unit],
    execute: Execute,
    needs: Needs = "cpu",
) -> list[Result]:
    """The result of each unit; those that `folder` has from an earlier try are not done again.

    Args:
        folder: where results are kept, in `units`. It goes no later than what the tasks write: a
            result tells that the unit's files are there.
        what: names the task within the folder and in the log.
    """
    finished = _finished(folder)
    name = _result_path("", what, "").rsplit("/", 1)[-1].removesuffix(".json")
    made: dict[str, Result] = {}
    for unit in units:
        if f"{name}{unit.key}.json" in finished:
            found = _kept_result(_result_path(folder, what, unit.key))
            made |= {} if found is None else {unit.key: found}
    missing = [unit for unit in units if unit.key not in made]
    if made:
        log.info("%s: %d of %d units are there", what, len(units) - len(missing), len(units))
    results = run_tasks(what, _Kept(task, folder, what), missing, execute, needs)
    made |= {unit.key: result for unit, result in zip(missing, results, strict=True)}
    return [made[unit.key] for unit in units]


def run_tasks(
    what: str, task: Task, units: Sequence[Unit], execute: Execute, needs: Needs = "cpu"
) -> list[Result]:
    """The result of each unit, all of them done now; none is kept.

    Args:
        what: names the task in the log.
    """
    made: list[Result] = []
    began = logged = time.monotonic()
    rows = 0
    for result in execute(task, units, needs) if units else ():
        made.append(result)
        rows += int(result.get("rows_in", 0))
        now = time.monotonic()
        if now - logged > _SECONDS_BETWEEN_LOGS or len(made) == len(units):
            logged = now
            log.info("%s: %s", what, _progress(len(made), len(units), rows, now - began))
    assert len(made) == len(units), (len(made), len(units))
    return made


def _progress(done: int, of: int, rows: int, seconds: float) -> str:
    """A bar, units, rows with their rate where tasks count them, and the time that is left."""
    filled = round(_BAR * done / of)
    parts = [f"{'█' * filled}{'░' * (_BAR - filled)} {done}/{of}"]
    if rows:
        parts.append(f"{rows:,} rows, {rows / max(seconds, 1e-9):,.0f} rows/s")
    if done < of:
        parts.append(f"{timedelta(seconds=round(seconds / done * (of - done)))} left")
    else:
        parts.append(f"{timedelta(seconds=round(seconds))}")
    return ", ".join(parts)


def add_up(results: Sequence[Mapping[str, Any]]) -> tuple[int, int, dict[str, int]]:
    """Rows in, rows out and rejected rows by reason over all results; none is lost.

    A task that makes several rows of one, or one of several, tells `rows_used`: of the rows in,
    those that were not rejected.
    """
    rows_in = sum(result["rows_in"] for result in results)
    rows_out = sum(result["rows_out"] for result in results)
    used = sum(result.get("rows_used", result["rows_out"]) for result in results)
    rejected: dict[str, int] = {}
    for result in results:
        for reason, count in result["rejected"].items():
            rejected[reason] = rejected.get(reason, 0) + count
    assert rows_in == used + sum(rejected.values()), (rows_in, used, rejected)
    return rows_in, rows_out, dict(sorted(rejected.items()))


def _result_path(folder: str, what: str, key: str) -> str:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in what)
    return join(folder or ".", "units", f"{name}.{key}.json")


def _kept_result(path: str) -> Result | None:
    """The result in a file; None: it is broken, and the unit is done again."""
    content = read_bytes(path)
    try:
        result = json.loads(content)
    except ValueError as error:
        log.warning("%s is broken (%s); its unit is done again", path, error)
        return None
    return result if isinstance(result, dict) else None


def _finished(folder: str) -> set[str]:
    return set(list_files(join(folder, "units"), recursive=False))
