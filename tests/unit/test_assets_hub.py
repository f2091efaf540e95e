"""References of the hub, and downloads from a hub of our own on loopback (`HF_ENDPOINT`)."""

import errno
import hashlib
import json
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest

from rayembed.assets.hub import HubReference, model_files, parse_hub_reference
from rayembed.assets.reading import list_hub_files
from rayembed.assets.resolver import resolve, resolve_model
from rayembed.errors import AssetError, StorageFullError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# No two alike: the hub's cache takes a content that it has from another file.
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "pytorch_model.bin": b"pickled weights",
    "onnx/model.onnx": b"other weights",
    "onnx/config.json": b'{"onnx": true}',
    "tokenizer.json": b'{"tokens": []}',
    "vocab.txt": b"a b",
    "1_Pooling/config.json": b'{"pooling": "mean"}',
    "README.md": b"words",
    "small/config.json": b'{"small": true}',
    "small/model.safetensors": b"small weights",
}


def _sha1(text: bytes) -> str:
    return hashlib.sha1(text, usedforsecurity=False).hexdigest()


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's interface that a download uses; one model and one data set."""

    asked: list[str]

    def log_message(self, *arguments):
        pass

    def _answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = self.path.partition("?")[0]
        for root in ("/api/models/org/name", "/api/datasets/org/name"):
            if path.startswith(f"{root}/revision/"):
                if path.rpartition("/")[2] not in ("main", "v1", COMMIT):
                    return self._answer(404, X_Error_Code="RevisionNotFound")
                siblings = [{"rfilename": name} for name in FILES]
                info = {"id": "org/name", "sha": COMMIT, "siblings": siblings, "tags": []}
                return self._answer(200, json.dumps(info).encode(), Content_Type="application/json")
            if path == f"{root}/tree/{COMMIT}":
                tree = [
                    {"type": "file", "path": name, "size": len(text), "oid": _sha1(text)}
                    for name, text in FILES.items()
                ]
                return self._answer(200, json.dumps(tree).encode(), Content_Type="application/json")
        for root in (f"/org/name/resolve/{COMMIT}/", f"/datasets/org/name/resolve/{COMMIT}/"):
            name = path.removeprefix(root)
            if path.startswith(root) and name in FILES:
                if self.command == "GET":
                    self.asked.append(name)
                etag = f'"{_sha1(FILES[name])}"'
                return self._answer(200, FILES[name], ETag=etag, X_Repo_Commit=COMMIT)
        return self._answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def hub(monkeypatch):
    """The names of the files that were downloaded from a running hub."""
    asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


loopback = pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])


@loopback
def test_a_model_comes_without_other_formats(hub, tmp_path):
    folder = resolve_model("hf://org/name@v1", cache=tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert sorted(hub) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "small/config.json",
        "small/model.safetensors",
        "tokenizer.json",
        "vocab.txt",
    ]
    hub.clear()
    assert resolve_model("hf://org/name@v1", cache=tmp_path) == folder
    assert hub == []


@loopback
def test_a_cache_of_the_hub_that_is_full_is_told(hub, tmp_path, monkeypatch):
    def fills_up(*_arguments, **_named):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub, "snapshot_download", fills_up)
        with pytest.raises(StorageFullError, match=rf"'{tmp_path}.*bytes .* or set HF_HOME"):
            resolve_model("hf://org/name@v1", cache=tmp_path)
    assert resolve_model("hf://org/name@v1", cache=tmp_path).is_dir()


@loopback
def test_a_model_inside_a_repository(hub, tmp_path):
    folder = resolve_model(f"hf://org/name/small@{COMMIT}", cache=tmp_path)
    assert json.loads((folder / "config.json").read_text()) == {"small": True}
    assert sorted(hub) == ["small/config.json", "small/model.safetensors"]


@loopback
def test_a_file_and_a_folder_of_a_dataset(hub, tmp_path):
    file = resolve("hf://datasets/org/name/vocab.txt@main", cache=tmp_path)
    assert file.read_bytes() == b"a b"
    assert hub == ["vocab.txt"]
    folder = resolve("hf://datasets/org/name/onnx@main", cache=tmp_path)
    assert (folder / "model.onnx").read_bytes() == b"other weights"
    with pytest.raises(AssetError, match=r"no file or folder 'none\.txt'"):
        resolve("hf://datasets/org/name/none.txt@main", cache=tmp_path)


