"""Versions in the registry under an alias that a test chooses."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from mlflow import MlflowClient

from rayembed.models.loading.files import weights_fingerprint
from rayembed.pipeline.register.registration import RegisteredVersion
from rayembed.registry.register import MODEL_ID_TAG, make_version
from rayembed.registry.tracking import Tracker


def register(
    folder: Path, name: str, *, tracker: Tracker, alias: str = "candidate", **given: Any
) -> RegisteredVersion:
    """The version, which has the alias."""
    number = make_version(folder, name, tracker=tracker, **given)
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    client.set_registered_model_alias(name, alias, str(number))
    return RegisteredVersion(name, number, f"models:/{name}/{number}", f"models:/{name}@{alias}")


def registered_folders(saved: Mapping[str, Path], home: Path) -> dict[str, Path]:
    """Folders of registered models, as MLflow downloads them, by the names of the saved ones."""
    uri = f"sqlite:///{home / 'mlflow.db'}"
    tracker = Tracker.open(
        uri, "tests", "run", "f" * 12, {}, {}, folder=home / "run", total_steps=1
    )
    client = MlflowClient(uri, uri)
    folders = {}
    for name, folder in saved.items():
        made = register(
            folder,
            name,
            tracker=tracker,
            weights_fingerprint=weights_fingerprint(folder),
            dimensions=(),
            instruction_template=None,
            global_step=0,
        )
        model_id = client.get_model_version(name, str(made.version)).tags[MODEL_ID_TAG]
        place = client.get_logged_model(model_id).artifact_location
        folders[name] = Path(url2pathname(urlsplit(place).path))
    return folders
