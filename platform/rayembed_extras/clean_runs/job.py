"""Run the job that lists the contents of a storage or frees the selected parts."""

import argparse
from typing import TYPE_CHECKING

from rayembed.pipeline.job import Job, JobContext, option, work_begins
from rayembed_extras.clean_runs.contents import (
    DATA,
    FREED,
    STATES,
    TEMPORARY,
    CleanRequest,
    check_request,
)

if TYPE_CHECKING:
    from rayembed_extras.clean_runs.inventory import Inventory
    from rayembed_extras.clean_runs.mlflow_entries import MlflowEntries


def clean(asked: CleanRequest, context: JobContext) -> None:
    """List the contents of the storage, or remove the selected parts and print each removal.

    Raises:
        RayembedError: nothing was removed, and the message says why; or the storage or MLflow has
            failed on the way, and the same command goes on.
    """
    _clean(asked, context, dry_run=False)


def show(asked: CleanRequest, context: JobContext) -> None:
    """Print what `clean` would remove, or the storage's contents if `--free` is not given; raises
    the same errors as `clean`.
    """
    _clean(asked, context, dry_run=True)


def _clean(asked: CleanRequest, context: JobContext, *, dry_run: bool) -> None:
    from rayembed.display.tables import console
    from rayembed_extras.clean_runs.inventory import Inventory
    from rayembed_extras.clean_runs.mlflow_entries import MlflowEntries
    from rayembed_extras.clean_runs.removal import steps_of
    from rayembed_extras.clean_runs.tables import shown_size

    inventory, entries = Inventory(asked.storage), MlflowEntries(asked.tracking_uri)
    if not asked.free:
        _list(asked, inventory, entries, context)
        return
    out, freed = console(context.out, soft_wrap=True), 0
    steps = steps_of(asked, inventory, entries)
    if not dry_run:
        work_begins()
    for step in steps:
        if not dry_run:
            step.remove()
        freed += step.num_bytes
        out.print(
            f"{'would go' if dry_run else 'removed'}  {shown_size(step.num_bytes):>8}  {step.what}"
        )
    if dry_run:
        out.print(f"Nothing is changed (--dry-run); it would free {shown_size(freed)}")
    else:
        out.print(f"{shown_size(freed)} are free again" if freed else "There is nothing to remove")


def _list(
    asked: CleanRequest,
    inventory: "Inventory",
    entries: "MlflowEntries",
    context: JobContext,
) -> None:
    """Print the tables of the storage, and the bytes that each `--free` option would release."""
    from rayembed.display.tables import Table, console
    from rayembed_extras.clean_runs.removal import named_runs, steps_of
    from rayembed_extras.clean_runs.tables import data_table, runs_table, shown_size

    chosen = named_runs(inventory, asked.runs) if asked.runs else inventory.runs
    out = console(context.out)
    if not inventory.files:
        out.print(f"The storage {asked.storage} holds nothing that rayembed made", soft_wrap=True)
        return
    if chosen:
        artifacts = [0 if run.tracked is None else entries.num_bytes(run.tracked) for run in chosen]
        out.print(runs_table(chosen, artifacts))
    if asked.runs:
        return
    if inventory.prepared or inventory.vectors:
        out.print(data_table(inventory))
        out.print(
            "(used by: runs of this storage; those of other storages are not known. no run yet: "
            "made in the last day, which --free data leaves)",
            soft_wrap=True,
        )
    if others := inventory.others():
        rows = [[place, shown_size(size)] for place, size in others.items()]
        out.print(Table(["other", "size"], rows, align="lr", look="open", folds=True))
    states = steps_of(CleanRequest(asked.storage, free=(STATES,)), inventory, entries)
    gains = {
        STATES: sum(step.num_bytes for step in states),
        DATA: sum(inventory.unused(inventory.runs).values()),
        TEMPORARY: sum(inventory.temporary.values()),
    }
    options_text = ", ".join(
        f"--free {part} {shown_size(size)}" for part, size in gains.items() if size
    )
    if options_text:
        out.print(f"To free (--dry-run shows what would go): {options_text}", soft_wrap=True)


def _read(args: argparse.Namespace) -> CleanRequest:
    from rayembed.pipeline.storage import absolute_storage
    from rayembed.registry.tracking_uri import resolve_tracking_uri

    storage, given = absolute_storage(args.storage_path), args.tracking_uri
    uri = None if given is None else resolve_tracking_uri(given, storage, make_folder=False)
    asked = CleanRequest(
        storage=storage,
        runs=tuple(args.runs),
        free=tuple(dict.fromkeys(args.free)),
        delete_versions=args.delete_versions,
        tracking_uri=uri,
    )
    check_request(asked)
    return asked


run_clean_job = Job(
    options=(
        option("--run NAME", "a run, or a sweep with all of its trials", often=True, dest="runs"),
        option(
            f"--free {{{','.join(FREED)}}}",
            "remove something; " + "; ".join(f"{name}: {what}" for name, what in FREED.items()),
            often=True,
        ),
        option(
            "--delete-versions",
            "with --free run: remove the versions in MLflow's registry that were made of it too; "
            "without it such a run is refused",
        ),
        option("--storage-path FOLDER", "storage of the jobs, or s3://…", default="outputs"),
        option("--tracking-uri URI", "MLflow's address now; default: where each run's folder says"),
    ),
    read=_read,
    run=clean,
    shows=("what would be removed", "warnings", show),
    stopped="stopped; the same command removes the rest",
)
"""The job that lists the contents of a storage and frees parts of them."""
