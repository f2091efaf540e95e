from importlib.metadata import EntryPoint

import pyarrow.fs
import pytest

from rayembed.assets import resolver
from rayembed.assets.resolver import copy_to_cache, is_unpacked, resolve, resolve_model
from rayembed.config.override import override
from rayembed.config.types import SHORT_NAMES, expanded_name
from rayembed.errors import AssetError, ConfigError
from rayembed.pipeline.evaluate.job import run_evaluation_job
from rayembed.pipeline.register.job import run_register_job
from rayembed.recipes.catalogue import get_recipe


def test_local_paths(tmp_path, monkeypatch):
    (tmp_path / "file.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("file.json") == tmp_path / "file.json"
    assert resolve(str(tmp_path)) == tmp_path
    assert resolve("~/file.json") == tmp_path / "file.json"


def test_a_missing_local_path_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssetError, match=rf"looked at '{tmp_path}/org/model'.*hf://org/model@main"):
        resolve("org/model")
    with pytest.raises(AssetError, match="empty"):
        resolve("")


@pytest.mark.parametrize(
    ("reference", "meant"),
    [
        ("all-minilm-l6-v2", "did you mean 'all-MiniLM-L6-v2'?"),
        ("all-MiniLM-L6", "did you mean 'all-MiniLM-L6-v2'?"),
        (
            "sentence-transformers/all-MiniLM-L6-v2",
            "'all-MiniLM-L6-v2' or 'hf://sentence-transformers/all-MiniLM-L6-v2@main'?",
        ),
        ("my-model", "looked at"),
    ],
)
def test_an_unknown_name_of_a_model_says_which_are_known(reference, meant):
    with pytest.raises(AssetError) as raised:
        resolve_model(reference)
    known = "An asset is a short name of a model (all-MiniLM-L6-v2), a local path, hf://org/name"
    assert meant in str(raised.value)
    assert known in str(raised.value)


SHORT, WHOLE = next(iter(SHORT_NAMES.items()))


PAIRS = "data.datasets.pairs."
MINED = "stages.finetune.batch.num_negatives=1"


@pytest.mark.parametrize(
    "assignments",
    [
        ["model.backbone.path=NAME"],
        ["evaluation.baselines=[bm25, 'NAME']"],
        ["stages.finetune.hidden_states={teacher: 'NAME'}"],
        [PAIRS + "clusters={teacher: 'NAME', batch_pairs: 64}"],
        [PAIRS + "mining.teacher=NAME", MINED],
        [PAIRS + "mining={teacher: x, further_teachers: [{teacher: 'NAME'}]}", MINED],
        [PAIRS + "mining={teacher: x, rescoring: {model: 'NAME'}}", MINED],
    ],
)
def test_a_setting_takes_a_short_name_for_what_it_stands_for(assignments):
    """The run is the same one, under the same fingerprint."""
    short, whole = (
        override(get_recipe("biencoder"), [one.replace("NAME", name) for one in assignments])
        for name in (SHORT, WHOLE)
    )
    assert short == whole
    assert short.fingerprint == whole.fingerprint


@pytest.mark.parametrize("loader", ["", "st:"])
def test_a_job_takes_a_short_name_for_what_it_stands_for(loader):
    asked, meant = ["--model", f"{loader}{SHORT}"], f"{loader}{WHOLE}"
    assert (
        run_evaluation_job.resolve([*asked, "--tasks", "STSBenchmark"])[0].model.reference == meant
    )
    if loader:
        return
    assert run_register_job.arguments(asked).model == meant


def test_a_folder_of_that_name_is_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert expanded_name(SHORT) == WHOLE
    (tmp_path / SHORT).mkdir()
    folder = tmp_path / SHORT
    assert expanded_name(SHORT) == str(folder)
    assert expanded_name(f"st:{SHORT}") == f"st:{folder}"
    assert resolve(SHORT) == folder
    run = override(get_recipe("biencoder"), [f"model.backbone.path={SHORT}"])
    # A process in another folder, as that of a worker, reads the settings again.
    monkeypatch.chdir(tmp_path.parent)
    assert override(run, ["name=again"]).model.backbone.path == str(folder)


