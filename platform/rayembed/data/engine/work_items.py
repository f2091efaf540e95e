"""Run a task on many independent work items, so that a killed job resumes with the unfinished
items.

A task and its items are plain picklable objects. An `Execute` runs them in this process or on Ray
Data, with the same results and files.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import join, list_files
from rayembed.display.progress import bar, doing, duration, hearing
from rayembed.errors import ArtifactError, StorageError

log = logging.getLogger(__name__)

Result = dict[str, Any]
"""Report of a task on one item, in plain JSON values. Tasks that turn rows into rows report
`rows_in`, `rows_out` and `rejected` (reason → count); see `add_up`. Rows that are shown to people
are `examples`, each with a `reason`; of those of all items only the first are kept."""

EXAMPLES_KEPT = 20
"""Number of examples for each reason that stay in memory and that a manifest shows."""


class WorkItem(Protocol):
    """Protocol of an item that a task works on: it has a unique key."""

    @property
    def key(self) -> str:
        """Unique name of the item within its task: letters, digits, `-` and `_`."""
        ...


Task = Callable[..., Result]
"""Function that processes one item. Repeating it, also concurrently, gives the same files and
result.

It is called with the item, and additionally with `"cuda"` in a process that owns a GPU; no other
process may use one.
"""

Needs = Literal["cpu", "gpu or cpu", "gpu or machine"]
"""Exclusive resource of a task: a GPU if the cluster has any, or a machine for a model that uses
all of its CPUs. Processes with a GPU or a machine are kept alive, with what they have loaded."""

Execute = Callable[[Task, Sequence[Any], Needs], Iterator[Result]]
"""Runs a task on every item and yields the results in the items' order."""


def in_process(task: Task, items: Sequence[Any], needs: Needs = "cpu") -> Iterator[Result]:
    """Run a task on all items one after the other in this process, without a GPU. An `Execute`."""
    for item in items:
        yield task(item)


class _SavingTask:
    """Wrapper of a task that saves each result as a file as soon as the item is done."""

    def __init__(self, task: Task, folder: str, what: str) -> None:
        self.task, self.folder, self.what = task, folder, what

    def __call__(self, item: WorkItem, *device: str) -> Result:
        result = self.task(item, *device)
        write_json(_result_path(self.folder, self.what, item.key), result)
        return result


def run_resumable(
    folder: str,
    what: str,
    task: Task,
    items: Sequence[WorkItem],
    execute: Execute,
    needs: Needs = "cpu",
) -> list[Result]:
    """Run a task on all items, except those whose results an earlier try has saved in
    `folder`.

    Args:
        folder: where results are kept, in `units`. It goes no later than what the tasks write: a
            result tells that the unit's files are there.
        what: names the task within the folder and in the log.
    """
    finished = _finished(folder)
    name = _result_path("", what, "").rsplit("/", 1)[-1].removesuffix(".json")
    made: dict[str, Result] = {}
    few = _FewExamples()
    for item in items:
        if f"{name}{item.key}.json" in finished:
            found = _saved_result(_result_path(folder, what, item.key))
            if found is not None:
                made[item.key] = few.of(found)
    missing = [item for item in items if item.key not in made]
    if made:
        log.info(
            "%s: reusing the results of %d of %d work items from an earlier try",
            what,
            len(items) - len(missing),
            len(items),
        )
    results = run_tasks(what, _SavingTask(task, folder, what), missing, execute, needs)
    made |= {item.key: result for item, result in zip(missing, results, strict=True)}
    return [made[item.key] for item in items]


def run_tasks(
    what: str, task: Task, items: Sequence[WorkItem], execute: Execute, needs: Needs = "cpu"
) -> list[Result]:
    """Run a task on all items without saving results, and show progress.

    Args:
        what: names the task in the log.
    """
    if not items:
        return []
    shown = _Done(what, len(items))
    with doing(shown.text), hearing(shown.note):
        for timed in execute(_TimedTask(task), items, needs):
            shown.add(timed["result"], timed["seconds"])
    log.info("%s", shown.text())
    assert len(shown.results) == len(items), (len(shown.results), len(items))
    return shown.results


