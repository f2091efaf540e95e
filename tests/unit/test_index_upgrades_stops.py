"""Upgrades of indexes that another job, or an earlier upgrade, has left in the middle."""

from contextlib import suppress

import numpy as np
import pytest
from tiny_models import save_encoder
from upgraded_index import Index, Watched

from rayembed.errors import ArtifactError, ConfigError, DataError
from rayembed_extras.index_upgrades import maps
from rayembed_extras.index_upgrades.calls import drop_old_tables, roll_back_index
from rayembed_extras.index_upgrades.maps import QueryMap
from rayembed_extras.index_upgrades.switch import adapter_for, mended, open_index, record_adapter
from rayembed_extras.index_upgrades.upgrade import upgrade
from rayembed_extras.indexing.manifest import changed_table, read_manifest, write_manifest
from rayembed_extras.indexing.stores.parquet import ParquetStore


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models in folders."""
    home = tmp_path_factory.mktemp("stops")
    for seed, (name, width) in enumerate({"a": 32, "b": 32, "wide": 48}.items()):
        save_encoder(home / name, seed=seed, hidden_size=width)
    return home


@pytest.fixture
def store(monkeypatch):
    """A store of this process in place of Parquet's."""
    made = Watched()
    monkeypatch.setattr(ParquetStore, "open", lambda self: made)
    return made


@pytest.fixture
def index(home, tmp_path, store):
    made = Index(home, tmp_path)
    made.build(rows_per_part=30)
    return made


def killed_at(count, name):
    """Let the step of this number stop the job."""
    steps = []

    def step(what):
        steps.append(what)
        if steps.count(name) == count:
            raise KeyboardInterrupt

    return step


@pytest.mark.parametrize("at", [1, 3])
def test_a_stopped_update_is_finished_before_an_upgrade(index, store, at):
    for row in index.rows:
        row["text"] = f"Foxes. {row['text']}"
    store.before = killed_at(at, "upsert")
    with pytest.raises(KeyboardInterrupt):
        index.build(update=True, rows_per_part=30)
    store.before = None
    for road in (None, "adapter", "backfill"):
        with pytest.raises(ConfigError, match=r"an update .* was stopped.* --name docs --update"):
            upgrade(index.run(), road)
    index.build(update=True, rows_per_part=30)
    upgrade(index.run(), "backfill")
    assert index.record.made_by.reference.endswith("b")


def test_an_upgrade_waits_for_the_division_of_parts(index):
    manifest = read_manifest(index.storage, "docs")
    write_manifest(index.storage, changed_table(manifest, "docs_1", growing_to=8))
    with pytest.raises(ConfigError, match=r"an update .* was stopped"):
        upgrade(index.run())


def test_an_update_that_was_refused_stops_no_upgrade(index):
    rows, index.rows = index.rows, index.rows[:10]
    with pytest.raises(DataError, match="max_deleted_share"):
        index.build(update=True, rows_per_part=30)
    index.rows = rows
    upgrade(index.run())


@pytest.mark.parametrize("by_files", [True, False])
def test_a_backfill_is_resumed_with_the_settings_of_its_beginning(index, store, by_files):
    files = {"documents": str(index.path)}
    begun, other = (files, {}) if by_files else ({}, files)
    store.before = killed_at(1, "point")
    with pytest.raises(KeyboardInterrupt):
        upgrade(index.run(**begun), "backfill")
    store.before = None
    right = "with" if by_files else "without"
    refusals = {
        rf"begun {right} --documents; go on with the same.* --name docs --drop": other,
        r"begun with instruction=null; go on": {**begun, "instruction": "Find it"},
    }
    for message, values in refusals.items():
        with pytest.raises(ConfigError, match=message):
            upgrade(index.run(**values), "backfill")
    upgrade(index.run(**begun), "backfill")
    assert store.names == {"docs": "docs_2"}


