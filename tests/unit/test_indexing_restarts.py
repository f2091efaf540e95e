"""An index job that is started again with other settings, or after a kill."""

import pytest
from made_up_index import Counted, build, dies, documents, settings, write
from tiny_folders import save_biencoder

import rayembed
from rayembed.errors import ArtifactError, ConfigError, DataError, StorageFullError
from rayembed.models.loading.files import weights_fingerprint
from rayembed_extras.indexing import build as building
from rayembed_extras.indexing import parts
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.manifest import changed_table, write_manifest
from rayembed_extras.indexing.stores.parquet import ParquetStore
from rayembed_extras.indexing.stores.parquet_tables import ParquetTables


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_biencoder(tmp_path_factory.mktemp("model") / "tiny")


def test_a_corrected_encoding_reads_the_files_again(model, tmp_path):
    path = tmp_path / "docs.csv"
    path.write_bytes("id,text\na,café dogs\n".encode("latin-1"))

    def run(encoding):
        changes = {"documents__metadata": [], "documents__encoding": encoding}
        return settings(tmp_path / "out", model, path, **changes)

    with pytest.MonkeyPatch.context() as patched, dies(patched, parts, "write_part", 1):
        build_index(run("cp1251"))
    assert build(run("latin-1"))[1]["a"]["text"] == "café dogs"


@pytest.mark.parametrize(
    ("name", "call", "after"),
    [("write_json", 3, True), ("write_ledger", 6, True)],
    ids=["after the last part", "after the last ledger"],
)
def test_a_check_after_the_last_part_is_made_up_for(name, call, after, model, tmp_path):
    """Checks of the second try: of loading, and the last one, which fails."""
    path = write(tmp_path / "docs.jsonl", documents(25))
    run = settings(tmp_path / "out", model, path)
    calls = []

    def check(loaded, at_most=None, start=0):
        calls.append(at_most)
        if calls == [None, None]:
            raise ArtifactError("the model gives other vectors here than its proof has")
        return False

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rayembed_extras.indexing.embed.LoadedModel.check", check)
        with dies(patched, parts, name, call, after=after):
            build_index(run)
        assert calls == [None, 1, 1, 1]
        calls.clear()
        with pytest.raises(ArtifactError, match="gives other vectors"):
            build_index(run)
        counted = Counted(patched)
        assert len(build(run)[1]) == len(counted.texts) == 25


def test_rows_that_the_store_lost_are_embedded_with_a_check_after_the_last_part(
    model, tmp_path, monkeypatch
):
    rows = documents(25)
    path = write(tmp_path / "docs.jsonl", rows)
    run = settings(tmp_path / "out", model, path)
    made = build_index(run)
    made.open().delete(made.table, ["d3"])  # by another program
    for row in rows:
        row["year"] += 1
    write(path, rows)
    with pytest.raises(ArtifactError, match=r"lacks 1 rows .* start the same command again"):
        build_index(run, update=True)
    calls = []
    monkeypatch.setattr(
        "rayembed_extras.indexing.embed.LoadedModel.check",
        lambda loaded, at_most=None, start=0: bool(calls.append(at_most)),
    )
    counted = Counted(monkeypatch)
    made, found = build(run, update=True)
    assert (len(found), made.counts["changed"]) == (25, 25)
    assert 0 < len(counted.texts) < 25
    assert (calls[0], calls[-1]) == (None, None), calls
    assert len(calls) == 3, calls


def test_a_job_closes_the_stores_that_it_opened(model, tmp_path, monkeypatch):
    opened, closed = [], []
    plain = ParquetStore.open
    monkeypatch.setattr(ParquetStore, "open", lambda self: opened.append(1) or plain(self))
    monkeypatch.setattr(ParquetTables, "close", lambda self: closed.append(1))
    path = write(tmp_path / "docs.jsonl", documents(12))
    for update in (False, True):
        build_index(settings(tmp_path / "out", model, path), update=update)
        assert len(opened) == len(closed) > update


