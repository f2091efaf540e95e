"""Read and change what an index's name refers to: record an adapter, roll back, drop old tables."""

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from rayembed.assets.storage import join, list_files, remove_file, remove_folder
from rayembed.config.settings import nearest, parse
from rayembed.errors import ArtifactError, ConfigError
from rayembed_extras.index_upgrades.maps import QueryMap, load_map
from rayembed_extras.indexing.ledger import read_ledger
from rayembed_extras.indexing.manifest import (
    Manifest,
    TableRecord,
    changed_table,
    folder_of,
    followed,
    last_number,
    read_manifest,
    switched,
    table_number,
    write_manifest,
)
from rayembed_extras.indexing.settings import STORES, StoreSettings
from rayembed_extras.indexing.store import VectorStore

ADAPTERS = "adapters"
"""Folder of an index with a folder for each map of a newer model."""


logger = logging.getLogger(__name__)

SOURCE = "source"
"""Folder of a new table with the documents out of the store, for a backfill."""


@dataclass(frozen=True)
class OpenIndex:
    """An index's record, its current table, and its open store."""

    storage: str
    manifest: Manifest
    store: VectorStore

    @property
    def name(self) -> str:
        """Name of the index."""
        return self.manifest.name

    @property
    def table(self) -> str:
        """Current table."""
        assert self.manifest.current is not None
        return self.manifest.current

    @property
    def record(self) -> TableRecord:
        """Record of the current table."""
        return self.manifest.tables[self.table]

    @property
    def folder(self) -> str:
        """Folder of the index's record."""
        return folder_of(self.storage, self.name)

    def begun_table(self, weights: str) -> str | None:
        """Name of the table that a backfill by a model has begun, or filled without a switch to it.

        The name has never referred to a table with a greater number than the current and the former
        one have; tables with lesser ones stay as they were when it left them.

        Args:
            weights: fingerprint of the model.
        """
        last = max(self._number(self.table), self._number(self.manifest.before))
        for table, record in self.manifest.tables.items():
            if record.made_by.weights == weights and self._number(table) > last:
                return table
        return None

    def next_table(self, weights: str) -> str:
        """Name of the table that a backfill by a model fills: as `begun_table`, else one with the
        next number.
        """
        there = map(self._number, self.store.tables(self.name))
        new = f"{self.name}_{1 + max([last_number(self.manifest), *there])}"
        return self.begun_table(weights) or new

    def _number(self, table: str | None) -> int:
        return table_number(self.name, table)

    @property
    def half_filled(self) -> dict[str, TableRecord]:
        """Tables that a job has begun and not finished, without the current one."""
        tables = self.manifest.tables
        return {t: r for t, r in tables.items() if not r.complete and t != self.table}


def known_index(storage: str, name: str) -> Manifest:
    """Read the record of an index that has a current table, without opening its store.

    Raises:
        ConfigError: there is no such index.
        ArtifactError: the record is damaged, belongs to another index, or no table is complete.
    """
    manifest = read_manifest(storage, name)
    if manifest is None:
        files = list_files(join(storage, "indexes"), recursive=True)
        there = {path.partition("/")[0] for path in files if path.endswith("/index.json")}
        known = nearest(name, sorted(there)) if there else "there is none"
        raise ConfigError(
            f"there is no index {name!r} below {storage!r} ({known}); build it by `rayembed "
            "index`, or name the storage that has it: --storage-path (of a server --set "
            "storage_path=…, in Python output=)"
        )
    if manifest.name != name:
        raise ArtifactError(
            f"{join(folder_of(storage, name), 'index.json')!r} is the record of the index "
            f"{manifest.name!r}, not of {name!r}; put it back, or restore that of {name!r}"
        )
    if manifest.current is None or manifest.current not in manifest.tables:
        raise ArtifactError(
            f"the index {name!r} has no complete table yet; run `rayembed index` to its end first"
        )
    return manifest


def open_index(storage: str, name: str) -> OpenIndex:
    """Open an index's store, and check that its name refers to the recorded table.

    Raises:
        RayembedError: as `known_index`; or the store does not answer, has lost the table, or its
            name refers to another one.
    """
    manifest = known_index(storage, name)
    opened = OpenIndex(storage, manifest, open_store(manifest))
    try:
        _check_pointed(opened)
    except BaseException:
        opened.store.close()
        raise
    return opened