class _FewExamples:
    """Drops examples of rejected rows from results once earlier results have enough examples of the
    same reason.

    A process holds the results of all items, a hundred thousand and more. Manifests show what comes
    first in the items' order, so that nothing is dropped that would be shown.
    """

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()

    def of(self, result: Result) -> Result:
        """Copy the result without examples beyond the number that a manifest shows for each
        reason.
        """
        if "examples" not in result:
            return result
        kept = []
        for example in result["examples"]:
            if self._kept[example["reason"]] < EXAMPLES_KEPT:
                self._kept[example["reason"]] += 1
                kept.append(example)
        return {**result, "examples": kept}


class _TimedTask:
    """Wrapper of a task that also returns the task's duration in seconds."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, item: WorkItem, *device: str) -> Result:
        began = time.monotonic()
        result = self.task(item, *device)
        return {"result": result, "seconds": time.monotonic() - began}


class _Done:
    """Results of a task so far, and the status line about its progress."""

    def __init__(self, what: str, of: int) -> None:
        self._what, self._of, self._rows, self._tokens = what, of, 0, 0
        self._created = self._began = time.monotonic()
        self._begun = self._begun_first = 0.0
        self._few = _FewExamples()
        self.results: list[Result] = []

    def add(self, result: Result, seconds: float) -> None:
        """Count a result and the seconds that its task took."""
        if not self.results:  # without the start of workers
            self._began, self._begun_first = max(self._created, time.monotonic() - seconds), 0.0
        self.results.append(self._few.of(result))
        self._begun = max(self._begun - 1, 0.0)
        self._rows += int(result.get("rows_in", 0))
        self._tokens += int(result.get("tokens", 0))

    def note(self, begun: float) -> None:
        """Receive the progress of the running items, as a (fractional) number of items."""
        if begun and not self.results and not self._begun:
            self._began, self._begun_first = time.monotonic(), begun
        self._begun = begun

    def text(self) -> str:
        """Return the status line: progress bar, finished items, percentage, rows and their rate,
        remaining time.
        """
        done, seconds = len(self.results), time.monotonic() - self._began
        share = min((done + self._begun) / self._of, 1.0)
        since = share - self._begun_first / self._of
        parts = [f"{self._what}: {bar(share, 1)} {done}/{self._of}"]
        if self._begun:
            parts[0] += f" ({100 * share:.0f} %)"
        if self._rows:
            parts.append(f"{self._rows:,} rows, {self._rows / max(seconds, 1e-9):,.0f} rows/s")
        if self._tokens:
            parts.append(f"{self._tokens / max(seconds, 1e-9):,.0f} tokens/s")
        if since > 0 and done < self._of:
            parts.append(f"{duration(seconds / since * (1 - share))} left")
        elif done:
            parts.append(duration(seconds))
        return ", ".join(parts)


def add_up(results: Sequence[Mapping[str, Any]]) -> tuple[int, int, dict[str, int]]:
    """Sum the rows in, the rows out and the rejected rows by reason over all results.

    A task that makes several rows of one, or one of several, reports `rows_used`: the number of
    input rows that were not rejected.
    """
    rows_in = sum(result["rows_in"] for result in results)
    rows_out = sum(result["rows_out"] for result in results)
    used = sum(result.get("rows_used", result["rows_out"]) for result in results)
    rejected: Counter[str] = Counter()
    for result in results:
        rejected.update(result["rejected"])
    assert rows_in == used + sum(rejected.values()), (rows_in, used, rejected)
    return rows_in, rows_out, dict(sorted(rejected.items()))


def _result_path(folder: str, what: str, key: str) -> str:
    name = "".join(c if c.isalnum() or c in "-_" else "-" for c in what)
    return join(folder or ".", "units", f"{name}.{key}.json")


def _saved_result(path: str) -> Result | None:
    """Read the saved result of an item; None if the file is broken, so that the item runs again."""
    try:
        return read_json(path, "Its unit is done again")
    except StorageError:
        raise
    except ArtifactError as error:
        log.warning("%s", error)
        return None


def _finished(folder: str) -> set[str]:
    return set(list_files(join(folder, "units"), recursive=False))
