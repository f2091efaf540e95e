"""The ledger of a part: which rows of it the store has, by hashes of text and metadata.

    indexes/<name>/<table>/ledger/000012.parquet    id, document, hashes, pending

Before a job writes to the store it marks the rows that it will write or delete as `pending`, and
afterwards it writes the ledger without marks. So a later job, also one of other documents, knows
which rows the store may have in another state than the ledger, and writes or deletes them again.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.assets.arrow_files import parquet_bytes, read_sealed
from rayembed.assets.storage import exists, join, write_atomic

LEDGER = pa.schema(
    [
        ("id", pa.string()),
        ("document", pa.string()),
        ("text_hash", pa.int64()),
        ("metadata_hash", pa.int64()),
        ("pending", pa.bool_()),
    ]
)
"""Columns of a ledger; a pending row that the store has never had has no hash."""

_REMEDY = (
    "Without it the rows of this part are not known: remove the index's folder and its table in "
    "the store, and build the index again"
)


def ledger_path(folder: str, part: int) -> str:
    """Path of the ledger of a part, below the folder of ledgers."""
    return join(folder, f"{part:06d}.parquet")


def read_ledger(folder: str, part: int) -> pa.Table:
    """Read the ledger of a part; empty where no job has written to the part.

    Raises:
        ArtifactError: the file is broken.
        StorageError: the storage does not give it.
    """
    path = ledger_path(folder, part)
    if not exists(path):
        return LEDGER.empty_table()
    return read_sealed(path, remedy=_REMEDY)


def write_ledger(folder: str, part: int, table: pa.Table) -> None:
    """Write the ledger of a part; raises as `write_atomic`."""
    write_atomic(ledger_path(folder, part), parquet_bytes(table, statistics=False))


def ledger_of(rows: pa.Table) -> pa.Table:
    """Return the ledger of a part whose rows are all in the store."""
    pending = pa.array(np.zeros(len(rows), bool))
    table = rows.select(LEDGER.names[:-1]).append_column("pending", pending)
    return table.cast(LEDGER)


@dataclass(frozen=True)
class LedgerDifference:
    """Comparison of a part's rows with its ledger."""

    write: np.ndarray
    """Indices of the rows that are written: new, changed, or pending."""
    embed: np.ndarray
    """Those of `write` that are embedded; the others have other metadata, and keep their vector."""
    delete: list[str]
    """Ids of rows that are gone."""
    new: int
    """Documents that the index did not have."""
    changed: int
    """Documents with another text or other metadata, or that an earlier job has not finished."""
    unchanged: int
    deleted: int
    """Documents that are gone."""

    @property
    def is_empty(self) -> bool:
        """Whether the store has exactly the part's rows."""
        return not len(self.write) and not self.delete


def compare(rows: pa.Table, ledger: pa.Table) -> LedgerDifference:
    """Compare a part's rows (ids without repetition) with its ledger."""
    stored = pc.invert(pc.is_null(ledger["text_hash"]))
    place = pc.index_in(rows["id"], value_set=ledger["id"].combine_chunks())
    known = pc.is_valid(place).to_numpy(zero_copy_only=False)
    embedded = same = np.zeros(len(rows), bool)
    if len(ledger):
        old = ledger.take(place.fill_null(0))
        equal_text, same = (
            pc.equal(old[name], rows[name]).fill_null(False).to_numpy()
            for name in ("text_hash", "metadata_hash")
        )
        embedded = known & equal_text & ~old["pending"].to_numpy()
        same = same & embedded
    gone = ledger.filter(pc.invert(pc.is_in(ledger["id"], rows["id"].combine_chunks())))
    codes = rows["document"].combine_chunks().dictionary_encode()
    documents = codes.dictionary
    touched = np.zeros(len(documents), bool)
    touched[codes.indices.to_numpy()[~same]] = True
    touched |= pc.is_in(documents, gone["document"].combine_chunks()).to_numpy(zero_copy_only=False)
    before = ledger["document"].filter(stored).unique()
    is_old = pc.is_in(documents, before).to_numpy(zero_copy_only=False)
    return LedgerDifference(
        write=np.flatnonzero(~same),
        embed=np.flatnonzero(~embedded),
        delete=gone["id"].to_pylist(),
        new=int((~is_old).sum()),
        changed=int((is_old & touched).sum()),
        unchanged=int((is_old & ~touched).sum()),
        deleted=int(pc.sum(pc.invert(pc.is_in(before, documents))).as_py() or 0),
    )


def marked(rows: pa.Table, ledger: pa.Table, difference: LedgerDifference) -> pa.Table:
    """Return the ledger with the rows pending that a job is about to embed and write, or to delete.

    Rows of which it writes the metadata alone have no hash of metadata, as their vector is right
    in any case.
    """
    ids = rows["id"].take(pa.array(difference.embed))
    asked = pa.concat_arrays([*ids.chunks, pa.array(difference.delete, pa.string())])
    pending = pc.or_(ledger["pending"], pc.is_in(ledger["id"], asked))
    written = pc.is_in(ledger["id"], rows["id"].take(pa.array(difference.write)).combine_chunks())
    metadata = pc.if_else(written, pa.scalar(None, pa.int64()), ledger["metadata_hash"])
    kept = pa.table(
        [*ledger.select(LEDGER.names[:-2]).columns, metadata, pending], names=LEDGER.names
    )
    added = rows.take(pa.array(difference.embed)).select(["id", "document"])
    added = added.filter(pc.invert(pc.is_in(added["id"], ledger["id"].combine_chunks())))
    nothing = pa.nulls(len(added), pa.int64())
    fresh = pa.table(
        [*added.columns, nothing, nothing, pa.array(np.ones(len(added), bool))], schema=LEDGER
    )
    return pa.concat_tables([kept.cast(LEDGER), fresh])


def doubted(ledger: pa.Table, rows: pa.Array | bool = True) -> pa.Table:
    """Return the ledger with further rows pending, so that the next job embeds them again.

    Args:
        rows: whether each row is one of them; True: all.
    """
    place = ledger.schema.get_field_index("pending")
    return ledger.set_column(place, "pending", pc.or_(ledger["pending"], rows))


def without_repetitions(rows: pa.Table) -> tuple[pa.Table, int]:
    """Return the rows with the first of each id, and the number of documents left out."""
    codes = rows["id"].combine_chunks().dictionary_encode().indices.to_numpy()
    _, first = np.unique(codes, return_index=True)
    if len(first) == len(rows):
        return rows, 0
    twice = np.ones(len(rows), bool)
    twice[first] = False
    dropped = int((rows["chunk"].to_numpy()[twice] == 0).sum())
    return rows.take(pa.array(np.sort(first))), dropped


def repeated(rows: pa.Table) -> list[tuple[str, list[str]]]:
    """List documents that occur several times, with the origins of their rows."""
    whole = rows.filter(pc.equal(rows["chunk"], 0))
    counts = pc.value_counts(whole["document"].combine_chunks())
    names = counts.filter(pc.greater(counts.field("counts"), 1)).field("values")
    return [
        (name, whole.filter(pc.equal(whole["document"], name))["origin"].to_pylist())
        for name in names.to_pylist()[:3]
    ]