def test_a_first_job_that_a_check_refuses_leaves_nothing(model, tmp_path, monkeypatch):
    """And the next one, by another model, begins anew."""
    rows = documents(12)
    path = write(tmp_path / "docs.jsonl", [*rows, rows[0]])
    folder = tmp_path / "out/indexes/docs"

    def full(*_, **__):
        raise StorageFullError("there is no room for the index")

    with pytest.raises(DataError, match="occur several times"):
        build_index(settings(tmp_path / "out", model, path))
    assert not folder.exists()
    write(path, rows)
    with pytest.raises(ConfigError, match="column"):
        build_index(settings(tmp_path / "out", model, path, documents__metadata=["nothing"]))
    assert not folder.exists()
    with monkeypatch.context() as patched:
        patched.setattr(building, "check_room", full)
        with pytest.raises(StorageFullError):
            build_index(settings(tmp_path / "out", model, path))
    assert not folder.exists()
    with dies(monkeypatch, building, "write_manifest", 1):
        build_index(settings(tmp_path / "out", model, path))
    there = sorted(folder.rglob("*.parquet"))
    with pytest.raises(ConfigError, match="column"):  # what the killed one has read stays
        build_index(settings(tmp_path / "out", model, path, documents__metadata=["nothing"]))
    assert there == sorted(folder.rglob("*.parquet")) != []
    other = save_biencoder(tmp_path / "other", seed=5)
    assert len(build(settings(tmp_path / "out", other, path))[1]) == 12


def test_an_update_follows_a_switch_that_was_killed(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(25))
    run = settings(tmp_path / "out", model, path)
    made = build_index(run)
    build_index(run, beside="docs_2")
    store = made.open()
    store.point("docs", "docs_2")
    made = build_index(run, update=True)
    assert (made.table, made.manifest.before, store.pointed("docs")) == (
        *("docs_2", "docs_1"),
        "docs_2",
    )
    store.point("docs", "docs_9")
    with pytest.raises(ArtifactError, match=r"refers to 'docs_9', but the record says 'docs_2'"):
        build_index(run, update=True)
    assert store.pointed("docs") == "docs_9"


def test_an_update_by_the_model_of_an_adapter_is_refused_with_the_one_that_fits(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(3))
    made = build_index(settings(tmp_path / "out", model, path))
    other = save_biencoder(tmp_path / "other", seed=5)
    adapter = {weights_fingerprint(other): {}}
    write_manifest(made.storage, changed_table(made.manifest, "docs_1", adapter=adapter))
    with pytest.raises(ConfigError, match=rf"need --model {model} until a backfill: rayembed upg"):
        build_index(settings(tmp_path / "out", other, path), update=True)


def test_an_unfinished_first_build_can_be_dropped_and_begun_again(model, tmp_path):
    path = write(tmp_path / "docs.jsonl", documents(25))
    with pytest.MonkeyPatch.context() as patched, dies(patched, parts, "write_json", 2):
        build_index(settings(tmp_path / "out", model, path))
    other = save_biencoder(tmp_path / "other", seed=5)
    run = settings(tmp_path / "out", other, path)
    with pytest.raises(ConfigError, match=rf"--model {model} to finish .* --name docs --drop"):
        build_index(run)
    changed = settings(tmp_path / "out", model, path, model__instruction="find")
    with pytest.raises(ConfigError, match=r"remove what .* rayembed upgrade --name docs --drop"):
        build_index(changed)
    rayembed.upgrade("docs", drop=True, output=tmp_path / "out")
    assert not (tmp_path / "out/indexes/docs/index.json").exists()
    made, rows = build(run)
    assert (made.table, len(rows)) == ("docs_1", 25)


def test_a_first_build_that_was_killed_after_its_switch_is_finished_not_dropped(
    model, tmp_path, monkeypatch
):
    path = write(tmp_path / "docs.jsonl", documents(12))
    run = settings(tmp_path / "out", model, path)
    with dies(monkeypatch, ParquetTables, "point", 1, after=True):
        build_index(run)
    with pytest.raises(ConfigError, match=r"is built.* --documents PATH .* --name docs; then"):
        rayembed.upgrade("docs", drop=True, output=tmp_path / "out")
    counted = Counted(monkeypatch)
    assert (len(build(run)[1]), counted.texts) == (12, [])
