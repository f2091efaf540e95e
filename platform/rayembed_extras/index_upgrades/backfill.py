"""Embed an index's documents again by the new model, into a new table, and switch to it.

indexes/<name>/<new table>/source/000012.parquet    documents out of the store, without
                                                    `documents`; removed at the end
"""

import logging
import tempfile
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.storage import exists, join, read_bytes, remove_folder, write_atomic
from rayembed.config.settings import parse
from rayembed.errors import ConfigError, DataError
from rayembed_extras.index_upgrades.settings import UpgradeRun
from rayembed_extras.index_upgrades.switch import SOURCE, OpenIndex, open_index, point
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.documents import (
    IndexPiece,
    ReadIndexDocuments,
    TokenizerPlace,
    document_pieces,
    kept_settings,
    settled_columns,
)
from rayembed_extras.indexing.manifest import TableRecord, changed_table, write_manifest
from rayembed_extras.indexing.rows import DocumentColumns
from rayembed_extras.indexing.settings import Documents, IndexRun

logger = logging.getLogger(__name__)

_ROWS_PER_FILE = 16_384
_WHOLE = "complete"
"""File that says that all documents of the store were written."""


def check_backfill(run: UpgradeRun, record: TableRecord) -> None:
    """Raise if an index's documents cannot be had for a backfill.

    Raises:
        ConfigError: they are in chunks, or the store keeps no texts, and no files are named.
        DataError: the named files are not there.
    """
    if run.documents is not None:
        document_pieces(_documents(record, run.documents), versions=False)
        return
    kept = record.documents
    by = (kept.get("chunks") or {}).get("by", "document")
    if by == "document" and kept.get("store_text", True):
        return
    why = "keeps no texts" if by == "document" else f"has pieces of documents (chunks.by={by})"
    raise ConfigError(
        f"the store of {run.name!r} {why}, so its documents must be read from their files; name "
        "them: --documents PATH, as `rayembed index` had it"
    )


def check_begun(run: UpgradeRun, index: OpenIndex, weights: str, dimensions: int) -> None:
    """Raise if a model's begun backfill has other settings than this job.

    Args:
        weights: fingerprint of the new model.
        dimensions: of its vectors.

    Raises:
        ConfigError: it has; the message says which.
    """
    table = index.begun_table(weights)
    if table is None:
        return
    begun, current = index.manifest.tables[table], index.record
    files, store = _documents(current, "-"), _documents_of_store(current, "-")
    wanted = files if run.documents is not None else store
    different = []
    if _rows_of(begun.documents) != _rows_of(wanted.model_dump(mode="json")):
        different.append("without --documents" if run.documents is not None else "with --documents")
    for name, value in (("dimensions", dimensions), ("instruction", run.instruction)):
        if (before := getattr(begun.made_by, name)) != value:
            different.append(f"with {name}={'null' if before is None else before}")
    if different:
        raise ConfigError(
            f"a backfill of {run.name!r} into {table!r} was begun {' and '.join(different)}; go on "
            f"with the same, or remove it: rayembed upgrade --name {run.name} --drop"
        )


def _rows_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of documents that decide a table's rows."""
    documents = parse(Documents, {**values, "path": "-"})
    return kept_settings(documents, DocumentColumns(documents.id, documents.text, {}))


def backfill(run: UpgradeRun, storage: str, weights: str) -> tuple[str, ...]:
    """Embed all documents into a new table, and let the index's name refer to it in one step.

    A killed backfill goes on by the same call; the former table is kept. The caller has locked the
    index, so that no other job changes it from the first document that is read to the switch.

    Args:
        weights: fingerprint of the new model.

    Returns:
        Lines that say what was done.

    Raises:
        RayembedError: as `rayembed index`.
    """
    index = open_index(storage, run.name)
    with closing(index.store):
        check_backfill(run, index.record)
        table = index.next_table(weights)
        source = join(index.folder, table, SOURCE)
        if run.documents is None:
            if not _is_written(index, source):
                _write_documents(index, source)
            documents = _documents_of_store(index.record, source)
        else:
            documents = _documents(index.record, run.documents)
    made = index.record.made_by
    own_index = run.store_index or index.manifest.store.get("index", {})
    settings = {
        "name": run.name,
        "model": {
            "reference": run.model,
            "instruction": run.instruction,
            "dimensions": run.dimensions,
            "dtype": run.dtype,
        },
        "documents": documents.model_dump(mode="json"),
        "store": {**index.manifest.store, "index": own_index},
        "tracking_uri": run.tracking_uri,
        "rows_per_part": run.rows_per_part,
        "placement": run.placement.model_dump(mode="json"),
    }
    built = build_index(parse(IndexRun, settings), beside=table)
    manifest = built.manifest
    made_by = manifest.tables[table].made_by
    if run.query_instruction is not None:
        made_by = made_by.model_copy(update={"query_instruction": run.query_instruction})
    write_manifest(storage, changed_table(manifest, table, made_by=made_by, index=own_index))
    index = open_index(storage, run.name)
    former = index.table
    with closing(index.store):
        point(index, table)
    remove_folder(source)
    counts = manifest.tables[table].counts
    return (
        f"Backfilled {counts['texts']:,} texts into {table} by {run.model} "
        f"(before: {made.reference})",
        f"Switched   {run.name} refers to {table}; {former} is kept: --rollback goes back, --drop "
        "removes it",
    )