def test_a_short_name_that_nobody_replaced_is_no_other_model(tmp_path, monkeypatch):
    """A relative folder of that name that is gone, or is not there for a worker."""
    monkeypatch.chdir(tmp_path)
    for find in (resolve, resolve_model):
        with pytest.raises(AssetError, match="there is no file or folder"):
            find(SHORT)


def test_an_unknown_scheme_says_which_are_known():
    with pytest.raises(AssetError, match=r"unknown scheme 'ftp'; allowed: .*hf://.*s3://.*pypi://"):
        resolve("ftp://host/model")


def made(reference, cache):
    """The file that a package makes of a reference."""
    path = cache / "made.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference)
    return path


@pytest.fixture
def brought(monkeypatch):
    """Schemes of another package, one of which it cannot make."""
    points = {
        "notes": EntryPoint("notes", f"{__name__}:made", "rayembed.schemes"),
        "gone": EntryPoint("gone", "no_such_package:made", "rayembed.schemes"),
    }
    monkeypatch.setattr(resolver, "_makers", lambda: points)


def test_another_package_brings_a_scheme(brought, tmp_path):
    assert resolve("notes://today", cache=tmp_path).read_text() == "notes://today"
    assert is_unpacked("notes://today")
    assert not is_unpacked("notes")
    with pytest.raises(ConfigError, match="'gone' to 'rayembed"):
        resolve("gone://today", cache=tmp_path)


def test_what_is_not_a_model(tmp_path):
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(AssetError, match=r"neither config\.json nor modules\.json.*weights\.bin"):
        resolve_model(str(tmp_path))
    with pytest.raises(AssetError, match=r"is the file 'weights\.bin'"):
        resolve_model(str(tmp_path / "weights.bin"))
    (tmp_path / "modules.json").write_text("[]")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_that_is_none(tmp_path):
    (tmp_path / "model.gguf").write_text("<html>not found</html>")
    with pytest.raises(AssetError, match="does not start with 'GGUF'"):
        resolve_model(str(tmp_path / "model.gguf"), cache=tmp_path / "cache")


@pytest.fixture
def bucket(tmp_path):
    """pyarrow's filesystem over a local folder: stands for a bucket, with the same interface."""
    folder = tmp_path / "bucket" / "models" / "tiny"
    (folder / "nested").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "nested" / "weights").write_bytes(b"0123")
    root = str(tmp_path / "bucket")
    return folder, pyarrow.fs.SubTreeFileSystem(root, pyarrow.fs.LocalFileSystem())


def test_a_folder_of_a_bucket_is_copied_once_and_again_when_it_changes(bucket, tmp_path):
    folder, filesystem = bucket
    cache = tmp_path / "cache"
    reference = "s3://bucket/models/tiny"
    first = copy_to_cache(reference, filesystem, "models/tiny", cache)
    assert (first / "nested" / "weights").read_bytes() == b"0123"
    assert (first / "config.json").read_text() == "{}"
    assert copy_to_cache(reference, filesystem, "models/tiny", cache) == first
    (folder / "nested" / "weights").write_bytes(b"01234")
    second = copy_to_cache(reference, filesystem, "models/tiny", cache)
    assert second != first
    assert (second / "nested" / "weights").read_bytes() == b"01234"


def test_a_file_of_a_bucket(bucket, tmp_path):
    _, filesystem = bucket
    path = copy_to_cache("s3://b/c", filesystem, "models/tiny/config.json", tmp_path / "cache")
    assert path.name == "config.json"
    assert path.read_text() == "{}"


def test_nothing_in_a_bucket(bucket, tmp_path):
    _, filesystem = bucket
    with pytest.raises(AssetError, match=r"no file at 's3://b/models/none'"):
        copy_to_cache("s3://b/models/none", filesystem, "models/none", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
