"""Names from outside never become paths that lead out of their folder."""

import json
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayembed.assets import cache, storage
from rayembed.assets import resolver as object_storage
from rayembed.assets.cache import filled
from rayembed.assets.names import below, check_inside, folder_name
from rayembed.assets.storage import download_folder, list_files
from rayembed.assets.stored_folder import StoredFolder
from rayembed.data.engine.artifacts import DatasetArtifact
from rayembed.data.held_out.part import check_set
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.vectors.lookup import TeacherVectorLookup
from rayembed.errors import ArtifactError, AssetError
from rayembed.models.loading.files import check_weight_files, weight_paths
from rayembed.models.loading.sentence_folder import read_modules
from rayembed.pipeline.run.folders import plan_of
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry import registered_model
from rayembed.training.checkpoints.checkpoint_list import listed_checkpoints

EVIL = ("../victim", "a/../../victim", "/etc/passwd", "..", "a/..", "..\\victim", "a\0b", "", None)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.text(st.characters(codec=None), max_size=300), st.text(max_size=12))
def test_a_folder_name_is_one_plain_name_for_each_text(text, other):
    named = folder_name(text)
    assert Path("x", named).name == named
    assert named not in (".", "..")
    assert len(named) <= 100
    assert not set(named) - set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
    assert (folder_name(other) == named) == (other == text)


def test_plain_names_stay():
    assert folder_name("tiny-3-m-0f4e_b.c") == "tiny-3-m-0f4e_b.c"
    assert folder_name("y/../../../victim").startswith("y_victim-")


@pytest.mark.parametrize("name", EVIL)
def test_names_that_lead_out_are_refused(name, tmp_path):
    with pytest.raises(ArtifactError, match="the list names"):
        below(tmp_path, name, "the list")


@pytest.mark.parametrize(
    "name", ["a", "a/b.parquet", "..a", "a..b/c", "~a", "day=1 00%3A00", "ä ö"]
)
def test_names_that_stay_inside_are_taken(name, tmp_path):
    assert check_inside(name, "the list") == name
    assert below(tmp_path, name, "the list") == tmp_path / name


