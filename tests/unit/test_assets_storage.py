import errno
import io
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pyarrow.fs
import pytest
from safetensors import SafetensorError

from rayembed.assets import atomic, clients
from rayembed.assets.atomic import is_full
from rayembed.assets.storage import (
    check_writable,
    exists,
    file_name,
    join,
    move_file,
    open_storage,
    read_bytes,
    store_file,
    upload_folder,
    with_ending,
    write_atomic,
)
from rayembed.errors import ArtifactError, PlacementError, StorageError, StorageFullError


def test_local_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    filesystem, inside = open_storage("relative/file")
    assert isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    assert inside == str(tmp_path / "relative" / "file")
    assert not exists("relative/file")
    write_atomic("relative/file", b"one")
    write_atomic("relative/file", b"two")
    assert exists("relative/file")
    assert exists("relative")
    assert read_bytes("relative/file") == b"two"
    assert [path.name for path in (tmp_path / "relative").iterdir()] == ["file"]
    with pytest.raises(ArtifactError, match="relative/none"):
        read_bytes("relative/none")


def test_a_file_is_moved_into_a_folder_that_is_not_there_yet(tmp_path):
    write_atomic(tmp_path / "a", b"one")
    move_file(str(tmp_path / "a"), str(tmp_path / "deep" / "b"))
    assert (tmp_path / "deep" / "b").read_bytes() == b"one"
    assert not (tmp_path / "a").exists()
    with pytest.raises(ArtifactError, match="cannot move"):
        move_file(str(tmp_path / "a"), str(tmp_path / "b"))


def test_a_file_is_copied_to_its_place(tmp_path):
    source = tmp_path / "made" / "file"
    write_atomic(source, b"new")
    write_atomic(tmp_path / "kept" / "file", b"old and longer")
    store_file(source, tmp_path / "kept" / "file")
    assert read_bytes(tmp_path / "kept" / "file") == b"new"
    assert source.exists()
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("number", "kind", "told"),
    [
        (errno.EIO, StorageError, "Correct the storage"),
        (errno.ENOSPC, StorageFullError, r"[\d,]+ bytes are free there.* Make room"),
        (errno.EDQUOT, StorageFullError, r"quota is used up.* Make room"),
    ],
)
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch, number, kind, told, call):
    write_atomic(tmp_path / "file", b"old")

    def fails(*_arguments):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync") if call == "fsync" else (shutil, "copyfileobj")), fails)
        with pytest.raises(StorageError, match=f"{tmp_path}/file.*{told}") as caught:
            write_atomic(tmp_path / "file", b"new")
    assert type(caught.value) is kind
    assert is_full(caught.value) == (kind is StorageFullError)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("call", [read_bytes, lambda path: write_atomic(path, b"content")])
def test_google_storage_that_cannot_be_reached_is_told_as_such(monkeypatch, call):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setattr(clients, "PATIENCE", clients.Patience(gcs_seconds=1))
    where = f"gs://anonymous@bucket/file?scheme=http&endpoint_override=127.0.0.1:{port}"
    with pytest.raises(StorageError, match=r"\(the storage does not answer\)") as caught:
        call(where)
    assert not is_full(caught.value)


def test_written_files_have_the_mode_of_the_umask(tmp_path):
    former = os.umask(0o027)
    try:
        write_atomic(tmp_path / "file", b"")
    finally:
        os.umask(former)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("path", "parts", "joined"),
    [
        ("outputs", ("a", "b.json"), "outputs/a/b.json"),
        ("/", ("a",), "/a"),
        ("s3://bucket/runs/", ("/a/", "b"), "s3://bucket/runs/a/b"),
        ("gs://bucket", ("a",), "gs://bucket/a"),
        ("s3://b/runs?region=eu", ("a",), "s3://b/runs/a?region=eu"),
        ("outputs", (), "outputs"),
    ],
)
def test_join(path, parts, joined):
    assert join(path, *parts) == joined


@pytest.mark.parametrize(
    ("path", "name", "other"),
    [
        ("outputs/a.b.parquet", "a.b.parquet", "outputs/a.b.npz"),
        ("/why?/part.parquet", "part.parquet", "/why?/part.npz"),
        ("s3://b/v1.2/part.parquet", "part.parquet", "s3://b/v1.2/part.npz"),
        (
            "s3://b/part.parquet?region=eu&endpoint_override=http://h.org:9",
            "part.parquet",
            "s3://b/part.npz?region=eu&endpoint_override=http://h.org:9",
        ),
        ("gs://b/folder/?x=/y", "folder", None),
    ],
)
def test_names_and_endings_know_the_query_of_an_address(path, name, other):
    assert file_name(path) == name
    if other is not None:
        assert with_ending(path, ".npz") == other


def test_object_storage_is_opened_by_its_scheme():
    s3, inside = open_storage("s3://bucket/runs/one?region=eu-west-1&endpoint_override=localhost:9")
    assert isinstance(s3, pyarrow.fs.S3FileSystem)
    assert inside == "bucket/runs/one"
    with pytest.raises(PlacementError, match=r"scheme 'ftp'; allowed: a local path, s3://, gs://"):
        open_storage("ftp://host/runs")


