"""Sources in object storage and on the hub, both on loopback."""

import io
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dataset_hub import DatasetHub, dataset_hub
from made_records import made_records
from s3_server import BUCKET, s3_server

from rayembed.assets.reading import list_hub_files, open_source
from rayembed.assets.storage import list_files, write_atomic
from rayembed.data.engine.parts import read_records
from rayembed.data.sources import files
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import read_rows
from rayembed.errors import ArtifactError, AssetError, DataError

pytestmark = pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])


def parquet(rows: list[dict[str, Any]], rows_per_group: int = 10) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=rows_per_group)
    return sink.getvalue()


def pairs(first: int, last: int) -> list[dict[str, Any]]:
    return [{"query": f"q {i}", "positive": f"p {i}"} for i in range(first, last)]


REPOSITORIES = {
    "org/pairs": {
        "README.md": b"# A card",
        ".gitattributes": b"*",
        "data/train-00000-of-00002.parquet": parquet(pairs(0, 25)),
        "data/train-00001-of-00002.parquet": parquet(pairs(25, 50)),
        "data/test-00000-of-00001.parquet": parquet(pairs(90, 95)),
        "more/rows.jsonl": "".join(json.dumps(row) + "\n" for row in pairs(50, 60)).encode(),
    },
    "org/scripts": {"README.md": b"# A card", "scripts.py": b"raise SystemExit('it ran')"},
    "org/gated": {"data/train.parquet": parquet(pairs(0, 5))},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[DatasetHub]:
    with dataset_hub(REPOSITORIES, gated=("org/gated",)) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.address)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield running


def test_files_of_a_data_set_on_the_hub_are_pinned_to_a_commit(hub: DatasetHub) -> None:
    path = "hf://datasets/org/pairs@main/data/train-*.parquet"
    pieces = list_pieces(path)
    commit = hub.commit("org/pairs")
    assert [piece.name for piece in pieces] == [
        "train-00000-of-00002.parquet",
        "train-00001-of-00002.parquet",
    ]
    assert all(f"@{commit}/data/" in piece.path for piece in pieces)
    versions = [piece.version for piece in pieces]
    hub.files["org/pairs"]["README.md"] = b"# Another card"
    assert hub.commit("org/pairs") != commit
    assert [piece.version for piece in list_pieces(path)] == versions
    hub.files["org/pairs"]["data/train-00001-of-00002.parquet"] = parquet(pairs(25, 51))
    first, second = list_pieces(path)
    assert first.version == versions[0]
    assert second.version != versions[1]


@pytest.mark.parametrize("revision", ["main", "refs/convert/parquet", "refs%2Fconvert%2Fparquet"])
def test_rows_of_the_hub_by_ranges(hub: DatasetHub, revision: str, tmp_path: Path) -> None:
    source = {"kind": "pairs", "path": f"hf://datasets/org/pairs@{revision}/data/train-*"}
    records, _ = made_records(tmp_path / "out", source)
    assert [r.query for r in records] == [f"q {i}" for i in range(50)]
    assert records[30].origin == ("train-00001-of-00002.parquet#5",)
    assert {path for path, _, _ in hub.ranges} == {
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
    }
    whole = {"kind": "pairs", "path": f"hf://datasets/org/pairs@{revision}"}
    everything, _ = made_records(tmp_path / "out", whole)
    assert len(everything) == 65, "the card is no data"
    one = {"kind": "pairs", "path": f"hf://datasets/org/pairs@{revision}/more/rows.jsonl"}
    lines, _ = made_records(tmp_path / "out", one)
    assert [r.query for r in lines] == [f"q {i}" for i in range(50, 60)]