@pytest.fixture
def victim(tmp_path):
    """A folder beside the cache, with something that must stay."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "id_rsa").write_text("key")
    yield folder
    assert [path.name for path in folder.iterdir()] == ["id_rsa"]


def test_the_cache_removes_nothing_that_it_did_not_make(tmp_path, victim):
    inside = tmp_path / "cache" / "registered"
    inside.mkdir(parents=True)
    for entry in (inside / "x" / ".." / ".." / ".." / "victim", victim):
        with pytest.raises(AssetError, match="an entry of the asset cache"):
            filled(entry, lambda folder: (folder / "file").touch())
    (inside / "link").symlink_to(victim)
    with pytest.raises(AssetError, match="an entry of the asset cache"):
        filled(inside / "link", lambda folder: (folder / "file").touch())


def version(**tags):
    return SimpleNamespace(
        name="tiny", version="1", run_id="run", model_id=None, tags={**tags}, source=""
    )


def test_a_tag_of_the_registry_names_no_folder(tmp_path, victim, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    made = version(**{registered_model.MODEL_ID_TAG: "y/../../../../victim"})

    def fill(folder):
        (folder / "model").mkdir()
        flavor = {"python_function": {"artifacts": {"model": {"path": "model"}}}}
        (folder / "MLmodel").write_text(json.dumps({"flavors": flavor}))

    repository = SimpleNamespace(download_artifacts=lambda _, folder: fill(Path(folder)))
    monkeypatch.setattr(registered_model, "_artifacts", lambda *_: repository)
    found = registered_model.download(None, made, tracking_uri="sqlite:///x")
    assert found.is_relative_to(tmp_path / "cache")
    assert found.resolve().is_relative_to(tmp_path / "cache")


@pytest.mark.parametrize("name", ["../../victim", "/etc"])
def test_the_model_folder_of_an_mlmodel_file_lies_inside(name, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    flavor = {"python_function": {"artifacts": {"model": {"path": name}}}}
    text = json.dumps({"flavors": flavor})
    repository = SimpleNamespace(
        download_artifacts=lambda _, folder: Path(folder, "MLmodel").write_text(text)
    )
    monkeypatch.setattr(registered_model, "_artifacts", lambda *_: repository)
    with pytest.raises(ArtifactError, match="no path inside"):
        registered_model.download(None, version(), tracking_uri="sqlite:///x")


def test_the_fingerprint_of_a_version_is_no_path():
    for tag in ("../../x", "a/b", ""):
        with pytest.raises(ArtifactError, match=r"no fingerprint|not registered"):
            registered_model.weights_of(version(**{registered_model.WEIGHTS_TAG: tag}))


@pytest.mark.parametrize("name", ["../../victim.safetensors", "/etc/passwd", 3])
def test_an_index_of_weights_names_files_of_its_folder(name, tmp_path):
    text = json.dumps({"weight_map": {"layer.weight": name}})
    (tmp_path / "model.safetensors.index.json").write_text(text)
    if name == 3:  # a file of this name, which is not there
        assert weight_paths(tmp_path) == [tmp_path / "3"]
        return
    for read in (weight_paths, check_weight_files):
        with pytest.raises(ArtifactError, match="no path inside its folder"):
            read(tmp_path)


@pytest.mark.parametrize("path", ["../other", "/etc", "1_Pooling/../../x"])
def test_modules_lie_in_their_folder(path, tmp_path):
    kinds = {"Transformer": "", "Pooling": path}
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": place, "idx": n, "name": str(n)}
        for n, (kind, place) in enumerate(kinds.items())
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ArtifactError, match="no path inside its folder"):
        read_modules(tmp_path)


def test_names_in_a_manifest_stay_in_its_storage():
    manifest = {
        "kind": "records",
        "fingerprint": "f",
        "parts": [["../../../x.parquet", 3]],
        "held_out": {"folder": "../../x"},
        "digests": {"../x": "0"},
    }
    vectors = {"files": {"query": [["../../x.npy", 3]], "document": []}}
    records = DatasetArtifact("storage/data/records/a", manifest)
    asked = (
        lambda: records.parts,
        lambda: records.held_out_folder,
        lambda: check_set(records),
        lambda: BatchPlan("storage/plans/a", {"teachers": ["../../x"]}).teachers,
        lambda: TeacherVectorLookup("storage/data/teacher_vectors/a", vectors)._files,
        lambda: TeacherVectorLookup("storage/data/teacher_vectors/a", vectors)._mapped("query", 0),
    )
    for read in asked:
        with pytest.raises(ArtifactError, match="no path inside its folder"):
            read()


def test_a_list_of_checkpoints_names_checkpoints_only(tmp_path):
    listed = {"ray_version": "1", "checkpoint_results": [{"checkpoint_dir_name": "../../victim"}]}
    (tmp_path / "checkpoint_manager_snapshot.json").write_text(json.dumps(listed))
    assert listed_checkpoints(str(tmp_path)) == []


def test_a_list_of_plans_names_folders_of_plans(tmp_path):
    run = get_recipe("biencoder-quickstart")
    placement = run.placement.model_copy(update={"storage_path": str(tmp_path)})
    run = run.model_copy(update={"placement": placement})
    folder = tmp_path / "runs" / run.name
    folder.mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps({"finetune": "../../victim"}))
    with pytest.raises(ArtifactError, match="no path inside its folder"):
        plan_of(run, "finetune")


def test_objects_whose_names_lead_out_are_not_copied(tmp_path, monkeypatch):
    """Keys of object storage may hold '..', which is a step up on a disk."""
    kind = pyarrow.fs.FileType.File
    paths = ("bucket/model/config.json", "bucket/model/../../../evil")
    infos = [pyarrow.fs.FileInfo(path, type=kind, size=1) for path in paths]

    def listing(asked):
        if isinstance(asked, pyarrow.fs.FileSelector):
            return infos
        return pyarrow.fs.FileInfo(asked, type=pyarrow.fs.FileType.Directory)

    stored = SimpleNamespace(get_file_info=listing)
    for module in (storage, object_storage):
        monkeypatch.setattr(module, "open_storage", lambda _: (stored, "bucket/model"))
    monkeypatch.setattr(pyarrow.fs, "copy_files", lambda *_a, **_k: pytest.fail("copied"))
    place = "s3://bucket/model"
    for read in (
        lambda: list_files(place, recursive=True),
        lambda: download_folder(place, tmp_path),
        lambda: StoredFolder(place, tmp_path, recursive=True).fetch(),
        lambda: object_storage.resolve(place, cache=tmp_path),
    ):
        with pytest.raises((ArtifactError, AssetError), match=r"no path inside|contains '..'"):
            read()
