"""The model folder inside a version of MLflow's registry, on this machine."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from rayembed.assets.cache import cache_folder, filled
from rayembed.assets.names import check_inside, folder_name
from rayembed.config.credentials import check_address
from rayembed.errors import AssetError, ConfigError
from rayembed.registry.mlflow_run import as_tracking_error, open_client
from rayembed.registry.register import MODEL_ID_TAG

_REFERENCE = re.compile(r"models:/(?P<name>[^/@]+)(?:@(?P<alias>[^/@]+)|/(?P<version>\d+))")


def pinned_reference(reference: str, tracking_uri: str | None) -> str:
    """`models:/name/version` for a reference with an alias; all others as they are.

    An alias may move while a job runs.

    Raises:
        AssetError: no such model or alias.
        ConfigError: not a reference of the registry, or no MLflow to ask.
        TrackingError: MLflow is away.
    """
    if not reference.startswith("models:"):
        return reference
    name, alias, version = _parts(reference)
    if alias is not None:
        version = _found(reference, tracking_uri, name, alias, None).version
    return f"models:/{name}/{version}"


def registered_folder(reference: str, tracking_uri: str | None) -> Path:
    """The folder that was registered (weights, tokenizer, settings), fetched once into the cache.

    Of the logged model only this folder is fetched, not the code around it.

    Raises:
        AssetError: no such version, or one without a model folder.
        ConfigError: not a reference of the registry, or no MLflow to ask.
        TrackingError: MLflow is away or its artifacts cannot be read.
    """
    name, alias, number = _parts(reference)
    version = _found(reference, tracking_uri, name, alias, number)
    client, uri = _client(reference, tracking_uri)
    with as_tracking_error(uri):
        source = client.get_model_version_download_uri(name, str(version.version))
        if source.startswith("models:/"):
            source = client.get_logged_model(source.removeprefix("models:/")).artifact_location
    key = version.tags.get(MODEL_ID_TAG) or version.model_id or version.run_id
    entry = cache_folder() / "registered" / folder_name(f"{name}-{version.version}-{key}")

    def fill(folder: Path) -> None:
        with as_tracking_error(uri):
            _download(reference, source, uri, folder)

    return filled(entry, fill)


def _download(reference: str, source: str, tracking_uri: str, folder: Path) -> None:
    """Put the model folder of the logged model at `source` into the empty folder."""
    import yaml
    from mlflow.artifacts import download_artifacts

    scratch = folder.parent / "download"
    described = Path(
        download_artifacts(
            artifact_uri=f"{source.rstrip('/')}/MLmodel",
            dst_path=str(scratch),
            tracking_uri=tracking_uri,
        )
    )
    flavors: dict[str, Any] = yaml.safe_load(described.read_text(encoding="utf-8"))["flavors"]
    artifacts = (flavors.get("python_function") or {}).get("artifacts") or {}
    inside = (artifacts.get("model") or {}).get("path")
    if inside is None:
        raise AssetError(
            f"the registered model {reference!r} holds no artifact 'model'; it was not registered "
            "by rayembed. Name the folder or hub reference of its weights instead"
        )
    check_inside(inside, f"the MLmodel file of {reference!r}")
    fetched = Path(
        download_artifacts(
            artifact_uri=f"{source.rstrip('/')}/{inside}",
            dst_path=str(scratch),
            tracking_uri=tracking_uri,
        )
    )
    folder.rmdir()  # empty; nothing is copied twice
    fetched.rename(folder)
    shutil.rmtree(scratch)


def _parts(reference: str) -> tuple[str, str | None, str | None]:
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"{reference!r} is no registered model; write models:/name@alias or models:/name/3"
        )
    return match["name"], match["alias"], match["version"]


def _found(
    reference: str, tracking_uri: str | None, name: str, alias: str | None, version: str | None
) -> Any:
    """The version that a reference names, as MLflow describes it."""
    from mlflow.exceptions import MlflowException

    client, uri = _client(reference, tracking_uri)
    with as_tracking_error(uri):
        try:
            if alias is not None:
                return client.get_model_version_by_alias(name, alias)
            return client.get_model_version(name, str(version))
        except MlflowException as error:
            if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise
            raise AssetError(
                f"there is no registered model {reference!r} in MLflow at {uri}: {error}"
            ) from error


def _client(reference: str, tracking_uri: str | None) -> tuple[Any, str]:
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        raise ConfigError(
            f"the model {reference!r} stands in MLflow's registry, and no MLflow is named; set the "
            "tracking address (http://host:port or sqlite:///path/to/mlflow.db)"
        )
    check_address(uri, "the address of MLflow")
    return open_client(uri), uri