def test_one_row_group_is_read_without_the_rest_of_the_file(
    hub: DatasetHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    rows = [{"query": rng.randbytes(20_000).hex(), "other": "x"} for _ in range(30)]
    content = parquet(rows)
    hub.files["org/large"] = {"a.parquet": content}
    monkeypatch.setattr(files, "_BYTES_PER_PIECE", 1)
    monkeypatch.setattr("fsspec.spec.AbstractBufferedFile.DEFAULT_BLOCK_SIZE", 4096)
    pieces = list_pieces("hf://datasets/org/large")
    assert [piece.first_row for piece in pieces] == [0, 10, 20]
    opened = sum(last + 1 - first for _, first, last in hub.ranges)
    hub.ranges.clear()
    read = [row.values["query"] for row in read_rows(pieces[1], ["query"])]
    assert read == [row["query"] for row in rows[10:20]]
    fetched = sum(last + 1 - first for _, first, last in hub.ranges)
    assert opened < 0.2 * len(content), "listing reads the footer alone"
    assert fetched < 0.5 * len(content), "a third of the rows"


def test_a_hub_that_fails_for_a_moment(hub: DatasetHub, tmp_path: Path) -> None:
    hub.fail = 1
    source = {"kind": "pairs", "path": "hf://datasets/org/pairs@main/data/test-*"}
    records, _ = made_records(tmp_path / "out", source)
    assert len(records) == 5


def test_what_the_hub_does_not_give(hub: DatasetHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssetError, match=r"cannot fetch 'hf://datasets/org/none@main'.*NotFound"):
        list_pieces("hf://datasets/org/none@main")
    with pytest.raises(AssetError, match=r"RevisionNotFound"):
        list_pieces("hf://datasets/org/pairs@v9")
    with pytest.raises(AssetError, match=r"EntryNotFound"):
        list_pieces("hf://datasets/org/pairs@main/data/none.parquet")
    with pytest.raises(
        DataError, match=r"no file matches the pattern; the folder contains .*train-00000"
    ):
        list_pieces("hf://datasets/org/pairs@main/data/dev-*")
    with pytest.raises(AssetError, match=r"GatedRepo.*HF_TOKEN"):
        list_pieces("hf://datasets/org/gated@main")
    with pytest.raises(AssetError, match=r"names a model repository"):
        open_source("hf://org/pairs@main/data")
    with pytest.raises(DataError, match=r"loading script, and no code .*@refs/convert/parquet"):
        list_pieces("hf://datasets/org/scripts@main")
    monkeypatch.setenv("HF_TOKEN", "hf_made_up")
    assert len(list_hub_files("hf://datasets/org/gated@main")) == 1
    (piece,) = list_pieces("hf://datasets/org/gated@main")
    assert len(list(read_rows(piece))) == 5
    with pytest.raises(ArtifactError, match=r"cannot read the rows 'hf://datasets/org/gated@"):
        list(read_rows(replace(piece, path=piece.path.replace("train", "gone"))))


def test_joined_files_in_object_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        root = f"s3://{BUCKET}/in"
        corpus = "".join(json.dumps({"_id": f"d{i}", "text": f"x {i}"}) + "\n" for i in range(9))
        write_atomic(f"{root}/corpus/0.jsonl", corpus.encode())
        write_atomic(f"{root}/queries.jsonl", b'{"_id": "a", "text": "qa"}\n')
        write_atomic(f"{root}/qrels.tsv", b"query-id\tcorpus-id\tscore\na\td3\t1\na\td8\t1\n")
        write_atomic(f"{root}/pairs/train-0.parquet", parquet(pairs(0, 25)))
        write_atomic(f"{root}/pairs/train-1.parquet", parquet(pairs(25, 30)))
        write_atomic(f"{root}/pairs/dev.parquet", parquet(pairs(30, 40)))
        storage = f"s3://{BUCKET}/out"
        source = {
            "kind": "beir",
            "path": "qrels.tsv",
            "corpus": "corpus",
            "queries": "queries.jsonl",
        }
        (record,), made = made_records(storage, source, root=root)
        assert record.positives == ("x 3", "x 8")
        assert "working" not in {
            path.split("/")[0] for path in list_files(made.folder, recursive=True)
        }
        glob = {"kind": "pairs", "path": "pairs/train-*"}
        records, _ = made_records(storage, glob, root=root)
        assert [r.query for r in records] == [f"q {i}" for i in range(30)]
        assert records[-1].origin == ("train-1.parquet#4",)
        names = ("a.md", "deep/b.md", "c.txt")
        for name in names:
            write_atomic(f"{root}/pages/{name}", f"Page {name}\nIt says this alone.".encode())
        pages = {"kind": "structure", "path": "pages", "rules": {"title": 1}, "min_words": 1}
        texts, _ = made_records(storage, pages, root=root)
        assert {(r.query, r.origin) for r in texts} == {(f"Page {n}", (n,)) for n in names}
        taken, _ = made_records(f"{storage}/again", {"kind": "records", "path": made.folder})
        assert taken == [record]
        assert read_records(made.parts[0].path) == [record]
