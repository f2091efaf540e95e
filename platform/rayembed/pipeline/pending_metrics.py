"""Sends MLflow what it has not got of a run or a sweep, because the server was away."""

from typing import TextIO

from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.adaptation import AnyRun
from rayembed.config.sweep import Sweep
from rayembed.pipeline.run_folders import locked_folders, locked_sweep
from rayembed.pipeline.storage import placed
from rayembed.registry.tracking import send_metrics


def send_pending(run: AnyRun | Sweep, out: TextIO) -> None:
    """Send all that waits in the folder of the run of that name; starts neither it nor Ray.

    It goes to where the run said that MLflow is, or to `placement.tracking_uri` where it is given.

    Raises:
        ArtifactError: no job has begun a run of that name there, or one is at work on it.
        TrackingError: MLflow is away; what was not sent stays.
    """
    if isinstance(run, Sweep):
        placement = placed(run.base).placement
        with locked_sweep(run.placed(storage_path=placement.storage_path)) as files:
            _send(files, placement.tracking_uri, out)
        return
    with locked_folders(placed(run)) as folders:
        _send(folders.files, run.placement.tracking_uri, out)


def _send(files: StoredFolder, tracking_uri: str | None, out: TextIO) -> None:
    number = send_metrics(files.local, tracking_uri=tracking_uri)
    files.keep()
    out.write(f"sent {number} steps; MLflow has everything of {files.place}\n")
