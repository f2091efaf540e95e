"""The registry follows an index: built, given an adapter, upgraded, rolled back, dropped."""

import json
import shutil

import numpy as np
import pytest
from made_up_index import sentences, settings, write
from registered import register
from tiny_folders import save_biencoder

import rayembed
from rayembed.assets import resolver
from rayembed.errors import ConfigError, StorageError
from rayembed.models.loading.files import weights_fingerprint
from rayembed.registry.aliases import CHAMPION, alias_version
from rayembed.registry.index_tags import indexes_of
from rayembed.registry.indexes import ReadyQuestion, index_ready
from rayembed.registry.promote import Gates, promote
from rayembed.registry.registered_model import connect
from rayembed.registry.tracking import Tracker
from rayembed_extras.index_upgrades import readiness
from rayembed_extras.index_upgrades.job import run_upgrade_job
from rayembed_extras.index_upgrades.maps import load_map
from rayembed_extras.indexing.build import build_index
from rayembed_extras.indexing.manifest import changed_table, read_manifest, write_manifest
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.settings import Limits, ServedModel

NAME = "support"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A registry with two versions in the SQLite file of a storage, and documents."""
    home = tmp_path_factory.mktemp("registry")
    storage = home / "outputs"
    storage.mkdir()
    uri = f"sqlite:///{storage / 'mlflow.db'}"
    tracker = Tracker.open(
        uri, "tests", "run", "f" * 12, {}, {}, folder=home / "run", total_steps=1
    )
    weights = []
    for number in (1, 2):
        folder = save_biencoder(home / f"model{number}", seed=number)
        weights.append(weights_fingerprint(folder))
        register(
            folder,
            NAME,
            tracker=tracker,
            weights_fingerprint=weights[-1],
            dimensions=(32,),
            instruction_template=None,
            global_step=0,
        )
    write(home / "documents.jsonl", sentences(150))
    return home, storage, uri, connect(uri), weights


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def run_of(made, model=f"models:/{NAME}/1", **changes):
    home, storage, *_ = made
    path = home / "documents.jsonl"
    return settings(storage, model, path, rows_per_part=1000, store__kind="lance", **changes)


def upgrade(made, *words, code=0):
    storage = made[1]
    sets = ["placement.runtime=local", f"placement.storage_path={storage}", "maps=[affine]"]
    words = ["--name", "docs", *words, *(w for value in sets for w in ("--set", value))]
    assert run_upgrade_job(words) == code


def tags_of(made):
    """Values of the index's tag by the version's number."""
    uri = made[2]
    found = {number: indexes_of(f"models:/{NAME}/{number}", uri) for number in (1, 2)}
    return {number: entries[0].values for number, entries in found.items() if entries}


def states(made):
    told = {number: values["state"] for number, values in tags_of(made).items()}
    return told, {number: values["table"] for number, values in tags_of(made).items()}


def gate(made, number, compatible=None, storage=None):
    _, own, _, _, weights = made
    return index_ready(
        ReadyQuestion(
            str(storage or own),
            "docs",
            weights[number - 1],
            compatible,
            f"models:/{NAME}/{number}",
        )
    )


def test_the_registry_names_the_index_through_its_life(made, cache, monkeypatch):
    home, storage, _, client, weights = made
    check = gate(made, 1)
    assert not check.holds
    assert "there is no index 'docs'" in check.note
    assert f"rayembed index --documents PATH --model models:/{NAME}/1 --name docs" in check.note

    # Version 2 is the candidate, so its alias is pinned below.
    build_index(run_of(made))
    (values,) = tags_of(made).values()
    folder = storage / "indexes" / "docs"
    assert values == {
        "state": "current",
        "store": "lance",
        "address": str(folder / "store"),
        "table": "docs_1",
        "rows": 150,
        "number_type": "float32",
        "dimensions": 32,
        "weights": weights[0],
        "updated": read_manifest(str(storage), "docs").tables["docs_1"].updated,
        "record": str(folder / "index.json"),
    }
    assert "`docs`" in client.get_model_version(NAME, "1").description
    check = gate(made, 1)
    assert (check.holds, check.gate) == (True, "index docs is ready")
    other = gate(made, 2, compatible=0.97)
    assert not other.holds
    assert f"rayembed upgrade --name docs --model models:/{NAME}/2 --road backfill" in other.note

    # An update changes the tag.
    write(home / "documents.jsonl", sentences(151))
    build_index(run_of(made), update=True)
    assert tags_of(made)[1]["rows"] == 151

    upgrade(made, "--model", f"models:/{NAME}@candidate", "--road", "adapter")
    assert states(made) == ({1: "current", 2: "adapter"}, {1: "docs_1", 2: "docs_1"})
    adapter = tags_of(made)[2]
    assert adapter["adapter"] == "affine"
    assert len(adapter["share"]) == 3
    check_shares(made, adapter["share"][1])

    # The champion moves with the index alone.
    gates = Gates(index_ready=("docs",), storage=str(storage))
    assert not promote(client, NAME, 2, (), gates).moved
    assert promote(client, NAME, 1, (), gates).moved
    assert alias_version(client, NAME, CHAMPION) == 1

    upgrade(made, "--model", f"models:/{NAME}/2", "--road", "backfill")
    assert states(made) == ({1: "former", 2: "current"}, {1: "docs_1", 2: "docs_2"})
    assert promote(client, NAME, 2, (), gates).moved
    assert not gate(made, 1).holds

    upgrade(made, "--rollback")
    assert states(made)[0] == {1: "current", 2: "adapter"}
    upgrade(made, "--rollback")
    assert states(made)[0] == {1: "former", 2: "current"}

    check_served(made)
    reference = f"models:/{NAME}/2"
    loaded = rayembed.load(reference, for_index="docs", output=storage)
    assert loaded.encode_document(["foxes"]).shape == (1, 32)

    upgrade(made, "--drop")
    assert states(made) == ({2: "current"}, {2: "docs_2"})
    assert client.get_model_version(NAME, "1").description == ""
    assert not gate(made, 1).holds

    def away(*_):
        raise StorageError("the disk is away")

    monkeypatch.setattr(readiness, "open_index", away)
    assert not gate(made, 2).holds
    assert "the disk is away" in gate(made, 2).note


def check_served(made):
    """A server of the former version says what the registry knows."""
    _, storage, uri, *_ = made
    served = ServedModel(name="m", model=f"models:/{NAME}/1", use_gpu=False)
    service = on_ray.load(served, Limits(), uri, str(storage))
    (entry,) = service._index.described()
    assert (entry["name"], entry["state"], entry["serves"]) == ("docs", "former", False)


def check_shares(made, low):
    """The gate compares the lower end of the adapter's recorded share."""
    _, storage, _, _, weights = made
    assert not gate(made, 2).holds
    assert "--compatible 0.97" in gate(made, 2).note
    with_share(storage, weights[1], [0.99, 0.972, 1.0])
    assert gate(made, 2, compatible=0.97).holds
    assert gate(made, 2, compatible=0.97).figure == pytest.approx(0.972)
    refused = gate(made, 2, compatible=0.98)
    assert not refused.holds
    assert "--road backfill" in refused.note
    with_share(storage, weights[1], None)
    assert "was not measured" in gate(made, 2, compatible=0.1).note
    with_share(storage, weights[1], [low, low, low])


