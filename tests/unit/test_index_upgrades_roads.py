"""Roads of upgrades one after the other: locked, repeated, compatible, from Python."""

import csv
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_up_index import write
from safetensors.numpy import load_file, save_file
from tiny_models import save_encoder
from upgraded_index import COUNT, Index, Watched

import rayembed
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.files import weights_fingerprint
from rayembed_extras.index_upgrades.calls import drop_old_tables, roll_back_index
from rayembed_extras.index_upgrades.models import UpgradeModel
from rayembed_extras.index_upgrades.switch import adapter_for, known_index
from rayembed_extras.index_upgrades.upgrade import upgrade
from rayembed_extras.indexing.stores.parquet import ParquetStore


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Models in folders: `near` has nearly the weights of `a`, `wide` another width."""
    home = tmp_path_factory.mktemp("roads")
    for seed, (name, width) in enumerate({"a": 32, "b": 32, "c": 32, "wide": 48}.items()):
        save_encoder(home / name, seed=seed, hidden_size=width)
    shutil.copytree(home / "a", home / "near")
    weights = load_file(home / "a" / "model.safetensors")
    chance = np.random.default_rng(0)
    near = {
        name: (one + 0.02 * one.std() * chance.standard_normal(one.shape)).astype(one.dtype)
        for name, one in weights.items()
    }
    save_file(near, home / "near" / "model.safetensors", {"format": "pt"})
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
    made.build()
    return made


def holds(index, store, model):
    """The name refers to a table with all documents by a model."""
    manifest = known_index(index.storage, "docs")
    assert store.names == {"docs": manifest.current}
    assert index.record.documents["id"] == "name"
    rows = store.rows[manifest.current].sort_by("id").to_pylist()
    wanted = sorted(index.rows, key=lambda row: row["name"])
    assert [row["id"] for row in rows] == [row["name"] for row in wanted]
    assert [row["text"] for row in rows] == [row["text"] for row in wanted]
    assert [row["year"] for row in rows] == [row["year"] for row in wanted]
    right = rayembed.load(index.home / model).encode_document([row["text"] for row in rows])
    np.testing.assert_allclose([row["vector"] for row in rows], right, atol=2e-3)


def test_no_other_job_writes_an_index_during_a_backfill(index, store):
    seen = []
    jobs = (
        lambda: index.build(update=True),
        lambda: upgrade(index.run("c"), "backfill"),
        lambda: roll_back_index(index.run()),
        lambda: drop_old_tables(index.run()),
    )

    def refused(step):
        seen.append(step)
        for job in jobs:
            with pytest.raises(ArtifactError, match=r"has the index 'docs' .* command again$"):
                job()

    store.before = refused
    upgrade(index.run(), "backfill")
    assert {("id", "text", "year"), "upsert", "point"} <= set(seen), "read, written and switched"
    store.before = None
    holds(index, store, "b")
    index.rows[3]["text"] = "Foxes live in Paris. They are ancient."
    index.build("b", update=True)
    holds(index, store, "b")


@pytest.mark.parametrize("seed", range(3))
def test_drawn_roads_through_models_and_back_end_at_their_vectors(index, store, seed):
    """From a to b, c and a again; between them the index is updated, switched back and forth, given
    an adapter, or loses its old tables.
    """
    chance = random.Random(seed)
    has_former = False
    for model, following in (("a", "b"), ("b", "c"), ("c", "a"), ("a", "b")):
        for step in chance.sample(["update", "adapter", "back and forth", "drop"], 2):
            if step == "update":
                index.rows[chance.randrange(COUNT)]["text"] = f"Foxes {chance.random()}. Dogs."
                index.rows.pop(chance.randrange(len(index.rows)))
                index.build(model, update=True)
            elif step == "adapter" and not index.record.adapter:
                upgrade(index.run("wide", maps=["orthogonal"]), "adapter")
            elif step == "back and forth" and has_former:
                roll_back_index(index.run())
                roll_back_index(index.run())
            elif step == "drop" and has_former and chance.random() < 0.5:
                drop_old_tables(index.run())
                has_former = False
            holds(index, store, model)
        former = known_index(index.storage, "docs").current
        path = chance.choice([None, str(index.path)])
        upgrade(index.run(following, documents=path), "backfill")
        has_former = True
        manifest = known_index(index.storage, "docs")
        assert (manifest.before, manifest.current != former) == (former, True)
        holds(index, store, following)
    assert manifest.current != "docs_1"


def test_a_backfill_reads_files_as_the_index_was_built_from_them(home, tmp_path, store):
    """Separated by semicolons, in latin-1, with rows that have no text, in pieces."""
    index = Index(home, tmp_path)
    index.path = tmp_path / "documents.csv"

    def written(delimiter, encoding):
        with index.path.open("w", newline="", encoding=encoding) as file:
            rows = csv.writer(file, delimiter=delimiter)
            rows.writerow(["nr", "heading", "text", "year"])
            for row in index.rows:
                text = "" if row["year"] % 10 == 0 else row["text"]
                rows.writerow([row["name"], text, text and f"Füchse: {text}", row["year"]])

    form = {"delimiter": ";", "encoding": "latin-1", "max_rejected_share": 0.2}
    columns = {"id": "nr", "text": "heading+text", "chunks": {"by": "tokens", "size": 24}}
    written(";", "latin-1")
    index.build(**form, **columns)
    before = store.rows["docs_1"].drop_columns(["vector"]).sort_by("id")
    assert len(before) > len(set(before["document"].to_pylist())) == 0.9 * COUNT
    assert any("Füchse" in text for text in before["text"].to_pylist())
    run = index.run("b", documents=str(index.path))
    assert f"by {index.home / 'b'} " in upgrade(run, "backfill").lines[0]
    assert store.rows["docs_2"].drop_columns(["vector"]).sort_by("id") == before
    # The files of the last update count.
    written(",", "utf-8")
    index.build("b", update=True, max_rejected_share=0.15, **columns)
    kept = index.record.documents
    assert (kept["delimiter"], kept["encoding"], kept["max_rejected_share"]) == (None, None, 0.15)
    upgrade(index.run("c", documents=str(index.path)), "backfill")
    assert store.rows["docs_3"].drop_columns(["vector"]).sort_by("id") == before


def test_a_compatible_model_asks_the_index_as_it_is(home, index):
    run = index.run("near", keep=0.5, maps=["identity", "orthogonal"])
    done = upgrade(run, "auto")
    road = done.report.road_of("identity")
    assert (done.recommended.road, road.share[0] < 1) == ("compatible", True)
    assert done.recommended.sentence.startswith("Compatible: new queries without a map keep ")
    assert done.lines[0].startswith("Compatible ")
    weights = weights_fingerprint(home / "near")
    entry = index.record.adapter[weights]
    assert (entry["kind"], entry["share"]) == ("identity", list(road.share))
    assert adapter_for(index.storage, "docs", weights).kind == "identity"
    loaded = rayembed.load(home / "near", for_index="docs", output=index.storage)
    plain = rayembed.load(home / "near").encode_query(["foxes"])
    np.testing.assert_allclose(loaded.encode_query(["foxes"]), plain, atol=1e-6)
    with pytest.raises(ConfigError, match="for queries alone"):
        loaded.encode_document(["foxes"])
    low = road.share[1]
    assert index.ready("near", low - 0.01).holds
    assert not index.ready("near", low + 0.01).holds
    assert "its queries as they are keep" in index.ready("near", None).note
    assert "no adapter" in index.ready("b", 0.1).note
    again = upgrade(index.run("near", keep=1.0, maps=["identity", "orthogonal"]))
    assert again.recommended.road == "backfill"


def test_a_model_that_is_not_compatible_is_not_taken_for_one(index, monkeypatch):
    done = upgrade(index.run("b", maps=["identity", "affine"]))
    assert done.report.road_of("identity").share[2] < 0.5, "the control"
    assert done.recommended.road != "compatible"
    monkeypatch.setattr("rayembed_extras.index_upgrades.upgrade.load_upgrade_model", None)
    with pytest.raises(ConfigError, match=r"48 dimensions, but the index 'docs' has 32.* adapter"):
        upgrade(index.run("wide", maps=["identity", "affine"]), "compatible")
    with pytest.raises(ConfigError, match="add `identity` to maps"):
        upgrade(index.run("b", maps=["affine"]), "compatible")
    with pytest.raises(ConfigError, match=r"query encoder embeds no documents.* compatible"):
        upgrade(index.run("near", query_encoder=True), "backfill")


@pytest.mark.parametrize("judged", [True, False])
def test_a_query_encoder_is_measured_against_the_models_own_index(
    home, index, tmp_path, monkeypatch, judged
):
    monkeypatch.setattr(UpgradeModel, "documents", None)
    first = {row["text"].partition(".")[0] + ".": row["name"] for row in index.rows}
    values = {}
    if judged:
        rows = [{"query": text, "document": name} for text, name in first.items()]
        values["queries"] = str(write(tmp_path / "queries.jsonl", rows))
    run = index.run("near", query_encoder=True, keep=0.3, **values)
    done = upgrade(run, "auto")
    documents = rayembed.load(home / "a").encode_document([row["text"] for row in index.rows])
    names = np.array([row["name"] for row in index.rows])
    found = {}
    for name in ("a", "near"):
        vectors = rayembed.load(home / name).encode_query(list(first))
        found[name] = names[np.argsort(-vectors @ documents.T, axis=1)[:, :10]]
    if judged:
        recalls = {
            model: np.mean([n in row for n, row in zip(first.values(), ids, strict=True)])
            for model, ids in found.items()
        }
        wanted = recalls["near"] / recalls["a"]
    else:
        pairs = zip(found["a"], found["near"], strict=True)
        wanted = np.mean([len(set(a) & set(b)) / 10 for a, b in pairs])
    (own, asked) = done.report.roads
    assert (own.label, asked.kind, done.report.num_queries) == (
        "before the upgrade",
        "identity",
        len(first),
    )
    assert asked.share[0] == pytest.approx(wanted, abs=0.01)
    assert "of the index's own model's" in done.recommended.sentence
    entry = index.record.adapter[weights_fingerprint(home / "near")]
    assert (entry["share"], entry["share_of"]) == (list(asked.share), "the index's own model")
    assert index.ready("near", asked.share[1] - 0.01).holds
    other = upgrade(index.run("b", query_encoder=True, **values), "auto")
    assert (other.recommended.road, other.lines) == (None, ())
    assert other.recommended.sentence.startswith("Stay with the index's own model")


def test_an_index_is_upgraded_from_python(home, index, store, capsys):
    assert "upgrade" in dir(rayembed)
    given = {
        "output": index.storage,
        "settings": {"maps": ["identity"], "placement.runtime": "local"},
    }
    done = rayembed.upgrade("docs", home / "b", **given)
    assert done.roads.rows[0][0] == "full re-embedding"
    assert "| full re-embedding |" in done._repr_markdown_()
    assert "Recommend  Backfill" in capsys.readouterr().out
    rows = [{"query": row["text"], "document": row["name"]} for row in index.rows[:40]]
    loaded = rayembed.load(home / "near")
    done = rayembed.upgrade("docs", loaded, queries=rows, keep=0.1, road="auto", **given)
    assert done.report.judged
    assert done.lines[0].startswith("Compatible")
    rayembed.upgrade("docs", home / "b", road="backfill", documents=index.rows, **given)
    holds(index, store, "b")
    assert rayembed.upgrade("docs", rollback=True, **given) is None
    holds(index, store, "a")
    rayembed.upgrade("docs", drop=True, **given)
    assert store.tables("docs") == ["docs_1"]
    for wrong in ({}, {"model": "x", "drop": True}, {"rollback": True, "drop": True}):
        with pytest.raises(ConfigError, match="one of model, rollback=True, drop=True and"):
            rayembed.upgrade("docs", **wrong)


def test_the_python_of_the_page_runs(home, index, store, tmp_path, monkeypatch):
    upgrade(index.run("b"), "backfill")
    rows = [{"query": row["text"], "document": row["name"]} for row in index.rows[:40]]
    queries = write(tmp_path / "queries.jsonl", rows)
    page = Path(__file__).parents[2] / "docs" / "index_upgrades.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    (text,) = blocks
    own = {"models:/support@candidate": home / "near", "judged/": queries, '"support"': '"docs"'}
    for shown, place in own.items():
        text = text.replace(shown, str(place))
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(text, names)
    assert names["done"].roads.rows
    assert store.names == {"docs": "docs_1"}
