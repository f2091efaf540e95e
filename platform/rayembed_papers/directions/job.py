"""Run the job that measures as many of the papers' claims as fit the time; the next call
continues.
"""

import argparse
import logging
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayembed.assets.storage import check_writable, join, write_atomic
from rayembed.display.tables import Table, console, show
from rayembed.errors import RayembedError, WorkerError
from rayembed.pipeline.job import Job, JobContext, at_least, option
from rayembed.pipeline.storage import absolute_storage

if TYPE_CHECKING:
    from rayembed_papers.directions.catalogue import Direction
    from rayembed_papers.directions.measure import ClaimTask, Results
    from rayembed_papers.directions.report import ClaimResult

logger = logging.getLogger(__name__)


def _measure(args: argparse.Namespace, context: JobContext) -> None:
    from rayembed_papers.directions.measure import Results, tasks_left

    directions, seeds = _selected(args), range(args.seeds)
    storage = absolute_storage(args.storage_path)
    check_writable(storage)
    results = Results(storage)
    until = None if args.hours is None else time.monotonic() + 3600 * args.hours
    failed: dict[str, RayembedError] = {}
    try:
        left = _measured(tasks_left(directions, seeds, results), results, until, failed)
        causes = _followed_up(_findings(directions, seeds, results))
        left += _measured(tasks_left(causes, seeds, results), results, until, failed)
    finally:
        place = _report(args, results, context)
    context.out.write(f"Report  {place}\n")
    if left:
        context.out.write(f"Next    the same command goes on with {left} runs that are left\n")
    if failed:
        reasons = "\n".join(f"  {name}: {error}" for name, error in failed.items())
        raise WorkerError(
            f"{len(failed)} runs failed; the others are done. Run the same command to retry "
            f"them:\n{reasons}"
        )


def _selected(args: argparse.Namespace) -> "Sequence[Direction]":
    """Return the selected claims, at the selected size."""
    return [one for one in _all(args) if _is_asked(args, one)]


def _is_asked(args: argparse.Namespace, direction: "Direction") -> bool:
    return not args.only or direction.key in args.only


def _all(args: argparse.Namespace) -> "Sequence[Direction]":
    from rayembed_papers.directions.catalogue import directions, get_directions, on_a_gpu

    get_directions(args.only)
    return list(map(on_a_gpu, directions())) if args.on_a_gpu else directions()


def _measured(
    tasks: "Sequence[ClaimTask]",
    results: "Results",
    until: float | None,
    failed: "dict[str, RayembedError]",
) -> int:
    """Measure runs while time is left; return the number of runs that do not fit.

    Args:
        failed: takes the errors of those that cannot be measured, by their names.
    """
    from rayembed_papers.directions.measure import expected_seconds

    left = 0
    for number, task in enumerate(tasks):
        seconds = task.seconds_in(results.storage)
        late = until is not None and time.monotonic() + seconds > until
        if late:
            left += 1
            continue
        ahead = expected_seconds(tasks[number:], results.storage) / 3600
        logger.info(
            "%s, run %d of %d: will take about %.0f minutes; all remaining runs will take about "
            "%.1f hours",
            *(task.run.name, number + 1, len(tasks), seconds / 60, ahead),
        )
        try:
            results.measure(task)
        except RayembedError as error:
            logger.warning("%s failed: %s", task.run.name, error)
            failed[task.run.name] = error
    return left


def _findings(
    directions: "Sequence[Direction]", seeds: Sequence[int], results: "Results"
) -> "list[ClaimResult]":
    from rayembed_papers.directions.measure import differences
    from rayembed_papers.directions.report import finding

    return [finding(one, differences(one, seeds, results), len(seeds)) for one in directions]


def _followed_up(found: "Sequence[ClaimResult]") -> "list[Direction]":
    """Return each reversed claim once for each likely cause, with runs that exclude the cause."""
    from rayembed_papers.directions.catalogue import followed_up

    turned = [one.direction for one in found if one.verdict == "reversed"]
    return [followed_up(one, cause) for one in turned for cause in one.causes]


