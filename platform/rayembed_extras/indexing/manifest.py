"""The record of an index: which model made its vectors, of which documents, in which table.

indexes/<name>/index.json        the current table and those before it, see `Manifest`
               <table>/…         hashes of the rows of each part (the ledger) and results of parts
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import exists, join
from rayembed.config.settings import Settings, parse
from rayembed.config.types import Reference
from rayembed.errors import ArtifactError

if TYPE_CHECKING:
    from rayembed_extras.indexing.store import VectorStore

FORMAT = 1
"""Format of the record; raise it when its fields change their meaning."""


class MadeBy(Settings):
    """Model and settings that decide the vectors of a table."""

    reference: Reference
    """Model as it was named, with the version that an alias stood for."""
    weights: str
    """Fingerprint of the model's weights and tokenizer."""
    instruction: str | None
    """Instruction before each document; None: the model's own."""
    query_instruction: str | None = None
    """Instruction with which queries of this index are embedded; None: the model's own."""
    dimensions: int
    dtype: str
    """Number type of the model's computation."""
    number_type: str
    """Number type of the stored vectors."""
    scale: float = 1.0
    """Absolute value of a component that int8 code 127 stands for."""


class TableRecord(Settings):
    """One table of an index: a complete set of vectors, or one that a job is filling."""

    table: str
    made_by: MadeBy
    documents: dict[str, Any]
    """Settings of the documents and chunks, with delimiter and encoding of the last job's files."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Metadata column → Arrow type."""
    parts: int
    """Number of parts into which ids are divided by hash."""
    growing_to: int | None = None
    """Number of parts into which a job is dividing a grown table; None: it is not."""
    complete: bool = False
    rows: int = 0
    documents_read: int = 0
    counts: dict[str, Any] = Field(default_factory=dict)
    """Counts of the last job: in, written, unchanged, deleted, rejected by reason, tokens, seconds.
    """
    updated: str = ""
    """Time of the last finished job in UTC."""
    index: dict[str, Any] | None = None
    """Settings of the store's own index, of a table that is not the current one; None: as the
    current one's."""
    adapter: dict[str, Any] | None = None
    """Map from a newer model's query vectors to this table's vectors, by the newer model's
    fingerprint; see `rayembed upgrade`."""


class Manifest(Settings):
    """Record of an index, in `index.json`."""

    format: int = FORMAT
    name: str
    store: dict[str, Any]
    """Settings of the store, without passwords; `index` is that of the current table."""
    current: str | None = None
    """Table that the index's name refers to."""
    before: str | None = None
    """Table that it referred to before, for `--rollback`."""
    last_number: int = 0
    """Largest number of a table that was ever recorded: no later table has a dropped one's name,
    under which clients may still keep its rows."""
    tables: dict[str, TableRecord] = Field(default_factory=dict)


def folder_of(storage: str, name: str) -> str:
    """Folder of an index below a storage path."""
    return join(storage, "indexes", name)


def read_manifest(storage: str, name: str) -> Manifest | None:
    """Read the record of an index; None: there is no such index.

    Raises:
        ArtifactError: broken, or of another format.
    """
    path = join(folder_of(storage, name), "index.json")
    if not exists(path):
        return None
    values = read_json(path, "Restore it, or build the index under another name")
    values = {key: value for key, value in values.items() if key in Manifest.model_fields}
    if values.get("format") != FORMAT:
        raise ArtifactError(
            f"{path} has format {values.get('format')}, but this version reads format {FORMAT}; "
            "build the index anew under another name"
        )
    return parse(Manifest, values)


def write_manifest(storage: str, manifest: Manifest) -> None:
    """Write the record of an index, replacing the former one in one step."""
    path = join(folder_of(storage, manifest.name), "index.json")
    values = manifest.model_dump(mode="json")
    write_json(path, {**values, "last_number": last_number(manifest)}, indent=2)


def last_number(manifest: Manifest) -> int:
    """Largest number of a table that is or was recorded."""
    return max([manifest.last_number, *(table_number(manifest.name, t) for t in manifest.tables)])


def table_number(name: str, table: str | None) -> int:
    """Number of a table of an index; 0: none of its names."""
    found = re.fullmatch(re.escape(name) + r"_(\d+)", table or "")
    return int(found[1]) if found else 0


def changed_table(manifest: Manifest, table: str, **values: Any) -> Manifest:
    """Copy a record with changes to one of its tables."""
    record = manifest.tables[table].model_copy(update=values)
    tables: Mapping[str, TableRecord] = {**manifest.tables, table: record}
    return manifest.model_copy(update={"tables": tables})


def switched(manifest: Manifest, table: str) -> Manifest:
    """Copy a record that refers to another table, which updates go on with the settings of
    documents that the former one has: a backfill out of the store reads them by others.
    """
    current, index = str(manifest.current), manifest.store.get("index", {})
    documents, own = manifest.tables[current].documents, manifest.tables[table].index
    changed = changed_table(manifest, table, documents=documents, index=None)
    changed = changed_table(changed, current, index=index)
    store = {**manifest.store, "index": index if own is None else own}
    return changed.model_copy(update={"current": table, "before": current, "store": store})


def followed(storage: str, manifest: Manifest, store: "VectorStore") -> Manifest:
    """Let a record follow the store if a job was killed between the switch of the name and of the
    record.
    """
    table = store.pointed(manifest.name)
    record = manifest.tables.get(table or "")
    if table is None or table == manifest.current or record is None or not record.complete:
        return manifest
    store.point(manifest.name, table)  # a store may need more than one step
    manifest = switched(manifest, table)
    write_manifest(storage, manifest)
    return manifest