def _check_pointed(opened: OpenIndex) -> None:
    name = opened.name
    if opened.table not in opened.store.tables(name):
        raise ArtifactError(
            f"the store of {name!r} has no table {opened.table!r}, which its record names; restore "
            "the table, or build the index again"
        )
    pointed = opened.store.pointed(name)
    if pointed != opened.table:
        raise ArtifactError(
            f"in the store {name!r} refers to {pointed!r}, but the record says {opened.table!r}; "
            "another program has moved it. Point it back, or build the index under another name"
        )


def open_store(manifest: Manifest) -> VectorStore:
    """Connect to the store of a record."""
    settings: StoreSettings = parse(STORES.classes()[manifest.store["kind"]], manifest.store)  # type: ignore[assignment]
    store: VectorStore = settings.open()
    return store


def record_adapter(index: OpenIndex, weights: str, made: QueryMap, facts: dict[str, Any]) -> str:
    """Save a map for a newer model and record it for the current table; return the map's folder.

    Args:
        weights: fingerprint of the newer model.
        facts: stored with the map and in the record.
    """
    # Beside a former map, which a server may be about to load, and which stays the recorded one
    # until both files are there.
    place = f"{ADAPTERS}/{index.table}-{weights}-{made.content()[1]}"
    folder = join(index.folder, place)
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    entry = {"folder": place, "kind": made.kind, "dimensions": list(made.dimensions)}
    told = {**made.facts, **facts, "index": index.name, "table": index.table}
    QueryMap(made.kind, made.dimensions, made.arrays, told).save(folder)
    adapters = {**(index.record.adapter or {}), weights: {**entry, **facts, "made": when}}
    write_manifest(index.storage, changed_table(index.manifest, index.table, adapter=adapters))
    return folder


def adapter_for(storage: str, name: str, weights: str) -> QueryMap | None:
    """Load the map of a newer model's queries into an index's current table.

    Args:
        weights: fingerprint of the newer model.

    Returns:
        None: the model made the table itself, so that its queries need no map.

    Raises:
        RayembedError: there is no such index, or no adapter for this model.
    """
    manifest = known_index(storage, name)
    record = manifest.tables[str(manifest.current)]
    if record.made_by.weights == weights:
        return None
    entry = (record.adapter or {}).get(weights)
    if entry is None:
        raise ConfigError(
            f"the index {name!r} was made by {record.made_by.reference} "
            f"({record.made_by.weights}) and has no adapter for a model with the fingerprint "
            f"{weights}; make one: rayembed upgrade --name {name} --model MODEL --road adapter"
        )
    return load_map(join(folder_of(storage, name), entry["folder"]))


def forget_adapters(storage: str, manifest: Manifest, weights: str | None = None) -> list[str]:
    """Remove the adapters of an index's current table; return their kinds and models.

    Args:
        weights: fingerprint of the model whose adapter goes; None: all adapters of the table.

    Raises:
        ConfigError: there is none.
    """
    name, table = manifest.name, str(manifest.current)
    kept = dict(manifest.tables[table].adapter or {})
    gone = [kept.pop(key) for key in [*kept] if weights in (None, key)]
    if not gone:
        models = ", ".join(str(entry.get("model")) for entry in kept.values())
        raise ConfigError(
            f"the table {table!r} of the index {name!r} has no adapter"
            + (f" for this model ({weights}), but for {models}" if kept else "; none to forget")
        )
    # First, so that no record names a map that is gone.
    write_manifest(storage, changed_table(manifest, table, adapter=kept or None))
    for entry in gone:
        remove_folder(join(folder_of(storage, name), entry["folder"]))
    return [f"{entry['kind']} of {entry.get('model')}" for entry in gone]


def check_updated(index: OpenIndex) -> None:
    """Raise if the current table has the documents of two times, as an update of it was stopped.

    Raises:
        ConfigError: it has.
    """
    record, folder = index.record, join(index.folder, index.table)
    files = list_files(join(folder, "working"), recursive=True)
    # Files of a job that was refused before it wrote to the store change nothing.
    written = record.growing_to is not None or any("/done/" in path for path in files)
    if written or (files and any(_is_unfinished(folder, part) for part in range(record.parts))):
        raise ConfigError(
            f"an update of the index {index.name!r} was stopped, so that {index.table!r} has some "
            "of its documents as they were before; finish it first: rayembed index --documents "
            f"PATH --model {record.made_by.reference} --name {index.name} --update"
        )


