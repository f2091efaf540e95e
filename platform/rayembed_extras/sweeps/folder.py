"""Manage a sweep's folder: its files, unsent MLflow entries, and the number types of its runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from rayembed.assets.stored_folder import StoredFolder
from rayembed.pipeline.checks.precision import PrecisionOf, say_dtype, with_dtype
from rayembed.pipeline.run.folders import SWEEPS, locked_place, send_files
from rayembed.pipeline.storage import placed
from rayembed_extras.sweeps.settings import Sweep


@contextmanager
def locked_sweep(sweep: Sweep) -> Iterator[StoredFolder]:
    """Lock the sweep's folder and download its files from storage.

    Raises:
        PlacementError: the storage cannot be written.
        ArtifactError: another job has them right now.
    """
    what = f"runs the sweep {sweep.name!r}"
    with locked_place(sweep.base.placement.storage_path, SWEEPS, sweep.name, what) as files:
        yield files


def send_pending_sweep(sweep: Sweep, out: TextIO) -> None:
    """Send MLflow all entries of a sweep that it has not received, as `send_pending` does for a
    run.
    """
    placement = placed(sweep.base).placement
    with locked_sweep(sweep.placed(storage_path=placement.storage_path)) as files:
        send_files(files, placement.tracking_uri, out)


def sweep_as_begun(sweep: Sweep, begun: Sweep) -> Sweep:
    """Give the sweep's runs the number types with which it began, where the settings leave them
    open.

    So that all trials compute in one type, also those that begin later on another machine.
    """
    kept = {label: run.model.backbone.dtype for label, run in begun.runs.items()}
    runs = {
        label: run if kept.get(label, "auto") == "auto" else with_dtype(run, kept[label])
        for label, run in sweep.runs.items()
    }
    return sweep.model_copy(update={"runs": runs})


def sweep_settled(sweep: Sweep, precision_of: PrecisionOf) -> Sweep:
    """Choose one number type for all trials, which the nodes of their workers compute fast."""
    asked = {run.model.backbone.dtype for run in sweep.runs.values()} - {"float32"}
    if not asked:
        return sweep
    precision = precision_of(sweep.base.placement)
    for dtype in sorted(asked):
        say_dtype(dtype, precision)
    runs = {label: with_dtype(run, precision.dtype) for label, run in sweep.runs.items()}
    return sweep.model_copy(update={"runs": runs})
