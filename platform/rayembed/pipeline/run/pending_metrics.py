"""Sends MLflow what it has not got of a run, because the server was away."""

from typing import TextIO

from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.document import NamedRun
from rayembed.pipeline.run.folders import locked_folders
from rayembed.pipeline.storage import placed
from rayembed.registry.tracking import send_metrics


def send_pending(run: NamedRun, out: TextIO) -> None:
    """Send all that waits in the folder of the run of that name; starts neither it nor Ray.

    It goes to where the run said that MLflow is, or to `placement.tracking_uri` where it is given.

    Raises:
        ArtifactError: no job has begun a run of that name there, or one is at work on it.
        TrackingError: MLflow is away; what was not sent stays.
    """
    with locked_folders(placed(run)) as folders:
        send_files(folders.files, run.placement.tracking_uri, out)


def send_files(files: StoredFolder, tracking_uri: str | None, out: TextIO) -> None:
    """Send all that waits in a folder that is locked; raises as `send_pending`."""
    number = send_metrics(files.local, tracking_uri=tracking_uri)
    files.keep()
    out.write(f"sent {number} steps; MLflow has everything of {files.place}\n")
