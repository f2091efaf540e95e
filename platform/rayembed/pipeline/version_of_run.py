"""A run's model as a version in the registry: its result files, its card, its scores."""

import logging
from collections.abc import Sequence
from pathlib import Path

from rayembed.assets.storage import exists, is_remote, read_bytes, write_atomic
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.run import Run
from rayembed.models.fingerprints import weights_fingerprint
from rayembed.registry.mlflow_run import as_tracking_error
from rayembed.registry.model_card import instruction_template
from rayembed.registry.register import RegisteredVersion, register
from rayembed.registry.registered_model import ModelReference, get_version, keep_scores
from rayembed.registry.registered_model import connect as connect_to_mlflow
from rayembed.registry.scores import TaskScore
from rayembed.registry.tracking import Tracker

logger = logging.getLogger(__name__)


def results_of(results: str, revision: str, scratch: Path) -> Path | None:
    """The folder of mteb's result files of a model's revision; None: there is none.

    Scores that the run took before with other software lie beside it under another revision.
    """
    local = scratch if is_remote(results) else Path(results)
    stored = StoredFolder(results, local, recursive=True)
    stored.fetch()
    found = sorted(stored.local.glob(f"results/*/{revision}"))
    if not found:
        logger.warning(
            "%s has no scores of the revision %s.\n"
            "The version in the registry has no result files.",
            *(results, revision),
        )
    return found[0] if found else None


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
    scores: dict[str, dict[str, float]],
    dimensions: tuple[int, ...],
    card: str,
) -> RegisteredVersion:
    """The version of a run's model in the registry, with the scores of its last stage.

    Raises:
        RayembedError: as `register`.
    """
    last = f"stage {len(run.stages)}: {run.stages[-1].name}"
    return register(
        folder,
        run.placement.registered_model or run.name,
        tracker=tracker,
        scores=scores.get(last, {}),
        weights_fingerprint=weights_fingerprint(folder),
        dimensions=dimensions,
        instruction_template=instruction_template(run.model),
        global_step=sum(stage.steps for stage in run.stages),
        tags={},
        description=card,
    )
