"""Find the batch plans that a model was trained on: those of its run's folder, or of the MLflow run
that registered it.
"""

import json
from pathlib import Path

from rayembed.assets.names import check_inside
from rayembed.assets.storage import exists, join, read_bytes
from rayembed.assets.store import MANIFEST
from rayembed.pipeline.evaluate.findings import ScoredModels
from rayembed.pipeline.run.folders import PLANS_FILE
from rayembed.registry.mlflow_run import as_tracking_error
from rayembed.registry.registered_model import (
    SCHEME,
    artifact_text,
    connect,
    get_version,
    parse_reference,
)
from rayembed.registry.tracking_uri import sqlite_path


class PlansUnknownError(Exception):
    """The batch plans of a model cannot be known; the text is a clause that says why."""


def plans_of(scored: ScoredModels) -> list[str]:
    """Return the folders of the judged model's batch plans; empty for models of others.

    Raises:
        PlansUnknownError: the model may have been trained here, but its plans are not there.
        TrackingError: MLflow is away.
    """
    if scored.plans:
        return list(scored.plans.values())
    model = scored.judged.model
    reference = str(getattr(model, "reference", scored.reference))
    if reference.startswith(SCHEME):
        return _registered(reference, getattr(model, "tracking_uri", None), scored.storage)
    place = reference if "://" in reference else str(Path(reference).expanduser().absolute())
    if not place.startswith(("/", "s3://", "gs://")) or not exists(place):
        return []
    found = plans_beside(place)
    if not found:
        raise PlansUnknownError(f"{reference} does not lie in the folder of a run")
    return found


def plans_beside(place: str) -> list[str]:
    """Return the batch plans of the run whose folder contains the model; empty for others."""
    run_folder = "/".join(place.rstrip("/").split("/")[:-2])
    path = join(run_folder, PLANS_FILE)
    if not exists(path):
        return []
    storage = "/".join(run_folder.split("/")[:-2])
    return [join(storage, "plans", name) for name in json.loads(read_bytes(path)).values()]


def _registered(reference: str, tracking_uri: str | None, storage: str) -> list[str]:
    """Return the plans that the MLflow run of a registered version names, in the storage of the
    evaluation or beside the SQLite file of MLflow.
    """
    client = connect(str(tracking_uri))
    with as_tracking_error(str(tracking_uri)):
        version = get_version(client, parse_reference(reference))
        recorded = artifact_text(client, version.run_id, "provenance.json")
    names = json.loads(recorded or "{}").get("plans")
    if not names:
        raise PlansUnknownError(f"the MLflow run of {reference} names no batch plan")
    database = sqlite_path(str(tracking_uri))
    places = [storage, *([] if database is None else [str(database.parent)])]
    found = []
    for name in names.values():
        inside = check_inside(name, f"the record of {reference}")
        folders = [join(place, "plans", inside) for place in places]
        there = [folder for folder in folders if exists(join(folder, MANIFEST))]
        if not there:
            where = " or ".join(dict.fromkeys(places))
            raise PlansUnknownError(
                f"the batch plan {name} of {reference} is not in {where}; evaluate with "
                "placement.storage_path of its training"
            )
        found.append(there[0])
    return found
