"""A part of an index is compared with its ledger: what is written, deleted and counted."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from rayembed_extras.indexing.ledger import (
    LEDGER,
    compare,
    doubted,
    ledger_of,
    marked,
    read_ledger,
    repeated,
    without_repetitions,
    write_ledger,
)

DOCUMENTS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=3),
    max_size=6,
)
"""Document → hashes of text and metadata of its pieces."""


def rows_of(documents):
    rows = [
        {
            "id": f"{name}#{n}",
            "document": name,
            "chunk": n,
            "text_hash": text,
            "metadata_hash": metadata,
            "origin": f"a.jsonl@{n}",
        }
        for name, hashes in documents.items()
        for n, (text, metadata) in enumerate(hashes)
    ]
    schema = pa.schema(
        [
            ("id", pa.string()),
            ("document", pa.string()),
            ("chunk", pa.int32()),
            ("text_hash", pa.int64()),
            ("metadata_hash", pa.int64()),
            ("origin", pa.string()),
        ]
    )
    return pa.Table.from_pylist(rows, schema)


@given(DOCUMENTS, DOCUMENTS)
def test_differences_are_those_of_plain_dicts(before, after):
    rows, ledger = rows_of(after), ledger_of(rows_of(before))
    found = compare(rows, ledger)
    flat = [
        {f"{d}#{n}": h for d, hashes in documents.items() for n, h in enumerate(hashes)}
        for documents in (before, after)
    ]
    ids = rows["id"].to_pylist()
    assert [ids[i] for i in found.write] == [i for i in ids if flat[0].get(i) != flat[1][i]]
    assert [ids[i] for i in found.embed] == [
        i for i in ids if flat[0].get(i, (0, 0))[0] != flat[1][i][0]
    ]
    assert sorted(found.delete) == sorted(flat[0].keys() - flat[1].keys())
    assert found.new == len(after.keys() - before.keys())
    assert found.deleted == len(before.keys() - after.keys())
    both = before.keys() & after.keys()
    assert found.changed == sum(before[name] != after[name] for name in both)
    assert found.unchanged == len(both) - found.changed
    assert found.is_empty == (before == after)


@given(DOCUMENTS, DOCUMENTS, DOCUMENTS)
def test_rows_of_a_killed_job_are_written_or_deleted_again(before, killed, after):
    """The store may have any of the rows that a killed job was about to write."""
    ledger = ledger_of(rows_of(before))
    rows = rows_of(killed)
    found = compare(rows, ledger)
    pending = marked(rows, ledger, found)
    assert pending.schema.equals(LEDGER)
    touched = {rows["id"][int(i)].as_py() for i in found.write} | set(found.delete)
    wanted = rows_of(after)
    again = compare(wanted, pending)
    ids = wanted["id"].to_pylist()
    written = {ids[i] for i in again.write}
    assert written >= touched & set(ids)
    embedded = {rows["id"][int(i)].as_py() for i in found.embed}
    assert {ids[i] for i in again.embed} >= embedded & set(ids)
    assert set(again.delete) >= touched - set(ids)
    # The same job goes on with the same rows, and counts them alike.
    same = compare(rows, pending)
    assert same.write.tolist() == found.write.tolist()
    assert same.embed.tolist() == found.embed.tolist()
    assert sorted(same.delete) == sorted(found.delete)
    assert (same.new, same.changed, same.deleted) == (found.new, found.changed, found.deleted)


def test_a_ledger_in_doubt_has_all_its_rows_written_again(tmp_path):
    rows = rows_of({"a": [(1, 0), (2, 0)], "b": [(3, 0)]})
    write_ledger(str(tmp_path), 3, doubted(ledger_of(rows)))
    found = compare(rows, read_ledger(str(tmp_path), 3))
    assert found.write.tolist() == found.embed.tolist() == [0, 1, 2]
    assert (found.new, found.changed) == (0, 2)
    assert not len(read_ledger(str(tmp_path), 4))


def test_repetitions_are_listed_or_left_out():
    rows = rows_of({"a": [(1, 0), (2, 0)], "b": [(3, 0)]})
    twice = pa.concat_tables([rows, rows.slice(0, 2)])
    assert repeated(twice) == [("a", ["a.jsonl@0", "a.jsonl@0"])]
    assert repeated(rows) == []
    kept, dropped = without_repetitions(twice)
    assert kept.equals(rows)
    assert dropped == 1
    assert without_repetitions(rows) == (rows, 0)
    assert np.array_equal(compare(kept, ledger_of(rows)).write, [])
