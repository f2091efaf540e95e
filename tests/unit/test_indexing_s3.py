"""An index whose record and Parquet tables are in object storage."""

import pytest
from made_up_index import build, documents, rows_of, settings, write
from s3_server import BUCKET, s3_server
from tiny_folders import save_biencoder

from rayembed_extras.indexing import build as building
from rayembed_extras.indexing import parts


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
        yield f"s3://{BUCKET}"


def test_a_killed_build_in_object_storage_goes_on(bucket, tmp_path, monkeypatch):
    model = save_biencoder(tmp_path / "tiny")
    path = write(tmp_path / "docs.jsonl", documents(25))
    _, expected = build(settings(tmp_path / "here", model, path))
    run = settings(f"{bucket}/out", model, path)
    plain, calls = parts.write_part, []

    def dying(*given):
        calls.append(given)
        if len(calls) == 2:
            raise KeyboardInterrupt
        plain(*given)

    with monkeypatch.context() as patched:
        patched.setattr(parts, "write_part", dying)
        with pytest.raises(KeyboardInterrupt):
            building.build_index(run)
    made, found = build(run)
    assert found == expected
    assert made.store.to == f"{bucket}/out/indexes/docs/store"
    write(path, documents(24))
    made = building.build_index(run, update=True)
    assert (made.counts["deleted"], len(rows_of(made))) == (1, 24)
    other = settings(tmp_path / "mixed", model, path, store__to=f"{bucket}/tables")
    assert rows_of(building.build_index(other)).keys() == rows_of(made).keys()
