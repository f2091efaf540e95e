"""A run's model as a version in the registry: its result files, its card, its scores."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rayembed.assets.storage import exists, read_bytes, write_atomic
from rayembed.config.run import Run
from rayembed.models.fingerprints import weights_fingerprint
from rayembed.registry.mlflow_run import as_tracking_error
from rayembed.registry.model_card import instruction_template
from rayembed.registry.register import RegisteredVersion, register
from rayembed.registry.registered_model import ModelReference, get_version, keep_scores
from rayembed.registry.registered_model import connect as connect_to_mlflow
from rayembed.registry.scores import TaskScore
from rayembed.registry.tracking import Tracker


def keep_version_scores(
    tracker: Tracker, version: RegisteredVersion, scores: Sequence[TaskScore], files: Path | None
) -> None:
    """Keep the scores with the version, so that later versions can be compared with it."""
    client = connect_to_mlflow(tracker.tracking_uri)
    with as_tracking_error(tracker.tracking_uri):
        found = get_version(client, ModelReference(version.name, version.version, None))
        keep_scores(client, found, scores, files)


def write_if_other(path: str, data: bytes) -> None:
    """Write the file unless it holds the data: a model with a new file is fetched again."""
    if exists(path) and read_bytes(path) == data:
        return
    write_atomic(path, data)


def register_version(
    run: Run,
    folder: Path,
    tracker: Tracker,
    scores: Mapping[str, float],
    dimensions: tuple[int, ...],
    card: str,
) -> RegisteredVersion:
    """The version of a run's model in the registry.

    Args:
        scores: main scores of the last stage's model by task.

    Raises:
        RayembedError: as `register`.
    """
    return register(
        folder,
        run.placement.registered_model or run.name,
        tracker=tracker,
        scores=scores,
        weights_fingerprint=weights_fingerprint(folder),
        dimensions=dimensions,
        instruction_template=instruction_template(run.model),
        global_step=sum(stage.steps for stage in run.stages),
        tags={},
        description=card,
    )
