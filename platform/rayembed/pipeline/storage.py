"""Make a job's storage path absolute, so that every process reads it alike."""

import os
from pathlib import Path

from rayembed.assets.storage import is_remote
from rayembed.config.document import AnyDocument
from rayembed.config.types import check_storage_path
from rayembed.errors import PlacementError


def placed(document: AnyDocument) -> AnyDocument:
    """Return the job's settings with an absolute storage path.

    Raises:
        PlacementError: as `absolute_storage`.
    """
    placement = dict(document)["placement"]
    storage = absolute_storage(placement.storage_path)
    there = placement.model_copy(update={"storage_path": storage})
    return document.model_copy(update={"placement": there})


def absolute_storage(path: str) -> str:
    """Make the storage path absolute, so that every process reads it alike.

    Raises:
        ConfigError: it is an address with a password, key or token.
        PlacementError: a path with a `*` or a control character, or a relative path in a submitted
            job, which works in a copy of the checkout that is removed.
    """
    place = path if is_remote(path) else str(Path(path).expanduser().absolute())
    try:
        check_storage_path(place)
    except ValueError as error:
        raise PlacementError(f"placement.storage_path cannot be used: {error}") from None
    if is_remote(path) or Path(path).expanduser().is_absolute():
        return path
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        raise PlacementError(
            f"placement.storage_path={path!r} is relative, and a submitted job runs in a copy of "
            "the checkout that is removed with its results; give a folder that all nodes see, "
            "such as --set placement.storage_path=/shared/outputs, or s3://…"
        )
    return str(Path(path).absolute())
