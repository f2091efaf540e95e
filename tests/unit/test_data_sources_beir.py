"""Judgements, queries and documents joined, against a join by dictionaries."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from made_records import made_records

from rayembed.data.hashes import text_hash
from rayembed.data.sources import files
from rayembed.data.sources.tasks import HeldOut
from rayembed.errors import ConfigError


def write(folder: Path, rows: int = 300) -> tuple[dict[str, Any], list[tuple[str, str, int]]]:
    """A source whose judgements have missing documents and queries, and what is judged."""
    rng = random.Random(0)
    folder.mkdir(parents=True)
    corpus = [
        {"_id": f"d{i}", "title": "" if i % 3 else f"T {i}", "text": f"x {i}"} for i in range(90)
    ]
    corpus.insert(50, {"_id": "d3", "title": "", "text": "a second document of the id"})
    queries = [{"_id": i, "text": f"query {i}", "lang": "en"} for i in range(40)]
    lines = [*map(json.dumps, corpus), "{broken"]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    (folder / "queries.jsonl").write_text("\n".join(map(json.dumps, queries)))
    judged = [
        (str(rng.randrange(45)), f"d{rng.randrange(100)}", rng.randrange(3)) for _ in range(rows)
    ]
    table = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t{s}" for q, d, s in judged)]
    (folder / "qrels.tsv").write_text("\n".join(table))
    source = {
        "kind": "beir",
        "path": "qrels.tsv",
        "corpus": "corpus.jsonl",
        "queries": "queries.jsonl",
        "language": "lang",
        "max_rejected_share": 0.5,
    }
    return source, judged


@pytest.mark.parametrize(("buckets", "size"), [(1, 1 << 20), (5, 1000)])
def test_equal_to_a_join_by_dictionaries(
    buckets: int, size: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("rayembed.data.engine.shuffle.number_of_buckets", lambda a, b=0: buckets)
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", size)
    source, judged = write(tmp_path / "in")
    held_out = HeldOut(texts=frozenset([text_hash("query 7")]))
    records, made = made_records(tmp_path / "o", source, root=tmp_path / "in", held_out=held_out)
    documents = {f"d{i}": f"x {i}" if i % 3 else f"T {i} x {i}" for i in range(90)}
    del documents["d3"]  # two documents have this id
    wanted: dict[str, list[str]] = {}
    for query, document, score in judged:
        if score >= 1 and int(query) < 40 and query != "7" and document in documents:
            wanted.setdefault(f"query {query}", []).append(documents[document])
    assert {r.query: list(r.positives) for r in records} == {
        query: list(dict.fromkeys(texts)) for query, texts in wanted.items()
    }
    rejected = made.manifest["rejected"]
    good = [j for j in judged if j[2] >= 1]
    assert rejected["not relevant"] == len(judged) - len(good)
    assert rejected["query is not among the queries"] == sum(int(q) >= 40 for q, _, _ in good)
    assert rejected["document is not in the corpus"] == sum(
        int(q) < 40 and int(d[1:]) >= 90 for q, d, _ in good
    )
    assert rejected.get("several documents have its document's id", 0) == sum(
        int(q) < 40 and d == "d3" for q, d, _ in good
    )
    assert rejected["has a held-out text"] == sum(q == "7" and d in documents for q, d, _ in good)
    assert made.manifest["rows_in"] == len(judged)
    assert {r.language for r in records} == {"en"}


@pytest.mark.parametrize("turned", [False, True])
def test_what_the_join_loses_is_counted_whatever_the_order(turned: bool, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    corpus = [
        {"_id": "d1", "title": "", "text": "one"},
        {"_id": "d1", "title": "", "text": "another one"},
        {"_id": "d2", "title": "", "text": ""},
        {"_id": "d3", "title": "", "text": "three"},
        {"_id": "d3", "title": "", "text": "three"},  # the same again is no other document
        {"_id": "d4", "title": "", "text": "\u200b"},
        {"_id": "d5", "title": "", "text": "query 1"},
        {"title": "", "text": "without an id"},
        {"_id": "d6", "title": "", "text": {"a": 6}},
        {"_id": "d7", "title": "", "text": "seven"},
    ]
    queries = [
        {"_id": "q1", "text": "query 1"},
        {"_id": "q2", "text": "query 2"},
        {"_id": "q2", "text": "query 2 in other words"},
        {"text": "a query without an id"},
    ]
    judged = [("q1", f"d{i}") for i in range(1, 9)] + [("q2", "d3"), ("q3", "d3")]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        ordered = rows[::-1] if turned else rows
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, ordered)))
    judged = judged[::-1] if turned else judged
    lines = ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t1" for q, d in judged)]
    (folder / "qrels.tsv").write_text("\n".join(lines))
    source = {"kind": "beir", "path": "qrels.tsv", "corpus": "corpus.jsonl"}
    source |= {"queries": "queries.jsonl", "max_rejected_share": 1.0}
    records, made = made_records(tmp_path / "o", source, root=folder)
    assert [(r.query, sorted(r.positives)) for r in records] == [("query 1", ["seven", "three"])]
    assert made.manifest["rejected"] == {
        "several documents have its document's id": 1,
        "no positive": 1,
        "positive has no visible character": 1,
        "positive equals query": 1,
        "document is not in the corpus": 2,
        "several queries have its query's id": 1,
        "query is not among the queries": 1,
    }
    assert (made.manifest["rows_in"], made.manifest["rows_out"]) == (10, 1)
    assert made.manifest["texts_unread"] == 1
    assert made.manifest["texts_without_id"] == 2


def test_origins_name_judgements_query_and_documents(tmp_path: Path) -> None:
    source, judged = write(tmp_path / "in", rows=60)
    records, _ = made_records(tmp_path / "o", source, root=tmp_path / "in")
    for record in records:
        rows = [
            judged[int(o.partition("#")[2])] for o in record.origin if o.startswith("qrels.tsv#")
        ]
        (query,) = [o.removeprefix("query ") for o in record.origin if o.startswith("query ")]
        documents = [
            o.removeprefix("document ") for o in record.origin if o.startswith("document ")
        ]
        assert {row[0] for row in rows} == {query}
        assert list(dict.fromkeys(row[1] for row in rows)) == documents
        assert record.query == f"query {query}"
        assert len(record.positives) == len(documents)


def test_a_corpus_without_titles_and_one_without_ids(tmp_path: Path) -> None:
    source, _ = write(tmp_path / "in", rows=30)
    plain = [json.dumps({"id": f"d{i}", "text": f"x {i}"}) for i in range(100)]
    (tmp_path / "in" / "corpus.jsonl").write_text("\n".join(plain))
    records, _ = made_records(tmp_path / "o", source, root=tmp_path / "in")
    assert all(text.startswith("x ") for r in records for text in r.positives)
    # As in settings that a run has printed of itself.
    named = source | {"document": "title+text"}
    assert made_records(tmp_path / "named", named, root=tmp_path / "in")[0] == records
    with pytest.raises(ConfigError, match=r"source.document = 'heading\+text'"):
        made_records(tmp_path / "o", source | {"document": "heading+text"}, root=tmp_path / "in")
    with pytest.raises(ConfigError, match=r"source.query_id = 'query'.*did you mean 'query-id'"):
        made_records(tmp_path / "o", source | {"query_id": "query"}, root=tmp_path / "in")
    (tmp_path / "in" / "corpus.jsonl").write_text('{"name": "d1", "text": "x"}')
    with pytest.raises(ConfigError, match=r"source.corpus: the id = '_id'"):
        made_records(tmp_path / "o", source, root=tmp_path / "in")
