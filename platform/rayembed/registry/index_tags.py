"""Name the indexes of a registered version in its tags and its description."""

import json
from collections.abc import Mapping
from typing import Any

from rayembed.errors import ArtifactError
from rayembed.registry.indexes import (
    INDEX_TAG,
    IndexEntry,
    entries_of,
    index_section,
    without_index_section,
)
from rayembed.registry.mlflow_run import as_tracking_error
from rayembed.registry.register import WEIGHTS_TAG, with_section
from rayembed.registry.registered_model import SCHEME, connect, get_version, parse_reference


def tag_index(
    reference: str, index: str, values: Mapping[str, Any] | None, tracking_uri: str, *, weights: str
) -> None:
    """Set or remove the tag of an index of a version, and its row in the description.

    Args:
        reference: `models:/name/3`.
        values: see `indexes.IndexEntry`; None: remove the tag.
        weights: fingerprint of the version's weights.

    Raises:
        ArtifactError: there is no such version, or it has other weights.
        TrackingError: MLflow does not answer.
    """
    client, asked = connect(tracking_uri), parse_reference(reference)
    with as_tracking_error(tracking_uri):
        version = get_version(client, asked)
        name, number, key = version.name, str(version.version), INDEX_TAG + index
        if values is None:
            if key not in version.tags:
                return
            client.delete_model_version_tag(name, number, key)
        else:
            seen = version.tags.get(WEIGHTS_TAG)
            if seen != weights:
                raise ArtifactError(
                    f"{reference} has the weights {seen}, but the index {index!r} was made with "
                    f"{weights}: the version was registered again"
                )
            client.set_model_version_tag(name, number, key, json.dumps(dict(values)))
        version = get_version(client, asked)
        text = without_index_section(version.description or "")
        described = with_section(text, index_section(version.tags))
        if described != (version.description or ""):
            client.update_model_version(name, number, described)


def indexes_of(reference: str, tracking_uri: str | None) -> list[IndexEntry]:
    """List the indexes that a registered version names; none for other references.

    Raises:
        RayembedError: there is no such version, or MLflow does not answer.
    """
    if not reference.startswith(SCHEME) or tracking_uri is None:
        return []
    client = connect(tracking_uri)
    with as_tracking_error(tracking_uri):
        return entries_of(get_version(client, parse_reference(reference)).tags)