@loopback
@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("hf://org/name@v9", "no branch, tag or commit of that name .*NotFoundError"),
        ("hf://org/none@main", "nothing of that name, or it is private .*NotFoundError.*HF_TOKEN"),
    ],
)
@pytest.mark.parametrize("function", [resolve, resolve_model])
def test_what_the_hub_does_not_have(hub, tmp_path, reference, words, function):
    with pytest.raises(AssetError, match=rf"cannot fetch 'hf://org/[^ ]*' from the hub: .*{words}"):
        function(reference, cache=tmp_path)


@loopback
def test_a_hub_that_never_answers_is_given_up(tmp_path, monkeypatch):
    limits = {"connect": 0.3, "pool": 0.3, "read": 0.3, "write": 0.3}
    monkeypatch.setattr("rayembed.assets.hub_client.LIMITS_SECONDS", limits)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(AssetError, match=r"cannot fetch .*no answer in time \(0\.3 s"):
            list_hub_files("hf://datasets/org/name@main")
        assert time.monotonic() - began < 20


def test_an_offline_cache_speaks_our_words(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(AssetError) as told:
        resolve_model("hf://nobody/nothing@main", cache=tmp_path)
    assert "HF_HUB_OFFLINE is set, and this machine's cache has not got it" in str(told.value)
    for inside in ("local_files_only", "HubReference", "repo_type"):
        assert inside not in str(told.value)


@loopback
def test_a_hub_that_is_away(hub, tmp_path, monkeypatch):
    cached = resolve_model(f"hf://org/name@{COMMIT}", cache=tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert resolve_model(f"hf://org/name@{COMMIT}", cache=tmp_path) == cached
    with pytest.raises(AssetError, match=r"cannot fetch 'hf://org/other@v1'"):
        resolve_model("hf://org/other@v1", cache=tmp_path)


def test_references(caplog):
    assert parse_hub_reference("hf://org/name@v1") == HubReference("model", "org/name", "", "v1")
    inside = parse_hub_reference("hf://datasets/org/name/a/b.json@refs/pr/1")
    assert inside == HubReference("dataset", "org/name", "a/b.json", "refs/pr/1")
    escaped = parse_hub_reference("hf://datasets/org/name@refs%2Fpr%2F1/a%20b/c.json")
    assert escaped == HubReference("dataset", "org/name", "a%20b/c.json", "refs/pr/1")
    assert not caplog.messages
    assert parse_hub_reference("hf://org/name").revision == "main"
    assert "names no revision" in caplog.text


@pytest.mark.parametrize(
    "reference",
    [
        "hf://name@v1",
        "hf://org/name/../x@v1",
        "hf://org/name@v1/../x",
        "hf://org/name/a@v1/b",
        "hf://",
        "hf://a b/c",
    ],
)
def test_references_that_cannot_be_read(reference):
    with pytest.raises(AssetError, match=r"cannot read the asset reference"):
        parse_hub_reference(reference)


@pytest.mark.parametrize(
    ("reference", "inside", "revision"),
    [
        ("hf://org/name@v1/config.json", "config.json", "v1"),
        ("hf://org/name@refs/convert/parquet/default/x.parquet", "default/x.parquet", None),
        ("hf://org/name@refs%2Fconvert%2Fparquet/default/x.parquet", "default/x.parquet", None),
        ("hf://org/name@refs/convert/parquet", "", None),
        ("hf://org/name@v1/a/b@c.txt", "a/b@c.txt", "v1"),
    ],
)
def test_a_revision_may_stand_after_the_name(reference, inside, revision):
    found = parse_hub_reference(reference)
    assert found == HubReference("model", "org/name", inside, revision or "refs/convert/parquet")


def test_pickled_weights_only_where_there_are_no_safetensors():
    assert model_files(["config.json", "pytorch_model.bin", "tf_model.h5"]) == [
        "config.json",
        "pytorch_model.bin",
    ]
    assert model_files(["config.json", "pytorch_model.bin", "model.safetensors"]) == [
        "config.json",
        "model.safetensors",
    ]
    assert model_files(["README.md", "data.json"]) == []
