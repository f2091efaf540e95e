"""Find rows by their ids in a store that can only read all rows."""

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.compute as pc


def rows_of_ids(batches: Iterable[pa.Table], ids: Sequence[str], empty: pa.Table) -> pa.Table:
    """Return the rows of these ids out of batches with a column `id`, and read no further than
    needed.

    Args:
        empty: a table without rows, with the columns of the batches.
    """
    wanted = pa.array(list(dict.fromkeys(ids)), pa.string())
    found, missing = [empty], len(wanted)
    for batch in batches:
        if not missing:
            break
        rows = batch.filter(pc.is_in(batch["id"], wanted))
        found.append(rows)
        missing -= len(rows)
    return pa.concat_tables(found).combine_chunks()
