"""A vector store in this process, and indexes in it with their records."""

import numpy as np
import pyarrow as pa
import pyarrow.compute

from rayembed_extras.indexing.layout import layout_of, stored_vectors
from rayembed_extras.indexing.manifest import MadeBy, Manifest, TableRecord, write_manifest
from rayembed_extras.indexing.store import SearchResults


class MemoryStore:
    """Tables by name, and what each index's name refers to."""

    has_parallel_writers = False

    def __init__(self, rows_per_batch=37):
        self.rows, self.names, self.rows_per_batch = {}, {}, rows_per_batch
        self.layouts, self.scanned = {}, []

    def check(self, layout, name):
        pass

    def tables(self, name):
        return sorted(table for table in self.rows if table.rpartition("_")[0] == name)

    def create(self, table, layout):
        self.rows.setdefault(table, layout.schema.empty_table())

    def upsert(self, table, rows):
        new = set(rows["id"].to_pylist())
        self.delete(table, new)
        kept = self.rows[table]
        self.rows[table] = pa.concat_tables(
            [kept, rows.select(kept.column_names).cast(kept.schema)]
        )

    def delete(self, table, ids):
        gone = set(ids)
        here = self.rows[table]
        kept = [name not in gone for name in here["id"].to_pylist()]
        self.rows[table] = here.filter(pa.array(kept, pa.bool_()))

    def finish(self, table, layout):
        pass

    def count(self, table):
        return len(self.rows[table])

    def scan(self, table, columns=None):
        self.scanned.append((table, columns))
        rows = self.rows[table] if columns is None else self.rows[table].select(columns)
        for start in range(0, len(rows), self.rows_per_batch):
            yield rows.slice(start, self.rows_per_batch)

    def fetch(self, table, ids, columns):
        rows, wanted = self.rows[table], pa.array(list(ids), pa.string())
        return rows.filter(pa.compute.is_in(rows["id"], wanted)).select(columns)

    def search(self, table, queries, k, options=None):
        vectors = np.stack(self.rows[table]["vector"].to_numpy(zero_copy_only=False))
        scores = queries @ vectors.astype(np.float32).T
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        ids = np.array(self.rows[table]["id"].to_pylist())
        return SearchResults(
            [ids[row].tolist() for row in order], np.take_along_axis(scores, order, 1)
        )

    def point(self, name, table):
        self.names[name] = table

    def pointed(self, name):
        return self.names.get(name)

    def drop(self, table):
        assert table not in self.names.values()
        self.rows.pop(table, None)

    def close(self):
        pass


def made_by(weights="old", dimensions=8, **values):
    """Record of a model."""
    given = {"reference": "old model", "weights": weights, "instruction": None}
    given |= {"dimensions": dimensions, "dtype": "float32", "number_type": "float32"}
    return MadeBy(**{**given, **values})


def index_of(store, storage, name, texts, vectors, *, owners=None, made=None, documents=None):
    """An index of rows, each of a document of its own unless `owners` names it; its record is
    written, too.
    """
    made = made or made_by(dimensions=vectors.shape[1])
    record = TableRecord(
        table=f"{name}_1",
        made_by=made,
        documents={"path": "documents.jsonl", "store_text": True, **(documents or {})},
        parts=1,
        complete=True,
        rows=len(texts),
        documents_read=len(set(owners or texts)),
        updated="2026-11-30 12:00:00 UTC",
    )
    layout = layout_of(record)
    ids = [f"r{number}" for number in range(len(texts))]
    columns = {
        "id": ids,
        "document": owners or [f"d{number}" for number in range(len(texts))],
        "chunk": pa.array([0] * len(texts), pa.int32()),
        "vector": stored_vectors(vectors, layout.number_type),
        **({"text": list(texts)} if layout.has_text else {}),
    }
    store.create(record.table, layout)
    rows = pa.table(
        [
            pa.array(columns[n]) if isinstance(columns[n], list) else columns[n]
            for n in layout.schema.names
        ],
        names=layout.schema.names,
    )
    store.upsert(record.table, rows)
    store.point(name, record.table)
    manifest = Manifest(
        name=name, store={"kind": "parquet"}, current=record.table, tables={record.table: record}
    )
    write_manifest(str(storage), manifest)
    return manifest