def _report(args: argparse.Namespace, results: "Results", context: JobContext) -> str:
    """Print the tables of the selected claims; store the tables of all claims and the plot, also in
    MLflow. The path of the tables.
    """
    from rayembed_papers.directions.report import findings_plot, findings_table, notes_of

    seeds, size = range(args.seeds), "-on-a-gpu" if args.on_a_gpu else ""
    name = f"directions-{args.seeds}-seeds{size}"
    found = _findings(_all(args), seeds, results)

    def tables_of(some: "Sequence[ClaimResult]") -> list[Table]:
        tables = [findings_table(some, f"Claims of the papers, {len(seeds)} seeds")]
        if causes := _followed_up(some):
            title = "Why some are reversed here: the same claims where a likely cause does not act"
            tables.append(findings_table(_findings(causes, seeds, results), title))
        return tables

    for table in tables_of([one for one in found if _is_asked(args, one.direction)]):
        console(context.out).print(table)
    folder = join(results.storage, "papers")
    with tempfile.TemporaryDirectory() as scratch:
        text, plot = Path(scratch) / f"{name}.md", Path(scratch) / f"{name}.png"
        notes = notes_of([one for one in found if one.apart is not None])
        text.write_text(f"{_text(tables_of(found))}\n{notes}")
        findings_plot(found, plot)
        for file in (text, plot):
            write_atomic(join(folder, file.name), file.read_bytes())
        _track(name, [text, plot], found, results.storage)
    return join(folder, text.name)


def _text(tables: Sequence[Table]) -> str:
    return "\n".join(f"## {table.title}\n\n{show(table, 'markdown')}" for table in tables)


def _track(name: str, files: Sequence[Path], found: "Sequence[ClaimResult]", storage: str) -> None:
    """Log the report to MLflow; print a message if MLflow does not answer."""
    from rayembed.config.document import fingerprint
    from rayembed.errors import TrackingError
    from rayembed.registry.tracking import Tracker
    from rayembed.registry.tracking_uri import resolve_tracking_uri

    try:
        with Tracker.open(
            resolve_tracking_uri(None, storage),
            "rayembed",
            f"papers-{name}",
            fingerprint([name, storage]),
            {"directions": str(len(found))},
            {"rayembed.kind": "papers"},
            folder=files[0].parent,
            total_steps=0,
        ) as tracker:
            for file in files:
                tracker.log_artifact(file)
            apart = {one.direction.key: one.apart for one in found if one.apart is not None}
            number = sum(one.number for one in apart.values())  # pairs of runs: a report's "step"
            halves = {key: one.half for key, one in apart.items() if one.half is not None}
            tracker.log_scores("difference", {key: one.mean for key, one in apart.items()}, number)
            tracker.log_scores("half_width", halves, number)
            tracker.set_tags({f"verdict.{one.direction.key}": one.verdict for one in found})
    except TrackingError as error:
        logger.warning("cannot log the report to MLflow: %s", error)


def _list(context: JobContext) -> None:
    from rayembed_papers.directions.catalogue import directions

    rows = [[one.key, one.claim, one.source] for one in directions()]
    console(context.out).print(Table(["--only", "claim", "paper"], rows, look="open"))


def _plan(args: argparse.Namespace, context: JobContext) -> None:
    from rayembed_papers.directions.measure import Results, expected_seconds, tasks_left

    directions, seeds = _selected(args), range(args.seeds)
    results = Results(absolute_storage(args.storage_path))
    causes = _followed_up(_findings(directions, seeds, results))
    tasks = tasks_left(directions, seeds, results) + tasks_left(causes, seeds, results)
    made = {one.preparation.file: one.preparation for one in tasks if one.preparation is not None}
    first = {file: one.seconds_left(results.storage) for file, one in made.items()}
    rows = [[file, "is made first", f"{some / 60:.0f}"] for file, some in first.items() if some]
    rows += [[task.run.name, task.run.model.kind, f"{task.seconds / 60:.0f}"] for task in tasks]
    heads = ["run", "architecture", "minutes"]
    hours = expected_seconds(tasks, results.storage) / 3600
    title = f"{len(tasks)} runs, {hours:.1f} hours"
    console(context.out).print(Table(heads, rows, title=title, align="llr", look="open"))


run_directions = Job(
    options=(
        option("--only KEY", "a claim by its key (see --list); default: all", often=True),
        option("--seeds N", "seeds 0 to N - 1", type=at_least(1), default=3),
        option("--on-a-gpu", "a larger size: all layers, five times the steps, on a GPU"),
        option("--hours H", "begin no run that would end later; default: all", type=float),
        option("--storage-path FOLDER", "where runs and results go", default="outputs"),
    ),
    read=lambda args: args,
    run=_measure,
    lists=("the claims", _list),
    shows=(
        "the plan",
        "the runs that are left, also of what is reversed so far, and how long each takes",
        _plan,
    ),
    log=("rayembed_papers",),
)
"""The job that measures the papers' claims."""
