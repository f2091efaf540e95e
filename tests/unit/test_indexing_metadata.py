"""Metadata of an index: changes without new vectors, and types that stay."""

import datetime
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from index_engines import ENGINES, settings_of
from made_up_index import Counted, build, dies, documents, rows_of, settings, write
from tiny_folders import save_biencoder

from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed_extras.indexing import parts
from rayembed_extras.indexing.build import build_index


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("model") / "tiny")


def run_with(kind, folder, model, path):
    store = settings_of(kind, "float32", folder / "store").model_dump(mode="json")
    return settings(folder / "out", model, path, store=store)


def changed(number, **years):
    """Documents, some with another year."""
    rows = documents(number)
    for name, year in years.items():
        rows[int(name[1:])]["year"] = year
    return rows


@pytest.mark.parametrize("kind", ENGINES)
def test_changed_metadata_are_written_beside_the_vectors_that_are_there(
    kind, model, tmp_path, monkeypatch
):
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = run_with(kind, tmp_path, model, path)
    _, before = build(run)
    rows = changed(36, d3=1, d4=2, d5=None, d6=4)
    rows[6]["text"] = "seven foxes"
    write(path, rows)
    counted = Counted(monkeypatch)
    # A kill after rows are marked costs no vector.
    with dies(monkeypatch, parts, "write_part", 1):
        build_index(run, update=True)
    made, found = build(run, update=True)
    assert set(counted.texts) == {"seven foxes", rows[35]["text"]}
    assert (made.counts["new"], made.counts["changed"], made.counts["texts"]) == (1, 4, 5)
    for i in (3, 4, 5):
        assert found[f"d{i}"] == before[f"d{i}"] | {"year": rows[i]["year"]}
    assert found["d6"]["year"] == 4
    assert found["d6"]["vector"] != before["d6"]["vector"]
    counted.texts.clear()
    assert build_index(run, update=True).counts["unchanged"] == 36
    assert counted.texts == []


@pytest.mark.parametrize("kind", ["parquet", "lance"])
def test_rows_that_another_program_deleted_are_embedded(kind, model, tmp_path, monkeypatch):
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = run_with(kind, tmp_path, model, path)
    made, before = build(run)
    store = made.open()
    store.delete(made.table, ["d3", "d9"])
    store.close()
    write(path, changed(35, d3=1, d4=2))
    with pytest.raises(ArtifactError, match=r"lacks 1 rows of the table 'docs_1'.* embeds these"):
        build_index(run, update=True)
    counted = Counted(monkeypatch)
    # d9, which no update touches
    with pytest.raises(ArtifactError, match=r"has 34 rows of .* ledger has 35, .* embeds the rows"):
        build_index(run, update=True)
    assert {documents(35)[3]["text"]} <= set(counted.texts) <= {r["text"] for r in documents(5)}
    counted.texts.clear()
    _, found = build(run, update=True)
    assert counted.texts == [documents(35)[9]["text"]]
    assert (found["d3"]["year"], found["d4"]["year"]) == (1, 2)
    assert found.keys() == before.keys()


@pytest.mark.parametrize("complete", [True, False])
def test_a_table_that_the_store_has_lost_stops_the_job(complete, model, tmp_path, monkeypatch):
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = run_with("parquet", tmp_path, model, path)
    if complete:
        build_index(run)
    else:
        with dies(monkeypatch, parts, "write_json", 2, after=True):
            build_index(run)
    table = Path(run.store.to, "docs_1")
    shutil.rmtree(table)
    with pytest.raises(
        ArtifactError, match=r"lost the table 'docs_1' .* remove the folder '.*ocs_1"
    ):
        build_index(run, update=complete)
    assert not table.exists()
    shutil.rmtree(tmp_path / "out/indexes/docs/docs_1")
    assert len(build(run, update=complete)[1]) == 35


def table(values, kind):
    columns = {"id": ["a", "b"], "text": ["dogs live", "foxes"], "x": pa.array(values, kind)}
    return pa.table(columns)


UTC = datetime.UTC
EAST = datetime.timezone(datetime.timedelta(hours=2))


@pytest.mark.parametrize(
    ("first", "second", "recorded"),
    [
        (table([1.0, None], pa.float64()), table([1, None], pa.int64()), "double"),
        (table([1, 2], pa.int64()), table([1, 2], pa.int8()), "int64"),
        (
            table([datetime.datetime(2026, 1, 1, 10, tzinfo=UTC), None], pa.timestamp("us", "UTC")),
            table(
                [datetime.datetime(2026, 1, 1, 12, tzinfo=EAST), None],
                pa.timestamp("ms", "Africa/Maputo"),
            ),
            "timestamp with zone",
        ),
    ],
)
def test_another_type_of_the_same_values_changes_nothing(first, second, recorded, model, tmp_path):
    path = tmp_path / "docs.parquet"
    pq.write_table(first, path)
    run = settings(tmp_path / "out", model, path, documents__metadata=["x"])
    made = build_index(run)
    assert made.record.metadata == {"x": recorded}
    before = rows_of(made)
    pq.write_table(second, path)
    made, found = build(run, update=True)
    assert (made.counts["unchanged"], found) == (2, before)


def test_a_column_without_values_has_the_type_that_is_stated(model, tmp_path, caplog):
    rows = [{"id": "a", "text": "dogs", "n": None}, {"id": "b", "text": "foxes", "n": None}]
    path = write(tmp_path / "docs.jsonl", rows)
    texts = settings(tmp_path / "out", model, path, documents__metadata=["n"])
    build_index(texts)
    assert "the column 'n' has no value, so it will hold texts" in caplog.text
    rows[0]["n"] = 7
    write(path, rows)
    with pytest.raises(DataError, match=r"string in the index.*int64 in docs.*metadata_types"):
        build_index(texts, update=True)

    stated = settings(
        tmp_path / "stated",
        model,
        write(tmp_path / "none.jsonl", [row | {"n": None} for row in rows]),
        documents__metadata=["n"],
        documents__metadata_types={"n": "double"},
    )
    caplog.clear()
    assert build_index(stated).record.metadata == {"n": "double"}
    assert "has no value" not in caplog.text
    write(tmp_path / "none.jsonl", rows)
    plain = settings(tmp_path / "stated", model, tmp_path / "none.jsonl", documents__metadata=["n"])
    for run in (stated, plain):
        found = rows_of(build_index(run, update=True))
        assert (found["a"]["n"], found["b"]["n"]) == (7.0, None)
    other = settings(
        tmp_path / "stated",
        model,
        path,
        documents__metadata=["n"],
        documents__metadata_types={"n": "int64"},
    )
    with pytest.raises(ConfigError, match=r"metadata_types: 'n' is int64, but .* with double"):
        build_index(other, update=True)
    with pytest.raises(ConfigError, match=r"metadata_types has 'm', which is not in metadata \(n"):
        settings(
            tmp_path,
            model,
            path,
            documents__metadata=["n"],
            documents__metadata_types={"m": "bool"},
        )


def test_a_table_that_replaces_another_keeps_types_of_columns_without_values(model, tmp_path):
    rows = [{"id": "a", "text": "dogs", "n": 1}, {"id": "b", "text": "foxes", "n": None}]
    path = write(tmp_path / "docs.jsonl", rows)
    run = settings(tmp_path / "out", model, path, documents__metadata=["n"])
    build_index(run)
    write(path, rows[1:])
    made = build_index(run, beside="docs_2")
    assert made.manifest.tables["docs_2"].metadata == {"n": "int64"}