def test_check_writable(tmp_path):
    check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(PlacementError, match=r"placement\.storage_path .*cannot be written"):
        check_writable(tmp_path / "file" / "below")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("library", ["python", "pyarrow"])
def test_a_full_disk_is_known_whoever_tells(library):
    content = b"x" * 100_000
    with pytest.raises(Exception, match="No space left") as caught:  # noqa: PT012  closing writes too
        if library == "python":
            Path("/dev/full").write_bytes(content)
        else:
            with pyarrow.fs.LocalFileSystem().open_output_stream("/dev/full") as stream:
                stream.write(content)
    assert is_full(caught.value)
    # As safetensors tells it, which would put a file in place of /dev/full by renaming.
    assert is_full(SafetensorError("I/O error: No space left on device (os error 28)"))


def test_other_errors_are_not_taken_for_a_full_disk(tmp_path):
    with pytest.raises(OSError, match="No such file") as caught:
        (tmp_path / "none" / "file").write_bytes(b"")
    assert not is_full(caught.value)
    assert not is_full(ValueError("No space left"))


def test_a_folder_is_copied_with_all_that_is_in_it(tmp_path):
    source = tmp_path / "model"
    (source / "1_Pooling").mkdir(parents=True)
    (source / "1_Pooling" / "config.json").write_text("{}")
    (source / "weights").write_bytes(b"123")
    write_atomic(tmp_path / "to" / "copy" / "weights", b"old")
    upload_folder(source, tmp_path / "to" / "copy")
    assert read_bytes(tmp_path / "to" / "copy" / "weights") == b"123"
    assert read_bytes(tmp_path / "to" / "copy" / "1_Pooling" / "config.json") == b"{}"
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot copy"):
        upload_folder(source, tmp_path / "file" / "copy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match="no files to copy"):
        upload_folder(tmp_path / "empty", tmp_path / "to")


_WRITES_SLOWLY = """
import sys
from pathlib import Path
from rayembed.assets.atomic import write_beside

class Slow:
    parts = [b"", b"second", b"first"]

    def read(self, size):
        if len(self.parts) == 2:
            print("writing", flush=True)
            sys.stdin.readline()
        return self.parts.pop()

write_beside(Path(sys.argv[1]), Slow())
"""


def test_what_a_killed_writer_left_goes_and_what_a_live_one_writes_stays(tmp_path):
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", _WRITES_SLOWLY, str(tmp_path / name)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("killed.npy", "live.npy")
    ]
    for writer in writers:
        assert writer.stdout.readline() == "writing\n"
    killed, live = writers
    killed.kill()
    killed.wait()
    others = [tmp_path / ".notes.tmp", tmp_path / ".x.abcdefgh.tmp.old"]
    for other in others:
        other.touch()
    left = {path.name.split(".")[1] for path in tmp_path.glob(".*.npy.*.tmp")}
    assert left == {"killed", "live"}
    age(tmp_path)
    write_atomic(tmp_path / "new", b"x")
    left = {path.name.split(".")[1] for path in tmp_path.glob(".*.npy.*.tmp")}
    assert left == {"live"}
    assert all(other.exists() for other in others)
    live.communicate("\n", timeout=30)
    assert live.returncode == 0
    assert (tmp_path / "live.npy").read_bytes() == b"firstsecond"
    assert list(tmp_path.glob(".*.npy.*.tmp")) == []


def age(folder):
    """Nothing in the folder was written to for longer than a writer takes."""
    for path in folder.iterdir():
        os.utime(path, (0, path.stat().st_mtime - 2 * atomic.STALE_SECONDS))


def test_a_file_whose_lock_is_not_seen_stays_while_it_is_young(tmp_path, monkeypatch):
    """As on file systems that show a lock to its own machine only."""
    monkeypatch.setattr(atomic.fcntl, "flock", lambda handle, kind: None)
    target = tmp_path / "file"

    class Content(io.BytesIO):
        def read(self, *size):
            atomic.remove_unfinished.__wrapped__(tmp_path, 1)
            return super().read(*size)

    atomic.write_beside(target, Content(b"content"))
    assert target.read_bytes() == b"content"
    left = tmp_path / ".other.abcdefgh.tmp"
    left.touch()
    atomic.remove_unfinished.__wrapped__(tmp_path, 1)
    assert left.exists()
    age(tmp_path)
    atomic.remove_unfinished.__wrapped__(tmp_path, 1)
    assert not left.exists()


def test_a_writer_whose_file_was_taken_for_a_dead_ones_begins_again(tmp_path, monkeypatch):
    """Between its beginning and its lock another process looks."""
    flock, looked = atomic.fcntl.flock, []

    def late(handle, kind):
        if not looked:
            looked.append(True)
            age(tmp_path)
            atomic.remove_unfinished.__wrapped__(tmp_path, 0)
        flock(handle, kind)

    monkeypatch.setattr(atomic.fcntl, "flock", late)
    write_atomic(tmp_path / "file", b"content")
    assert looked
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"content"
