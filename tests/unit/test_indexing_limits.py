"""What a store or a disk has no room for is refused before work, or leaves the former table."""

import random
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from index_engines import settings_of
from made_up_index import Counted, build, documents, rows_of, settings, write
from tiny_folders import save_biencoder

from rayembed.errors import StorageError, StorageFullError
from rayembed_extras.indexing import checks
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.settings import RowLimits
from rayembed_extras.indexing.stores.parquet import ParquetStore


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("model") / "tiny")


def test_documents_beyond_the_limits_of_a_store_are_rejected(model, tmp_path, monkeypatch):
    monkeypatch.setattr(ParquetStore, "limits", RowLimits(id=16, texts=100))
    rows = [
        {"id": "i" * 16, "text": "dogs", "tags": None},
        {"id": "ä" * 9, "text": "cats", "tags": None},
        {"id": "long", "text": "dogs " * 21, "tags": None},
        {"id": "tags", "text": "dogs " * 10, "tags": ["é" * 20, "x" * 20]},
        {"id": "fits", "text": "dogs " * 10, "tags": ["é" * 20, "x" * 10]},
    ]
    path = write(tmp_path / "docs.jsonl", rows)
    values = {"documents__metadata": ["tags"], "documents__max_rejected_share": 0.8}
    made, found = build(settings(tmp_path / "out", model, path, **values))
    assert made.counts["rejected"] == {
        "an id above 16 bytes, the most that the store takes": 1,
        "text and metadata above 100 bytes, the most that the store takes": 2,
    }
    assert set(found) == {"i" * 16, "fits"}
    # Pieces are short, and their ids longer.
    chunks = {"by": "tokens", "size": 8}
    run = settings(tmp_path / "pieces", model, path, **values, documents__chunks=chunks)
    made, found = build(run)
    assert {name.partition("#")[0] for name in found} == {"long", "tags", "fits"}
    run = settings(tmp_path / "bare", model, path, **values, documents__store_text=False)
    assert set(build(run)[1]) == {"i" * 16, "long", "tags", "fits"}


def test_the_limits_are_those_of_postgresql(model, tmp_path):
    store = settings_of("pgvector", "float32", tmp_path)
    chance = random.Random(0)
    longest = store.limits.id
    ids = ["".join(chance.choices("0123456789abcdef", k=k)) for k in (longest, longest + 1)]
    # Digits are compressed, so that bytes of all values show the limit.
    letters = [chr(c) for c in range(33, 127)]
    full = "".join(chance.choices(letters, k=longest))
    rows = [
        *({"id": name, "text": "dogs"} for name in (*ids, full)),
        {"id": "nul", "text": "a\0b"},
        {"id": "plain", "text": "foxes", "tag": "a\0b"},
        {"id": "fits", "text": "foxes", "tag": "a\\u0000b"},
    ]
    path = write(tmp_path / "docs.jsonl", rows)
    run = settings(
        tmp_path / "out",
        model,
        path,
        store=store.model_dump(mode="json"),
        documents__metadata=["tag"],
        documents__max_rejected_share=0.8,
    )
    made, found = build(run)
    assert set(found) == {ids[0], full, "fits"}
    assert found["fits"]["tag"] == "a\\u0000b"
    assert made.counts["rejected"] == {
        "a text with a NUL character": 1,
        "a text in 'tag' with a NUL character": 1,
        "an id above 2,692 bytes, the most that the store takes": 1,
    }
    # The server itself refuses a longer one.
    opened = made.open()
    table = next(opened.scan(made.table))
    longer = table.slice(0, 1).set_column(0, table.schema.field(0), [[full + "x" * 12]])
    with pytest.raises(StorageError, match="index row"):
        opened.upsert(made.table, longer)
    opened.close()


def test_a_disk_without_room_is_refused_before_texts_are_embedded(model, tmp_path, monkeypatch):
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = settings(tmp_path / "out", model, path)
    counted = Counted(monkeypatch)
    with monkeypatch.context() as patched:
        patched.setattr(
            checks, "shutil", SimpleNamespace(disk_usage=lambda _: SimpleNamespace(free=4_500))
        )
        with pytest.raises(StorageFullError, match=r"35 rows to write take about [\d,]+ bytes"):
            build_index(run)
        assert counted.texts == []
        bits = settings(tmp_path / "bits", model, path, store__number_type="bits")
        assert build_index(bits).counts["new"] == 35
    assert build_index(run).counts["new"] == 35


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a disk of a number of bytes."""
    place = tmp_path / "disk"
    place.mkdir()
    command = shutil.which("mount")
    mounted = []

    def mount(size):
        asked = [command, "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        if command is None or subprocess.run(asked, capture_output=True, check=False).returncode:
            pytest.skip("this user may not mount a disk")
        mounted.append(place)
        return place

    yield mount
    for one in mounted:
        subprocess.run(["umount", str(one)], check=True)


@pytest.mark.parametrize("kind", ["parquet", "lance", "faiss"])
def test_a_disk_that_fills_up_leaves_the_former_table(
    kind, model, tmp_path, monkeypatch, small_disk
):
    pytest.importorskip(kind if kind != "parquet" else "pyarrow")
    disk = small_disk(3 << 20)
    path = write(tmp_path / "docs.jsonl", documents(200))
    store = {"kind": kind, "to": str(disk / "store")}
    run = settings(tmp_path / "out", model, path, store=store, rows_per_part=50)
    made, before = build(run)
    ballast = disk / "ballast"
    monkeypatch.setattr("rayembed_extras.indexing.build.check_room", lambda *_: None)
    free = shutil.disk_usage(disk).free
    ballast.write_bytes(bytes(free - (24 << 10)))
    with pytest.raises(StorageFullError, match="no room"):
        build_index(run, beside="docs_2")
    opened = made.open()
    assert opened.pointed("docs") == "docs_1"
    opened.close()
    assert rows_of(made) == before
    ballast.unlink()
    again = build_index(run, beside="docs_2")
    assert again.manifest.current == "docs_1"
    opened = again.open()
    assert opened.count("docs_2") == 200
    opened.point("docs", "docs_2")
    opened.close()
