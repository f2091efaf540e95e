import pyarrow.fs
import pytest

from rayembed.assets.object_storage import copy_to_cache
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.errors import AssetError


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


def test_an_unknown_scheme_says_which_are_known():
    with pytest.raises(AssetError, match=r"unknown scheme 'ftp'; allowed: .*hf://.*s3://.*pypi://"):
        resolve("ftp://host/model")


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
