"""Tables of `<name>_trial` that `rayembed index-scores` fills for a measurement, and removes."""

from collections.abc import Iterator
from contextlib import contextmanager

from rayembed.assets.json_files import read_json, write_json
from rayembed.assets.storage import exists, join, remove_file
from rayembed_extras.indexing.manifest import folder_of
from rayembed_extras.indexing.store import VectorStore


def trial_of(name: str) -> str:
    """Name by whose tables the copies of an index are called."""
    return f"{name}_trial"


@contextmanager
def trial_table(storage: str, name: str, store: VectorStore) -> Iterator[str]:
    """Name an unused table for a copy, and remove it at the end.

    A note in the index's folder names it, so that the next call removes what a killed job left,
    and no table of another index.
    """
    note, trial = join(folder_of(storage, name), "scores_copy.json"), trial_of(name)
    if exists(note):
        store.drop(str(read_json(note, "Remove it, and the table that it names")["table"]))
    there = [int(table.rpartition("_")[2]) for table in store.tables(trial)]
    table = f"{trial}_{1 + max(there, default=0)}"
    write_json(note, {"table": table})
    try:
        yield table
    finally:
        store.drop(table)
        remove_file(note)