def test_a_dropped_tables_number_is_not_used_again(index, store):
    upgrade(index.run(), "backfill")
    roll_back_index(index.run())
    assert read_manifest(index.storage, "docs").last_number == 2
    drop_old_tables(index.run())
    assert store.tables("docs") == ["docs_1"]
    upgrade(index.run("wide", maps=["orthogonal"]), "backfill")
    assert store.names == {"docs": "docs_3"}


def test_a_recorded_map_stays_while_another_is_written(index, store, monkeypatch):
    weights = upgrade(index.run("wide", maps=["orthogonal"]), "adapter").report.new_weights
    first = adapter_for(index.storage, "docs", weights)
    with monkeypatch.context() as patched:
        patched.setattr(maps, "write_json", None)  # killed between the map's two files
        other = QueryMap("affine", (48, 32), {name: np.ones((48, 32)) for name in ["weight"]})
        with pytest.raises(TypeError):
            record_adapter(open_index(index.storage, "docs"), weights, other, {})
    kept = adapter_for(index.storage, "docs", weights)
    np.testing.assert_array_equal(kept.arrays["weight"], first.arrays["weight"])


def test_a_rollback_says_of_when_the_documents_are(index):
    upgrade(index.run(), "backfill")
    manifest = read_manifest(index.storage, "docs")
    write_manifest(index.storage, changed_table(manifest, "docs_1", updated="2026-01-01T00:00:00Z"))
    said = roll_back_index(index.run())
    assert "\nUpdate     docs_1 has the documents of 2026-01-01T00:00:00Z, docs_2 those" in said
    assert f"--model {index.home / 'a'} --name docs --update" in said
    assert "Update" not in roll_back_index(index.run()), "docs_2 has later ones"


def test_a_model_embeds_in_a_third_way_while_its_former_table_is_kept(index, store):
    upgrade(index.run("a", instruction="Find it"), "backfill")
    with pytest.raises(ConfigError, match=r"former table 'docs_1' .* --rollback"):
        upgrade(index.run("a"), "backfill")
    upgrade(index.run("a", instruction="Find that"), "backfill")
    assert store.names == {"docs": "docs_3"}
    assert index.record.made_by.instruction == "Find that"


def test_stores_are_closed_whatever_happens(index, store, monkeypatch):
    opened, closed = [], []
    monkeypatch.setattr(ParquetStore, "open", lambda self: opened.append(1) or store)
    monkeypatch.setattr(store, "close", lambda: closed.append(1))
    jobs = {
        "refused": lambda: upgrade(index.run("a")),
        "backfilled": lambda: upgrade(index.run(), "backfill"),
        "rolled back": lambda: roll_back_index(index.run()),
        "dropped": lambda: drop_old_tables(index.run()),
        "none to roll back to": lambda: roll_back_index(index.run()),
        "none to drop": lambda: drop_old_tables(index.run()),
        "moved": lambda: [store.names.update(docs="docs_7"), upgrade(index.run())],
    }
    for name, job in jobs.items():
        with suppress(ConfigError, ArtifactError):
            job()
        assert len(opened) == len(closed) > 0, name


def test_each_table_has_its_own_settings_of_the_stores_index(index, store):
    def settings():
        manifest = read_manifest(index.storage, "docs")
        return manifest.store["index"], [one.index for one in manifest.tables.values()]

    run = index.run(store_index={"distance": "l2"})
    store.before = killed_at(1, "upsert")
    with pytest.raises(KeyboardInterrupt):
        upgrade(run, "backfill")
    assert settings()[0] == {}, "searches of the current table go on as before"
    store.before = killed_at(1, "point")
    with pytest.raises(KeyboardInterrupt):
        upgrade(run, "backfill")
    assert settings() == ({}, [None, {"distance": "l2"}])
    store.before = None
    store.point("docs", "docs_2")  # killed between the store and the record
    assert mended(index.storage, "docs").store["index"] == {"distance": "l2"}
    assert settings() == ({"distance": "l2"}, [{}, None])
    roll_back_index(index.run())
    assert settings() == ({}, [None, {"distance": "l2"}])
