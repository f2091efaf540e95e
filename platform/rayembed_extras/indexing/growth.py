"""Divide the parts of a grown index, so that a process goes on to hold few rows.

Part p of P becomes the parts p, p + P, p + 2 P, … of a multiple of P, by the same hash of the
document's id. It happens after all checks of the documents, for which `PartFiles` divides ledgers
as it reads them. The record first says how many parts there will be: a killed job's division is
finished by the next job, before anything else is written. Readers of a store that keeps the rows
of a part together see the former parts until all new ones are there.
"""

import logging
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa

from rayembed.assets.storage import join
from rayembed.data.engine.work_items import Execute, Result, run_tasks
from rayembed_extras.indexing.ledger import read_ledger, write_ledger
from rayembed_extras.indexing.manifest import (
    Manifest,
    TableRecord,
    changed_table,
    folder_of,
    write_manifest,
)
from rayembed_extras.indexing.parts import IndexPart
from rayembed_extras.indexing.places import opened
from rayembed_extras.indexing.rows import parts_of
from rayembed_extras.indexing.settings import IndexRun
from rayembed_extras.indexing.store import VectorStore

logger = logging.getLogger(__name__)

_BYTES_PER_PART = 256 << 20
"""Bytes of the rows of a part, without vectors, in memory; fewer rows make a part of long texts."""


def parts_for(rows: int, row_bytes: int, rows_per_part: int) -> int:
    """Number of parts of a new table.

    Args:
        row_bytes: of all rows in memory.
    """
    return max(1, -(-rows // rows_per_part), -(-row_bytes // _BYTES_PER_PART))


def grown_parts(record: TableRecord, needed: int, store: VectorStore) -> int:
    """Number of parts that a table gets: more if it needs more than twice as many as it has.

    Args:
        needed: number of parts that a new table would have.
    """
    if hasattr(store, "write_part") and not hasattr(store, "divide_part"):
        return record.parts
    if record.growing_to is None and needed > 2 * record.parts:
        return record.parts * -(-needed // record.parts)
    return record.growing_to or record.parts


def divide_grown(
    run: IndexRun, manifest: Manifest, table: str, parts: int, store: VectorStore, execute: Execute
) -> Manifest:
    """Divide the parts of a table, and return the record.

    Args:
        parts: of `grown_parts`.
    """
    record, storage = manifest.tables[table], run.placement.storage_path
    if parts == record.parts:
        return manifest
    logger.info("the index has grown: its %d parts are divided into %d", record.parts, parts)
    manifest = changed_table(manifest, table, growing_to=parts)
    write_manifest(storage, manifest)
    divides = hasattr(store, "divide_part")
    task = DividePart(
        join(folder_of(storage, run.name), table, "ledger"),
        table,
        run.store.model_dump_json() if divides else None,
        parts,
    )
    items = [IndexPart(number) for number in range(record.parts)]
    run_tasks(f"divide parts of {run.name}", task, items, execute)
    if divides:
        store.finish_division(table, parts)  # type: ignore[attr-defined]
    manifest = changed_table(manifest, table, parts=parts, growing_to=None)
    write_manifest(storage, manifest)
    return manifest


@dataclass(frozen=True)
class DividePart:
    """Task: divide a part, in the ledger and in a store that keeps the rows of a part together."""

    ledger: str
    table: str
    store: str | None
    """Settings of the store as JSON; None: it knows no parts."""
    parts: int
    """Number of parts afterwards."""

    def __call__(self, item: IndexPart) -> Result:
        """Write the new parts first and the divided one last, so that it may be repeated."""
        if self.store is not None:
            part_of = partial(parts_of, parts=self.parts)
            opened(self.store).divide_part(self.table, item.number, self.parts, part_of)
        rows = read_ledger(self.ledger, item.number)
        parts = parts_of(rows["document"], self.parts)
        for part in [*np.setdiff1d(parts, item.number).tolist(), item.number]:
            write_ledger(self.ledger, part, rows.filter(pa.array(parts == part)))
        return {"rows_in": len(rows), "rows_out": len(rows), "rejected": {}}