def with_share(storage, weights, share):
    """Let the record state another share of the adapter."""
    manifest = read_manifest(str(storage), "docs")
    adapters = dict(manifest.tables["docs_1"].adapter)
    adapters[weights] = {**adapters[weights], "share": share}
    write_manifest(str(storage), changed_table(manifest, "docs_1", adapter=adapters))


def test_an_adapter_is_found_for_an_alias_a_folder_and_a_hub_name(
    made, cache, tmp_path, monkeypatch
):
    """It lies with the index, and is found by the model's weights."""
    home, storage, uri, *_ = made
    build_index(run_of(made, name="several", store__to=str(tmp_path / "tables")))
    words = ["--name", "several", "--model", f"models:/{NAME}@candidate", "--road", "adapter"]
    sets = ["placement.runtime=local", f"placement.storage_path={storage}", "maps=[affine]"]
    assert run_upgrade_job([*words, *(w for value in sets for w in ("--set", value))]) == 0
    hub = shutil.copytree(home / "model2", tmp_path / "snapshot")
    (hub / "README.md").write_text("A card.")
    monkeypatch.setattr(resolver, "fetch_model_from_hub", lambda reference, cache: hub)
    plain = rayembed.load(home / "model2").encode_query(["foxes"])
    (folder,) = (storage / "indexes" / "several" / "adapters").iterdir()
    wanted = load_map(folder)(plain)
    assert np.abs(wanted - plain).max() > 0.1, "the control"
    names = (f"models:/{NAME}@candidate", f"models:/{NAME}/2", str(home / "model2"))
    for reference in (*names, "hf://org/name@main"):
        loaded = rayembed.load(reference, for_index="several", output=storage)
        np.testing.assert_allclose(loaded.encode_query(["foxes"]), wanted, atol=1e-6)
        served = ServedModel(name="m", model=reference, use_gpu=False, index="several")
        service = on_ray.load(served, Limits(), uri, str(storage))
        entries = {entry["name"]: entry for entry in service._index.described()}
        assert (entries["several"]["adapter"], entries["several"]["serves"]) == ("affine", True)
    with pytest.raises(ConfigError, match="its documents do not belong"):
        loaded.encode_document(["foxes"])


def test_an_index_is_complete_also_where_the_registry_is_away(
    made, cache, monkeypatch, caplog, tmp_path
):
    from rayembed_extras.indexing import registration

    def away(*_, **__):
        raise StorageError("MLflow is away")

    monkeypatch.setattr(registration, "tag_index", away)
    run = run_of(made, name="other", store__to=str(tmp_path / "tables"))
    built = build_index(run)
    assert built.record.complete
    assert "the registry does not name the index other at models:/support/1" in caplog.text
    monkeypatch.undo()
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    build_index(run, update=True)
    names = [entry.name for entry in indexes_of(f"models:/{NAME}/1", made[2])]
    assert "other" in names


def test_an_index_of_a_folder_needs_no_registry(made, cache, tmp_path):
    home = made[0]
    path = home / "documents.jsonl"
    run = settings(tmp_path / "outputs", home / "model1", path, rows_per_part=1000)
    build_index(run)
    assert not (tmp_path / "outputs" / "mlflow.db").exists()
    record = json.loads((tmp_path / "outputs/indexes/docs/index.json").read_text())
    assert record["tables"]["docs_1"]["complete"]
