"""Name an index in the tags of the registered versions that embed for it."""

import logging
from collections.abc import Mapping
from typing import Any

from rayembed.assets.storage import join
from rayembed.config.credentials import without_credentials
from rayembed.errors import RayembedError
from rayembed.registry.index_tags import tag_index
from rayembed.registry.registered_model import SCHEME
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed_extras.indexing.manifest import Manifest, TableRecord, folder_of
from rayembed_extras.indexing.places import PLACE

logger = logging.getLogger(__name__)


def register_index(
    before: Manifest | None, after: Manifest, storage: str, tracking_uri: str | None
) -> list[str]:
    """Tag the versions that embed for an index, and untag versions that no longer do; return
    the references of the tagged versions.

    A registry that does not answer costs a warning: the index is complete, and its next job sets
    the tags again.

    Args:
        before: record of the index before the job; None: there was none.
        tracking_uri: as the settings state it.
    """
    old = {} if before is None else version_tags(before, storage)
    new = version_tags(after, storage)
    gone = [name for name in old if name not in new]
    if not new and not gone:
        return []
    tagged = []
    for reference in [*new, *gone]:
        values = new.get(reference)
        weights = str((values or old[reference])["version_weights"])
        try:
            uri = resolve_tracking_uri(tracking_uri, storage, make_folder=False)
            tag_index(reference, after.name, _told(values), uri, weights=weights)
        except RayembedError as error:
            logger.warning(
                "the registry does not name the index %s at %s: %s; the next job of the index does "
                "it again",
                after.name,
                reference,
                error,
            )
            continue
        if values is not None:
            tagged.append(reference)
    return tagged


def _told(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    return {key: value for key, value in values.items() if key != "version_weights"}


def version_tags(manifest: Manifest, storage: str) -> dict[str, dict[str, Any]]:
    """Values of the tags of an index by the reference of a registered version, which is current, or
    has an adapter for the current table, or made the former one.
    """
    found: dict[str, dict[str, Any]] = {}
    current = manifest.tables.get(manifest.current or "")
    former = manifest.tables.get(manifest.before or "")

    def add(reference: str, weights: str, record: TableRecord, **more: Any) -> None:
        if reference.startswith(SCHEME) and record.complete:
            found[reference] = {
                **_values(manifest, record, storage),
                **more,
                "version_weights": weights,
            }

    if former is not None:
        add(former.made_by.reference, former.made_by.weights, former, state="former")
    if current is not None:
        for weights, entry in (current.adapter or {}).items():
            told = {"adapter": entry.get("kind"), "share": entry.get("share")}
            add(str(entry.get("model", "")), weights, current, state="adapter", **told)
        add(current.made_by.reference, current.made_by.weights, current, state="current")
    return found


def _values(manifest: Manifest, record: TableRecord, storage: str) -> dict[str, Any]:
    store = manifest.store
    place = store.get(PLACE)
    return {
        "store": store.get("kind"),
        "address": None if place is None else without_credentials(str(place)),
        "table": record.table,
        "rows": record.rows,
        "number_type": record.made_by.number_type,
        "dimensions": record.made_by.dimensions,
        "weights": record.made_by.weights,
        "updated": record.updated,
        "record": without_credentials(join(folder_of(storage, manifest.name), "index.json")),
    }
