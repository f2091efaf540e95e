"""Upgrades of a small index from the command's arguments to the switched name."""

import csv
import json
import random
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from memory_store import MemoryStore
from tiny_models import LINES, save_encoder

import rayembed
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed.models.passes.encoding import encode
from rayembed_extras.index_upgrades import backfill as backfills
from rayembed_extras.index_upgrades import upgrade as upgrades
from rayembed_extras.index_upgrades.job import run_upgrade_job
from rayembed_extras.index_upgrades.settings import UpgradeRun
from rayembed_extras.index_upgrades.switch import adapter_for, known_index, mended, roll_back
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.layout import layout_of
from rayembed_extras.indexing.manifest import changed_table, read_manifest, write_manifest
from rayembed_extras.indexing.settings import IndexRun
from rayembed_extras.indexing.stores.parquet import ParquetStore

COUNT = 150


def sentence(chance):
    words = [word for line in LINES for word in line.split()]
    return " ".join(chance.choice(words) for _ in range(6)) + "."


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Documents and two models in folders."""
    home = tmp_path_factory.mktemp("upgrades")
    chance = random.Random(0)
    rows = [
        {"id": f"d{n}", "text": f"{sentence(chance)} {sentence(chance)}", "kind": n % 3}
        for n in range(COUNT)
    ]
    (home / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, seed, width in (("old", 0, 32), ("new", 1, 32), ("wide", 2, 48)):
        save_encoder(home / name, seed=seed, hidden_size=width)
    return home


@pytest.fixture
def index(made, tmp_path, monkeypatch):
    """An index of the old model in a store of this process; returns the store and the settings of
    upgrades of it.
    """
    store = MemoryStore()
    monkeypatch.setattr(ParquetStore, "open", lambda self: store)
    build_index(index_run(made, tmp_path))
    values = {"name": "docs", "model": str(made / "new"), "placement": placement(tmp_path)}
    return store, {**values, "maps": ["identity", "orthogonal", "affine"]}


def placement(storage):
    return {"storage_path": str(storage), "runtime": "local"}


def index_run(made, storage, **documents):
    values = {"path": str(made / "documents.jsonl"), "metadata": ["kind"], **documents}
    return parse(
        IndexRun,
        {
            "name": "docs",
            "model": {"reference": str(made / "old")},
            "documents": values,
            "placement": placement(storage),
        },
    )


def run_of(values, **more):
    return parse(UpgradeRun, {**values, **more})


def command(values, line, capsys):
    words = shlex.split(line)
    sets = {"storage_path": values["placement"]["storage_path"], "runtime": "local"}
    for name, value in sets.items():
        words += ["--set", f"placement.{name}={value}"]
    code = run_upgrade_job(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def embedded(folder, texts, role="query"):
    return encode(rayembed.load(folder).model, texts, role=role)


def test_measuring_recommends_and_changes_nothing(made, index, tmp_path, capsys):
    store, values = index
    before = known_index(str(tmp_path), "docs")
    line = f"--name docs --model {made / 'new'} --price-per-hour 2"
    code, out, err = command(values, f"{line} --set maps=[identity,affine]", capsys)
    assert code == 0, err
    assert "full re-embedding" in out
    assert "map: affine" in out
    assert "Recommend  " in out
    assert "Price of each road" in out
    assert known_index(str(tmp_path), "docs") == before
    assert (store.tables("docs"), store.names) == (["docs_1"], {"docs": "docs_1"})
    (folder,) = (tmp_path / "indexes/docs/upgrades").iterdir()
    names = {path.name for path in folder.iterdir()}
    assert names == {"map", "upgrade.json", "upgrade.csv", "upgrade.html", "upgrade.png"}
    heads, *figures = csv.reader((folder / "upgrade.csv").open())
    assert heads[:6] == ["road", "queries", "documents", "recall_at_10", "ndcg_at_10", "share"]
    assert float(figures[0][3]) == 1
    assert {len(row) for row in figures} == {len(heads)}
    assert (folder / "upgrade.png").read_bytes()[:4] == b"\x89PNG"
    assert "<h1>Upgrade of the index docs</h1>" in (folder / "upgrade.html").read_text()


def test_a_measurement_is_made_once_and_keep_decides(index, monkeypatch):
    _, values = index
    first = upgrades.upgrade(run_of(values, keep=1.0))
    monkeypatch.setattr(upgrades, "_measured", None)
    again = upgrades.upgrade(run_of(values, keep=0.01, price_per_hour=5))
    assert again.report == first.report
    assert (first.recommended.road, again.recommended.road) == ("backfill", "compatible")
    assert again.prices[1].money == pytest.approx(5 * again.prices[1].hours)
    assert first.prices[1].money is None


def test_an_adapter_is_recorded_and_maps_the_new_models_queries(made, index, tmp_path):
    store, values = index
    done = upgrades.upgrade(run_of(values, keep=0.01, maps=["orthogonal", "affine"]), "auto")
    assert done.lines[0].startswith("Adapter")
    record = known_index(str(tmp_path), "docs").tables["docs_1"]
    weights = done.report.new_weights
    entry = record.adapter[weights]
    assert entry["kind"] == done.report.best
    assert entry["dimensions"] == [32, 32]
    mapped = adapter_for(str(tmp_path), "docs", weights)(embedded(made / "new", ["a dog"]))
    assert mapped.shape == (1, 32)
    assert store.search("docs_1", mapped, 3).ids[0]
    assert adapter_for(str(tmp_path), "docs", record.made_by.weights) is None
    with pytest.raises(ConfigError, match=r"no adapter for a model .* --road adapter"):
        adapter_for(str(tmp_path), "docs", "other")
    wide = upgrades.upgrade(
        run_of(values, model=str(made / "wide"), maps=["identity", "affine"]), "adapter"
    )
    assert wide.report.dimensions == (48, 32)
    assert {*known_index(str(tmp_path), "docs").tables["docs_1"].adapter} == {
        weights,
        wide.report.new_weights,
    }


@pytest.mark.parametrize("named", [True, False])
def test_a_backfill_equals_an_index_built_by_the_new_model(made, index, tmp_path, named, capsys):
    store, values = index
    path = f"--documents {made / 'documents.jsonl'}" if named else ""
    line = f"--name docs --model {made / 'wide'} --road backfill {path} --set maps=[affine]"
    code, out, err = command(values, line, capsys)
    assert code == 0, err
    assert "docs refers to docs_2; docs_1 is kept" in out
    assert store.names == {"docs": "docs_2"}
    rows = store.rows["docs_2"].sort_by("id")
    assert rows["id"].to_pylist() == sorted(f"d{n}" for n in range(COUNT))
    assert rows["kind"].to_pylist() == [int(name[1:]) % 3 for name in rows["id"].to_pylist()]
    right = embedded(made / "wide", rows["text"].to_pylist(), "document")
    vectors = np.stack(rows["vector"].to_numpy(zero_copy_only=False))
    np.testing.assert_allclose(vectors, right, atol=2e-3)
    manifest = known_index(str(tmp_path), "docs")
    assert (manifest.current, manifest.before) == ("docs_2", "docs_1")
    assert manifest.tables["docs_2"].documents == manifest.tables["docs_1"].documents
    assert not (tmp_path / "indexes/docs/docs_2/source").exists()
    updated = build_index(
        index_run(made, tmp_path).model_copy(
            update={
                "model": parse(
                    IndexRun,
                    {
                        **index_run(made, tmp_path).model_dump(),
                        "model": {"reference": str(made / "wide")},
                    },
                ).model
            }
        ),
        update=True,
    )
    assert updated.counts["texts"] == 0, "an update goes on by the settings of before"
    code, out, _ = command(values, "--name docs --rollback", capsys)
    assert "docs refers to docs_1; docs_2 is kept" in out
    assert store.names == {"docs": "docs_1"}
    with pytest.raises(ConfigError, match=r"former table 'docs_2' .* --rollback"):
        upgrades.upgrade(run_of(values, model=str(made / "wide")))
    command(values, "--name docs --rollback", capsys)
    code, out, _ = command(values, "--name docs --drop", capsys)
    assert out == "Dropped    docs_1\n"
    assert store.tables("docs") == ["docs_2"]
    assert {*known_index(str(tmp_path), "docs").tables} == {"docs_2"}
    assert command(values, "--name docs --rollback", capsys)[0] == 2
    assert command(values, "--name docs --drop", capsys)[0] == 2


def test_a_killed_backfill_goes_on_and_no_other_begins(made, index, tmp_path, monkeypatch, capsys):
    store, values = index
    finish = MemoryStore.finish

    def killed(self, table, layout):
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryStore, "finish", killed)
    with pytest.raises(KeyboardInterrupt):
        upgrades.upgrade(run_of(values), "backfill")
    monkeypatch.setattr(MemoryStore, "finish", finish)
    assert store.names == {"docs": "docs_1"}
    assert not read_manifest(str(tmp_path), "docs").tables["docs_2"].complete
    with pytest.raises(ConfigError, match=r"is half done; finish it .* --drop"):
        upgrades.upgrade(run_of(values, model=str(made / "wide")))
    with pytest.raises(ConfigError, match="is half done"):
        upgrades.upgrade(run_of(values), "adapter")
    with monkeypatch.context() as patched:  # what was embedded before the kill is there
        patched.setattr(MemoryStore, "upsert", None)
        upgrades.upgrade(run_of(values), "backfill")
    assert store.names == {"docs": "docs_2"}
    # Killed between the switch of the store's name and of the record.
    manifest = read_manifest(str(tmp_path), "docs")
    write_manifest(str(tmp_path), manifest.model_copy(update={"current": "docs_1", "before": None}))
    command(values, "--name docs --rollback", capsys)
    assert store.names == {"docs": "docs_1"}


def test_a_half_filled_table_can_be_dropped(index, tmp_path, monkeypatch, capsys):
    store, values = index
    point = backfills.point
    monkeypatch.setattr(backfills, "point", None)
    with pytest.raises(TypeError):
        upgrades.upgrade(run_of(values), "backfill")
    assert store.tables("docs") == ["docs_1", "docs_2"]
    assert command(values, "--name docs --drop", capsys)[1] == "Dropped    docs_2\n"
    assert store.tables("docs") == ["docs_1"]
    with pytest.raises(TypeError):
        upgrades.upgrade(run_of(values), "backfill")
    assert store.count("docs_3") == COUNT, "the dropped table's ledger is gone, too"
    monkeypatch.setattr(backfills, "point", point)
    monkeypatch.setattr(MemoryStore, "upsert", None)
    done = upgrades.upgrade(run_of(values), "backfill")
    assert store.names == {"docs": "docs_3"}, "what was filled needs the switch alone"
    assert "docs refers to docs_3" in done.lines[-1]


def test_a_killed_drop_is_finished_by_the_next(index, monkeypatch, capsys):
    store, values = index
    upgrades.upgrade(run_of(values), "backfill")
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "drop", None)
        with pytest.raises(TypeError):
            command(values, "--name docs --drop", capsys)
    assert store.tables("docs") == ["docs_1", "docs_2"]
    assert command(values, "--name docs --drop", capsys)[1] == "Dropped    docs_1\n"
    assert store.tables("docs") == ["docs_2"]


def test_a_backfill_stopped_before_the_switch_takes_later_updates_along(
    made, index, tmp_path, monkeypatch
):
    """The index's ids are of another column than those read out of the store."""
    values, store = index[1], MemoryStore()
    monkeypatch.setattr(ParquetStore, "open", lambda self: store)
    rows = [json.loads(line) for line in (made / "documents.jsonl").read_text().splitlines()]
    file = tmp_path / "named.jsonl"
    file.write_text("".join(json.dumps({**row, "name": row["id"]}) + "\n" for row in rows))
    run = index_run(made, tmp_path / "named", path=str(file), id="name")
    build_index(run)
    values = {**values, "placement": placement(tmp_path / "named")}
    with monkeypatch.context() as patched:
        patched.setattr(backfills, "point", None)
        with pytest.raises(TypeError):
            upgrades.upgrade(run_of(values), "backfill")
    file.write_text("".join(json.dumps({**row, "name": row["id"]}) + "\n" for row in rows[1:]))
    build_index(run, update=True)
    upgrades.upgrade(run_of(values), "backfill")
    assert store.names == {"docs": "docs_2"}
    assert store.count("docs_2") == COUNT - 1, "the document that went since is not back"
    kept = read_manifest(str(tmp_path / "named"), "docs").tables["docs_2"]
    assert kept.documents["id"] == "name", "updates go on by the files' column"