def _documents(record: TableRecord, path: str) -> Documents:
    """Settings of an index's documents, with the place of their files."""
    return parse(Documents, {**record.documents, "path": path})


def _documents_of_store(record: TableRecord, folder: str) -> Documents:
    metadata = list(record.metadata)
    kept = bool(record.documents.get("store_text", True))
    values = {"path": join(folder, "*.parquet"), "id": "id", "text": "text"}
    return parse(Documents, {**values, "metadata": metadata, "store_text": kept})


def _state_of(index: OpenIndex) -> bytes:
    """Table and time of its last update, to which documents out of the store belong."""
    return f"{index.table} {index.record.updated}".encode()


def _is_written(index: OpenIndex, folder: str) -> bool:
    """Whether the folder has the documents of the store as they are now."""
    path = join(folder, _WHOLE)
    return exists(path) and read_bytes(path) == _state_of(index)


def _write_documents(index: OpenIndex, folder: str) -> None:
    """Write the store's ids, texts and metadata as Parquet files, which stay the same for all
    tries.
    """
    remove_folder(folder)
    columns = ["id", "text", *index.record.metadata]
    waiting: list[pa.Table] = []
    number = rows = 0

    def write() -> None:
        nonlocal number, waiting
        content = parquet_bytes(pa.concat_tables(waiting))
        write_atomic(join(folder, f"{number:06d}.parquet"), content)
        number, waiting = number + 1, []

    for batch in index.store.scan(index.table, columns):
        waiting.append(batch.select(columns))
        rows += len(batch)
        if sum(map(len, waiting)) >= _ROWS_PER_FILE:
            write()
    if waiting:
        write()
    if rows != index.record.rows:
        raise DataError(
            f"the store has {rows:,} rows in {index.table!r}, but the record says "
            f"{index.record.rows:,}: the table was changed by another program; name the files "
            "of the documents: --documents PATH"
        )
    write_atomic(join(folder, _WHOLE), _state_of(index))
    logger.info("%s documents are read from the store", f"{rows:,}")


def texts_of_rows(
    record: TableRecord, path: str, wanted: Collection[str], tracking_uri: str | None
) -> Mapping[str, str]:
    """Read the texts of rows from the documents' files, for stores that keep none.

    Args:
        path: of the files.
        wanted: ids of rows.

    Raises:
        DataError: the files have no such rows.
    """
    documents = _documents(record, path)
    pieces = document_pieces(documents)
    columns = settled_columns(documents, pieces)
    made = record.made_by
    whole = documents.chunks.by == "document"
    place = None if whole else TokenizerPlace(made.reference, made.weights, tracking_uri)
    ids = pa.array(sorted(wanted))
    found: dict[str, str] = {}
    for piece in pieces:
        with tempfile.TemporaryDirectory() as folder:
            read = ReadIndexDocuments(folder, columns, documents.chunks, place)
            for name, _ in read(IndexPiece(piece))["files"]:
                rows = read_sealed(str(Path(folder) / name), ["id", "text"], remedy="Try again")
                rows = rows.filter(pc.is_in(rows["id"], ids))
                found.update(zip(rows["id"].to_pylist(), rows["text"].to_pylist(), strict=True))
    if missing := sorted(set(wanted) - found.keys()):
        raise DataError(
            f"{path!r} lacks {len(missing):,} of {len(set(wanted)):,} texts of the index "
            f"({', '.join(missing[:3])}); name the files that the index was last updated with"
        )
    return found
