"""Rows by their ids, in every store of the contract tests."""

import numpy as np
import pytest
from index_engines import ENGINES, IDS, by_id, drawn_rows, layout_of, settings_of

from rayembed.config.settings import parse
from rayembed_extras.indexing.settings import STORES


def engine_of(kind, folder):
    """Settings of a store in a fresh place."""
    if kind in ENGINES:
        return settings_of(kind, "float32", folder)
    if kind == "pgvector":
        pytest.importorskip("psycopg")
        from postgres_server import new_database

        place = new_database()
    else:
        pytest.importorskip("qdrant_client")
        place = str(folder / kind)
    return parse(STORES.classes()[kind], {"kind": kind, "to": place})


@pytest.mark.parametrize("kind", STORES.classes())
def test_rows_are_read_by_their_ids(kind, tmp_path):
    settings = engine_of(kind, tmp_path)
    layout = layout_of("float32")
    ids = [*IDS, *(f"d{n}" for n in range(200))]
    rows = drawn_rows(np.random.default_rng(5), ids, layout)
    store = settings.open()
    try:
        store.create("docs_1", layout)
        store.upsert("docs_1", rows)
        store.finish("docs_1", layout)
        store.delete("docs_1", ["d7"])
        reference = by_id(rows)
        asked = [*IDS, "d3", "d7", "d199", "nobody's"]
        for columns in (["id", "document", "chunk", "text", "topic"], ["views", "id", "vector"]):
            found = store.fetch("docs_1", asked, columns)
            assert found.schema.names == columns
            assert {row["id"]: row for row in found.to_pylist()} == {
                name: {column: reference[name][column] for column in columns}
                for name in asked
                if name in reference and name != "d7"
            }
        empty = store.fetch("docs_1", [], ["id", "text"])
        assert (len(empty), empty.schema.names) == (0, ["id", "text"])
    finally:
        store.close()
