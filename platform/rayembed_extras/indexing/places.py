"""Where a store is: the setting of its address or folder, and connections to it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed_extras.indexing.settings import STORES, IndexRun, StoreSettings

PLACE = "to"
"""Setting of a store with its address or folder."""


def address_setting(kind: type[Any]) -> str | None:
    """Name of the setting that says where a store is; None: it has none."""
    return PLACE if PLACE in kind.model_fields else None


def place_of(store: StoreSettings) -> str:
    """Kind and place of a store in a few words."""
    setting = address_setting(type(store))
    place = None if setting is None else getattr(store, setting)
    return f"{store.kind} at {place}" if place else str(store.kind)


def with_place(run: IndexRun, to: str | None) -> IndexRun:
    """Copy the settings with the address or folder of the store; None: unchanged.

    Raises:
        ConfigError: the store has none.
    """
    if to is None:
        return run
    setting = address_setting(type(run.store))
    if setting is None:
        raise ConfigError(f"the store {run.store.kind} takes no address; leave --to out")
    values = run.model_dump(mode="json")
    values["store"][setting] = to
    return parse(IndexRun, values)


def store_values(store: str | Mapping[str, Any], to: str | Path | None) -> dict[str, Any]:
    """Settings of a store by its kind, with its address or folder.

    Raises:
        ConfigError: a store that has no address.
    """
    values = {"kind": store} if isinstance(store, str) else dict(store)
    kind = STORES.classes().get(values.get("kind", STORES.default))
    if to is None or kind is None:  # an unknown kind is refused with the kinds that there are
        return values
    setting = address_setting(kind)
    if setting is None:
        raise ConfigError(f"the store {values['kind']} takes no address; leave `to` out")
    return {**values, setting: str(to)}


_OPEN: dict[str, Any] = {}
"""The store that this process has open, by its settings as JSON."""


def opened(settings: str) -> Any:
    """Connect to a store by its settings as JSON; a process does it once in a job."""
    if settings not in _OPEN:
        close_opened()
        _OPEN[settings] = store_from(settings).open()
    return _OPEN[settings]


def close_opened() -> None:
    """Close the connection of `opened`: a later job may find another store there."""
    while _OPEN:
        _OPEN.popitem()[1].close()


def store_from(settings: str) -> StoreSettings:
    """Read a store's settings from JSON."""
    values = json.loads(settings)
    found = parse(STORES.classes()[values["kind"]], values)
    assert isinstance(found, StoreSettings)
    return found