def _is_unfinished(folder: str, part: int) -> bool:
    """Whether a job was writing rows of a part of a table."""
    ledger = read_ledger(join(folder, "ledger"), part)
    unsure = pc.or_(ledger["pending"], pc.is_null(ledger["metadata_hash"]))
    return bool(pc.any(unsure).as_py())


Switched = tuple[str, str]
"""The tables that a name referred to before and refers to now."""


def roll_back(storage: str, name: str) -> Switched:
    """Let an index's name refer to its former table again, in one step.

    Raises:
        ConfigError: there is no former table, or it was dropped.
        RayembedError: as `open_index`.
    """
    mended(storage, name)
    index = open_index(storage, name)
    before = index.manifest.before
    with closing(index.store):
        if before is None or before not in index.manifest.tables:
            raise ConfigError(
                f"the index {name!r} has no former table to go back to: no backfill changed "
                "its table (an adapter leaves it as it is), or --drop has removed the former one"
            )
        if before not in index.store.tables(name):
            raise ArtifactError(f"the store of {name!r} has lost the former table {before!r}")
        point(index, before)
    return index.table, before


def point(index: OpenIndex, table: str) -> None:
    """Let an index's name refer to another complete table; the current one becomes the former one.

    The record follows the store, and `mended` repairs a stop between both.
    """
    if not index.manifest.tables[table].complete:
        raise ArtifactError(f"the table {table!r} is not complete; nothing may refer to it")
    index.store.point(index.name, table)
    write_manifest(index.storage, switched(index.manifest, table))


def mended(storage: str, name: str) -> Manifest:
    """Read a record, and let it follow the store if a job was killed between the switch of the name
    and of the record.
    """
    manifest = known_index(storage, name)
    with closing(open_store(manifest)) as store:
        after = followed(storage, manifest, store)
    if after.current != manifest.current:
        logger.info("the switch of a killed job is finished: %s refers to %s", name, after.current)
        remove_folder(join(folder_of(storage, name), str(after.current), SOURCE))
    return after


def drop_tables(storage: str, name: str) -> list[str]:
    """Remove all tables of an index but the current one, also half-filled ones; return their names.

    Raises:
        ConfigError: there are none.
        RayembedError: as `open_index`.
    """
    mended(storage, name)
    index = open_index(storage, name)
    with closing(index.store):
        # Of the record alone: a table of another program may have such a name, too.
        others = sorted({*index.manifest.tables} - {index.table})
        if not others:
            raise ConfigError(
                f"the index {name!r} has one table alone, {index.table!r}; none to drop"
            )
        tables = dict(index.manifest.tables)
        last = last_number(index.manifest)
        kept = index.manifest.model_copy(update={"before": None, "last_number": last})
        for table in others:  # first, so that no record calls a table complete that is gone
            tables[table] = tables[table].model_copy(update={"complete": False})
        for table in others:
            write_manifest(storage, kept.model_copy(update={"tables": dict(tables)}))
            # Before the table, so that no ledger is left of rows that are gone.
            remove_folder(join(index.folder, table))
            index.store.drop(table)
            del tables[table]
        write_manifest(storage, kept.model_copy(update={"tables": tables}))
        return others


def drop_begun(storage: str, manifest: Manifest) -> list[str]:
    """Remove an index whose first table no job has finished; return the names of its tables.

    Raises:
        ConfigError: the name refers to the table already, and only the record is not finished.
    """
    folder = folder_of(storage, manifest.name)
    with closing(open_store(manifest)) as store:
        if (table := store.pointed(manifest.name)) in manifest.tables:
            made = manifest.tables[str(table)].made_by
            raise ConfigError(
                f"the index {manifest.name!r} is built: in the store its name refers to {table!r}, "
                "which is not removed; its job was stopped before the record said so. Give the "
                "command that began it again, which has nothing left to embed: rayembed index "
                f"--documents PATH --model {made.reference} --name {manifest.name}; then rayembed "
                "upgrade changes its model"
            )
        for table in manifest.tables:
            store.drop(table)
            remove_folder(join(folder, table))
    remove_file(join(folder, "index.json"))
    return sorted(manifest.tables)
