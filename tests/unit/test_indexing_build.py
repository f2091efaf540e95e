"""`rayembed index`: build, update, go on after a kill, and refuse what does not fit."""

import json
from dataclasses import replace

import numpy as np
import pytest
from made_up_index import Counted, build, dies, documents, rows_of, settings, write
from proved_models import save_proved
from tiny_folders import save_biencoder, save_tiny

import rayembed
from rayembed.assets.array_files import load_array, save_array
from rayembed.data.engine.shuffle import bucket_of
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.proof.proof import read_proof
from rayembed_extras.indexing import build as building
from rayembed_extras.indexing import parts
from rayembed_extras.indexing.layout import loaded_vectors
from rayembed_extras.indexing.lock import locked_index
from rayembed_extras.indexing.manifest import read_manifest
from rayembed_extras.indexing.stores import parquet_tables


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory):
    """Rows of an index of 35 documents that no one disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    path = write(folder / "docs.jsonl", documents(35))
    return build(settings(folder / "out", model, path))[1]


def plain(vectors):
    return {name: {k: v for k, v in row.items() if k != "vector"} for name, row in vectors.items()}


def test_an_index_has_each_document_with_its_vector(model, tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    path = write(tmp_path / "docs.jsonl", documents(35))
    made, rows = build(settings(tmp_path / "out", model, path))
    assert sorted(counted.texts) == sorted(row["text"] for row in documents(35))
    assert (made.table, made.record.parts, made.record.rows) == ("docs_1", 4, 35)
    assert made.record.complete
    counts = made.counts
    assert (counts["in"], counts["new"], counts["embedded"]) == (35, 35, 35)
    assert counts["tokens"] > 35 * 5
    assert rows["d3"]["year"] == 1903
    assert rows["d2"]["lang"] is None
    assert rows["d3"].keys() == {"id", "document", "chunk", "text", "year", "lang", "vector"}
    texts = [row["text"] for row in documents(35)]
    expected = rayembed.encode(str(model), texts)
    found = np.array([rows[f"d{i}"]["vector"] for i in range(35)])
    assert np.abs(found - expected).max() < 1e-5
    assert not (tmp_path / "out/indexes/docs/docs_1/working").exists()
    hits = made.open().search(made.table, rayembed.encode(str(model), texts[7:9]), 3)
    assert [ids[0] for ids in hits.ids] == ["d7", "d8"]


def test_an_update_embeds_what_is_new_or_changed_and_deletes_what_is_gone(
    model, tmp_path, monkeypatch
):
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = settings(tmp_path / "out", model, path)
    build(run)
    rows = documents(37)
    rows[4]["text"], rows[5]["year"] = "seven foxes", 7
    del rows[10:13]
    write(path, rows)
    counted = Counted(monkeypatch)
    made, found = build(run, update=True)
    changed = [rows[4]["text"], *(row["text"] for row in rows[-2:])]
    assert sorted(counted.texts) == sorted(changed)
    counts = {name: made.counts[name] for name in ("in", "new", "changed", "unchanged", "deleted")}
    assert counts == {"in": 34, "new": 2, "changed": 2, "unchanged": 30, "deleted": 3}
    _, fresh = build(settings(tmp_path / "fresh", model, path))
    assert plain(found) == plain(fresh)
    for name, row in fresh.items():
        assert np.allclose(found[name]["vector"], row["vector"], atol=1e-5)
    counted.texts.clear()
    made, again = build(run, update=True)
    assert (counted.texts, again) == ([], found)
    assert made.counts["unchanged"] == 34


def test_pieces_of_documents_are_rows_with_their_parents(model, tmp_path, monkeypatch):
    rows = [
        {"id": "a", "text": "Dogs live. Paris is old. Foxes."},
        {"id": "b", "text": "The world."},
    ]
    path = write(tmp_path / "docs.jsonl", rows)
    chunks = {"by": "sentences", "size": 7}
    run = settings(tmp_path / "out", model, path, documents__chunks=chunks, documents__metadata=[])
    made, found = build(run)
    assert {name: row["chunk"] for name, row in found.items()} == {
        "a#0": 0,
        "a#1": 1,
        "a#2": 2,
        "b#0": 0,
    }
    assert {row["document"] for row in found.values()} == {"a", "b"}
    assert made.counts["new"] == 2
    write(path, [{"id": "a", "text": "Dogs live. "}, rows[1]])
    counted = Counted(monkeypatch)
    made, found = build(run, update=True)
    assert set(found) == {"a#0", "b#0"}
    assert len(counted.texts) <= 1
    assert (made.counts["changed"], made.counts["unchanged"], made.record.rows) == (1, 1, 2)


BOUNDARIES = {
    "before the first vectors": (parts, "write_atomic", 1, False),
    "after vectors": (parts, "write_atomic", 2, True),
    "before the marks": (parts, "write_ledger", 1, False),
    "before the store": (parts, "write_part", 1, False),
    "in the store": (parquet_tables, "write_atomic", 2, True),
    "after the store": (parts, "write_part", 2, True),
    "after the ledger": (parts, "write_ledger", 4, True),
    "before a part is done": (parts, "write_json", 3, False),
    "after a part is done": (parts, "write_json", 3, True),
    "before files go": (parts, "remove_file", 2, False),
    "before the record of a new table": (building, "write_manifest", 1, False),
    "after the record of a new table": (building, "write_manifest", 1, True),
    "before the name points": (parquet_tables.ParquetTables, "point", 1, False),
    "after the name points": (parquet_tables.ParquetTables, "point", 1, True),
    "before the last record": (building, "write_manifest", 2, False),
    "after the last record": (building, "write_manifest", 2, True),
}


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_killed_job_goes_on_to_the_same_store(
    boundary, model, tmp_path, monkeypatch, undisturbed
):
    owner, name, call, after = BOUNDARIES[boundary]
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = settings(tmp_path / "out", model, path)
    counted = Counted(monkeypatch)
    with dies(monkeypatch, owner, name, call, after=after):
        building.build_index(run)
    if boundary == "after the last record":
        with pytest.raises(ConfigError, match="is complete"):
            building.build_index(run)
        made = building.build_index(run, update=True)
        assert made.counts["unchanged"] == 35
    else:
        store = run.store.model_copy(update={"to": str(tmp_path / "out/indexes/docs/store")}).open()
        assert (store.pointed("docs") is None) == ("name points" not in boundary or not after) or (
            boundary == "before the last record"
        )
        made = building.build_index(run)
        assert (made.counts["in"], made.counts["new"]) == (35, 35)
    assert rows_of(made) == undisturbed
    # Vectors of the part that was at work are computed again where they were not written.
    most = 35 if boundary != "before the first vectors" else 35 + 15
    assert 35 <= len(counted.texts) <= most


def test_a_killed_update_leaves_no_trace_in_an_update_to_other_documents(
    model, tmp_path, monkeypatch
):
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = settings(tmp_path / "out", model, path)
    build(run)
    rows = documents(60)
    for row in rows[:20]:
        row["text"] += " of the world"
    write(path, rows)
    with dies(monkeypatch, parts, "write_ledger", 4):
        building.build_index(run, update=True)
    # Documents that the killed update wrote are back to their text, or gone.
    write(path, documents(35))
    made, found = build(run, update=True)
    _, fresh = build(settings(tmp_path / "fresh", model, path))
    assert plain(found) == plain(fresh)
    for name, row in fresh.items():
        assert np.allclose(found[name]["vector"], row["vector"], atol=1e-5)
    assert made.counts["in"] == made.counts["changed"] + made.counts["unchanged"] == 35
    assert build(run, update=True)[0].counts["unchanged"] == 35


def test_two_jobs_at_once_are_refused(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(3))
    run = settings(tmp_path / "out", model, path)
    with (
        locked_index(str(tmp_path / "out"), "docs"),
        pytest.raises(ArtifactError, match=r"has the index 'docs' .* a new index another"),
    ):
        building.build_index(run)
    build(run)


def test_what_does_not_fit_the_record_is_refused_with_what_to_do(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(12))
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"no index 'docs' in .* to update; leave --update out"):
        building.build_index(settings(out, model, path), update=True)
    build(settings(out, model, path))
    other = save_biencoder(tmp_path / "other", seed=5)
    wide = save_tiny("nomic-moe", tmp_path / "wide")
    for run, message in (
        (settings(out, other, path), r"made by .*tiny.* rayembed upgrade --name docs --model"),
        (settings(out, model, path, model__instruction="find"), r"model.instruction='find', but"),
        (settings(out, model, path, store__number_type="int8"), r"store.number_type='int8'"),
        (settings(out, model, path, store__to=str(tmp_path / "x")), r"in another store than"),
        (
            settings(out, model, path, documents__text="lang"),
            r"documents.text='lang', but .* 'text'",
        ),
        (
            settings(out, model, path, documents__metadata=["year"]),
            r"documents.metadata=\['year'\]",
        ),
        (
            settings(out, model, path, documents__chunks={"by": "tokens", "size": 8}),
            r"documents.chunks=.* made with",
        ),
        (settings(out, model, path, model__dtype="bfloat16"), "was computed in float32"),
        (settings(out, wide, path, model__dimensions=7), r"may be cut to 32, 16"),
    ):
        with pytest.raises(ConfigError, match=message):
            building.build_index(run, update=True)
    wider = settings(tmp_path / "cut", wide, path, model__dimensions=16)
    assert len(build(wider)[1]["d1"]["vector"]) == 16
    whole = settings(tmp_path / "cut", wide, path)
    with pytest.raises(ConfigError, match=r"model.dimensions=32, but .* 16"):
        building.build_index(whole, update=True)
    assert building.build_index(settings(out, model, path), update=True).counts["unchanged"] == 12


def test_ids_that_occur_twice_are_refused_before_work(model, tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    rows = [*documents(12), documents(1)[0]]
    path = write(tmp_path / "docs.jsonl", rows)
    run = settings(tmp_path / "out", model, path)
    with pytest.raises(DataError, match=r"ids occur several times: 'd0' in docs.jsonl@0, docs.jso"):
        building.build_index(run)
    assert counted.texts == []
    write(path, documents(12))
    assert building.build_index(run).counts["new"] == 12


def test_equal_texts_without_ids_are_one_document(model, tmp_path):
    rows = [{"text": row["text"]} for row in [*documents(12), *documents(3)]]
    path = write(tmp_path / "docs.jsonl", rows)
    made, found = build(settings(tmp_path / "out", model, path, documents__metadata=[]))
    assert len(found) == made.counts["new"] == 12
    assert made.counts["rejected"] == {"same text as another row": 3}
    assert made.counts["in"] == 15


def test_an_update_with_the_new_documents_alone_is_refused(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(20))
    run = settings(tmp_path / "out", model, path)
    build(run)
    write(path, documents(9, start=14))
    with pytest.raises(DataError, match=r"has 6 of the 20 documents .* 14 would be deleted"):
        building.build_index(run, update=True)
    allowed = settings(tmp_path / "out", model, path, documents__max_deleted_share=0.8)
    assert build(allowed, update=True)[0].counts["deleted"] == 14


@pytest.mark.parametrize("number_type", ["float16", "int8", "bits"])
def test_number_types_keep_the_vectors_as_near_as_they_can(
    number_type, model, tmp_path, undisturbed
):
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = settings(tmp_path / "out", model, path, store__number_type=number_type)
    made, found = build(run)
    exact = np.array([undisturbed[name]["vector"] for name in sorted(undisturbed)])
    store = made.open()
    assert store.layout(made.table).scale == made.record.made_by.scale
    tables = list(store.scan(made.table))
    ids = [name for table in tables for name in table["id"].to_pylist()]
    layout = store.layout(made.table)
    vectors = np.concatenate([loaded_vectors(table["vector"], layout) for table in tables])
    vectors = vectors[np.argsort(ids)]
    cosines = (vectors * exact).sum(1) / np.linalg.norm(vectors, axis=1)
    assert cosines.min() > {"float16": 0.9999, "int8": 0.999, "bits": 0.6}[number_type]
    width = {"float16": 32, "int8": 32, "bits": 4}[number_type]
    assert len(next(iter(found.values()))["vector"]) == width
    # bits of the tiny model's near-equal texts tie
    hits = store.search(
        made.table, exact[:3].astype(np.float32), 35 if number_type == "bits" else 1
    )
    wanted = sorted(undisturbed)[:3]
    assert all(one in got for one, got in zip(wanted, hits.ids, strict=True))


def test_a_model_that_gives_other_vectors_than_its_proof_stops_the_job_first(tmp_path, monkeypatch):
    model = save_proved(tmp_path / "proved", "mean")
    path = write(tmp_path / "docs.jsonl", documents(12))
    run = settings(tmp_path / "out", model, path)
    proof = read_proof(model)
    wrong = np.roll(proof.vectors, 1, axis=1)
    replace(proof, vectors=wrong).write(model)
    counted = Counted(monkeypatch)
    with pytest.raises(ArtifactError, match="gives other vectors here than its proof has"):
        building.build_index(run)
    assert counted.texts == []
    assert not (tmp_path / "out/indexes/docs/index.json").exists()
    proof.write(model)
    assert building.build_index(run).counts["new"] == 12


@pytest.mark.parametrize(
    ("fails_at", "whole", "again"),
    [(4, False, "012"), (3, False, "012"), (3, True, "2"), (4, True, ""), (1, False, "12")],
)
def test_parts_that_a_failed_check_may_concern_are_embedded_again(
    fails_at, whole, again, model, tmp_path, monkeypatch
):
    """Checks: of loading, after each of three parts, and the last one."""
    path = write(tmp_path / "docs.jsonl", documents(25))
    run = settings(tmp_path / "out", model, path)
    calls, before = [], []

    def check(loaded, at_most=None, start=0):
        calls.append((at_most, start))
        if before and len(calls) == fails_at:
            raise ArtifactError("the model gives other vectors here than its proof has")
        return whole

    with monkeypatch.context() as patched:
        patched.setattr("rayembed_extras.indexing.embed.LoadedModel.check", check)
        with dies(monkeypatch, parts, "write_json", 1, after=True):
            building.build_index(run)
        before += calls
        calls.clear()
        with pytest.raises(ArtifactError, match="gives other vectors"):
            building.build_index(run)
    assert before == [(None, 0), (1, 0)]
    assert calls == [(None, 0), (1, 1), (1, 2), (None, 0)][:fails_at]
    store = run.store.model_copy(update={"to": str(tmp_path / "out/indexes/docs/store")}).open()
    assert store.pointed("docs") is None
    counted = Counted(monkeypatch)
    _, found = build(run)
    parts_of_rows = [str(bucket_of(f"d{i}", 3)) for i in range(25)]
    assert (len(counted.texts), len(found)) == (sum(map(parts_of_rows.count, again)), 25)


def test_vectors_of_the_first_build_are_the_check_of_a_model_without_a_proof(
    model, tmp_path, monkeypatch
):
    path = write(tmp_path / "docs.jsonl", documents(12))
    run = settings(tmp_path / "out", model, path)
    build(run)
    (golden,) = (tmp_path / "out/indexes/docs/docs_1/golden").iterdir()
    save_array(str(golden), np.roll(load_array(str(golden)), 1, axis=1))
    building.build_index(run, update=True)  # embeds nothing
    write(path, documents(13))
    with pytest.raises(ArtifactError, match="vectors here than when the index was first built"):
        building.build_index(run, update=True)


def test_texts_rows_and_loaded_models_are_arguments_in_python(model, tmp_path):
    assert "index" in dir(rayembed)
    loaded = rayembed.load(model)
    made = rayembed.index(["dogs", "cats", "dogs"], loaded, "texts", output=tmp_path / "out")
    assert made.counts["rejected"] == {"same text as another row": 1}
    assert made.record.rows == 2
    rows = [("a", "dogs live"), ("b", "paris")]
    made = rayembed.index(rows, str(model), "pairs", output=tmp_path / "out", to=tmp_path / "store")
    assert set(rows_of(made)) == {"a", "b"}
    assert (tmp_path / "store/pairs_1").is_dir()
    more = [*({"id": i, "text": t} for i, t in rows), {"id": "c", "text": "foxes"}]
    made = rayembed.index(
        more, model, "pairs", output=tmp_path / "out", to=tmp_path / "store", update=True
    )
    assert (made.counts["new"], made.counts["unchanged"]) == (1, 2)
    assert "pairs" in repr(made)
    with pytest.raises(ConfigError, match=r"rayembed.load or rayembed.train"):
        rayembed.index(rows, 7, "x", output=tmp_path / "out")
    with pytest.raises(AttributeError, match="no attribute 'indexes'"):
        _ = rayembed.indexes


def test_a_store_that_only_the_jobs_own_process_writes_gets_the_same_rows(
    model, tmp_path, monkeypatch, undisturbed
):
    monkeypatch.setattr(parquet_tables.ParquetTables, "has_parallel_writers", False)
    path = write(tmp_path / "docs.jsonl", documents(35))
    run = settings(tmp_path / "out", model, path)
    counted = Counted(monkeypatch)
    with dies(monkeypatch, building, "settle", 3):
        building.build_index(run)
    made, found = build(run)
    assert found == undisturbed
    assert made.counts["embedded"] < 35  # the third part's vectors lay there
    assert len(counted.texts) == 35


def test_a_store_without_parts_gets_the_same_rows(model, tmp_path, monkeypatch, undisturbed):
    """As databases do: rows by `upsert` and `delete`."""
    monkeypatch.delattr(parquet_tables.ParquetTables, "write_part")
    path = write(tmp_path / "docs.jsonl", documents(40))
    run = settings(tmp_path / "out", model, path)
    build(run)
    write(path, documents(35))
    _, found = build(run, update=True)
    assert plain(found) == plain(undisturbed)


def test_the_record_tells_model_rows_and_counts(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(12))
    made, _ = build(settings(tmp_path / "out", model, path))
    manifest = read_manifest(str(tmp_path / "out"), "docs")
    assert manifest == made.manifest
    record = manifest.tables["docs_1"]
    assert record.made_by.reference == str(model)
    assert (record.made_by.dimensions, record.made_by.number_type) == (32, "float32")
    assert record.metadata == {"year": "int64", "lang": "string"}
    assert record.documents["id"] == "id"
    assert manifest.store["to"].endswith("indexes/docs/store")
    pointer = json.loads((tmp_path / "out/indexes/docs/store/docs.json").read_text())
    assert pointer["table"] == "docs_1"