def test_a_table_of_another_program_is_not_dropped(index, tmp_path, capsys):
    store, values = index
    upgrades.upgrade(run_of(values), "backfill")
    store.create("docs_2024", layout_of(read_manifest(str(tmp_path), "docs").tables["docs_1"]))
    assert command(values, "--name docs --drop", capsys)[1] == "Dropped    docs_1\n"
    assert store.tables("docs") == ["docs_2", "docs_2024"]


def test_bad_input_is_refused_before_a_model_is_loaded(made, index, tmp_path, monkeypatch):
    store, values = index
    monkeypatch.setattr(upgrades, "load_upgrade_model", None)
    storage = str(tmp_path)

    def refused(match, error=ConfigError, road=None, **more):
        with pytest.raises(error, match=match):
            upgrades.upgrade(run_of(values, **more), road)

    refused("there is no index 'other' .* docs", name="other")
    refused("made by this very model.*: there is nothing", model=str(made / "old"))
    refused(
        "other settings need --road", model=str(made / "old"), instruction="Find it", road="auto"
    )
    refused("no rows at", DataError, queries=str(tmp_path / "nowhere"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"query": "a", "document": "d900"}\n')
    refused(
        r"1 of 1 judged documents are not in the index \('d900'\)", DataError, queries=str(rows)
    )
    manifest = read_manifest(storage, "docs")
    record = manifest.tables["docs_1"]
    chunked = {**record.documents, "chunks": {"by": "sentences"}}
    write_manifest(storage, changed_table(manifest, "docs_1", documents=chunked))
    refused(r"pieces of documents \(chunks.by=sentences\).* --documents", road="backfill")
    textless = {**record.documents, "store_text": False}
    write_manifest(storage, changed_table(manifest, "docs_1", documents=textless))
    refused("keeps no texts.* --documents")
    write_manifest(storage, manifest)
    store.names["docs"] = "docs_7"
    refused("refers to 'docs_7', but the record says 'docs_1'", ArtifactError)
    store.names["docs"] = "docs_1"
    kept = store.rows.pop("docs_1")
    refused("has no table 'docs_1'", ArtifactError)
    store.rows["docs_1"] = kept
    write_manifest(storage, manifest.model_copy(update={"current": None}))
    refused("no complete table yet", ArtifactError)
    other = manifest.model_copy(update={"name": "other"})
    (tmp_path / "indexes/other").mkdir()
    write_manifest(storage, other)
    (tmp_path / "indexes/other/index.json").replace(tmp_path / "indexes/docs/index.json")
    refused("is the record of the index 'other', not of 'docs'", ArtifactError)


def test_texts_come_from_the_files_where_the_store_keeps_none(made, tmp_path, monkeypatch):
    store = MemoryStore()
    monkeypatch.setattr(ParquetStore, "open", lambda self: store)
    chunks = {"by": "tokens", "size": 10}
    build_index(index_run(made, tmp_path, store_text=False, chunks=chunks))
    assert "text" not in store.rows["docs_1"].column_names
    record = known_index(str(tmp_path), "docs").tables["docs_1"]
    ids = ["d3#0", "d3#1", "d77#0"]
    path = str(made / "documents.jsonl")
    texts = backfills.texts_of_rows(record, path, ids, None)
    assert sorted(texts) == ids
    vectors = embedded(made / "old", [texts[name] for name in ids], "document")
    rows = store.rows["docs_1"].filter(pa.compute.is_in(store.rows["docs_1"]["id"], pa.array(ids)))
    stored = np.stack(rows.sort_by("id")["vector"].to_numpy(zero_copy_only=False))
    np.testing.assert_allclose(stored, vectors, atol=2e-3)
    with pytest.raises(DataError, match=r"lacks 1 of 2 texts of the index \(d999\)"):
        backfills.texts_of_rows(record, path, ["d3#0", "d999"], None)


def test_a_dry_run_prints_settings_and_starts_nothing(made, index, tmp_path, monkeypatch, capsys):
    _, values = index
    monkeypatch.setattr(upgrades, "upgrade", None)
    code, out, err = command(values, f"--name docs --model {made / 'new'} --dry-run", capsys)
    assert code == 0
    assert parse(UpgradeRun, {**values}).name in out
    assert "index docs: table docs_1, 150 rows, made by" in err
    # 75 fitted documents, each with a sentence and some words; 1,000 further sentences.
    assert "to measure: 150 texts by the new model, and up to 1,150 of their sentences" in err
    assert "for a backfill: all 150 texts" in err
    assert "prices" not in err
    priced = f"--name docs --model {made / 'new'} --dry-run --price-per-hour 2"
    assert "prices come with the measurement" in command(values, priced, capsys)[2]
    here = f"--name docs --model {made / 'new'} --dry-run --storage-path {tmp_path}"
    assert run_upgrade_job(shlex.split(here)) == 0
    assert f"storage_path: {tmp_path}" in capsys.readouterr().out
    assert command(values, "--name docs", capsys)[0] == 2
    assert command(values, "--model x", capsys)[0] == 2


def test_an_index_in_files_is_upgraded_and_rolled_back(made, tmp_path):
    built = build_index(index_run(made, tmp_path))
    values = {"name": "docs", "model": str(made / "wide"), "maps": ["orthogonal"]}
    run = run_of({**values, "placement": placement(tmp_path)}, keep=0.01)
    adapted = upgrades.upgrade(run, "auto")
    mapped = adapter_for(str(tmp_path), "docs", adapted.report.new_weights)
    with_map = mapped(embedded(made / "wide", ["a dog"]))
    assert len(built.open().search("docs_1", with_map, 5).ids[0]) == 5
    upgrades.upgrade(run, "backfill")
    store = built.open()
    assert store.pointed("docs") == "docs_2"
    assert (store.count("docs_1"), store.count("docs_2")) == (COUNT, COUNT)
    texts = [row["text"] for batch in store.scan("docs_2", ["text"]) for row in batch.to_pylist()]
    found = store.search("docs_2", embedded(made / "wide", texts[:3], "document"), 1)
    np.testing.assert_allclose(found.scores, 1, atol=1e-3)
    assert roll_back(str(tmp_path), "docs") == ("docs_2", "docs_1")
    assert built.open().pointed("docs") == "docs_1"


def test_a_switch_that_was_killed_before_its_last_file_is_finished(made, tmp_path, monkeypatch):
    run = index_run(made, tmp_path)
    build_index(parse(IndexRun, {**run.model_dump(), "store": {"kind": "lance"}}))
    values = {"name": "docs", "model": str(made / "new"), "placement": placement(tmp_path)}
    link = tmp_path / "indexes/docs/store/docs.lance"

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "symlink_to", killed)
        with pytest.raises(KeyboardInterrupt):
            upgrades.upgrade(run_of(values, maps=["identity"]), "backfill")
    assert link.readlink() == Path("docs_1.lance")
    assert mended(str(tmp_path), "docs").current == "docs_2"
    assert link.readlink() == Path("docs_2.lance")
