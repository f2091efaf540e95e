"""Versions in the registry under an alias that a test chooses."""

from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from rayembed.pipeline.registration import RegisteredVersion
from rayembed.registry.register import make_version
from rayembed.registry.tracking import Tracker


def register(
    folder: Path, name: str, *, tracker: Tracker, alias: str = "candidate", **given: Any
) -> RegisteredVersion:
    """The version, which has the alias."""
    number = make_version(folder, name, tracker=tracker, **given)
    client = MlflowClient(tracker.tracking_uri, tracker.tracking_uri)
    client.set_registered_model_alias(name, alias, str(number))
    return RegisteredVersion(name, number, f"models:/{name}/{number}", f"models:/{name}@{alias}")
