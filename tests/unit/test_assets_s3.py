"""Storage and assets over S3's protocol, on a server of this process."""

import errno
import gc
import io
import json
import os
import signal
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.fs
import pytest
from s3_server import BUCKET, s3_server
from safetensors.torch import save
from unreliable_s3 import unreliable_s3

from rayembed.assets import clients
from rayembed.assets.arrow_files import read_sealed
from rayembed.assets.json_files import read_json
from rayembed.assets.resolver import resolve
from rayembed.assets.storage import (
    check_writable,
    exists,
    join,
    list_files,
    move_file,
    open_storage,
    open_storage_for_ray,
    read_bytes,
    remove_file,
    remove_folder,
    store_file,
    upload_folder,
    write_atomic,
)
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.held_out import HeldOutIds
from rayembed.data.engine import shuffle
from rayembed.data.held_out.choice import listed_values
from rayembed.data.sources.earlier import RecordsSource
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import read_rows
from rayembed.errors import (
    ArtifactError,
    AssetError,
    DataError,
    PlacementError,
    StorageError,
    StorageFullError,
)
from rayembed.training.checkpoints.checkpoint import checkpoint_on_disk
from rayembed.training.checkpoints.weights import read_header


@pytest.fixture(scope="module")
def environment():
    with s3_server() as environment:
        yield environment


@pytest.fixture
def place(environment, monkeypatch, request):
    """A prefix of the bucket for each test."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{request.node.name}"


def test_files(place):
    check_writable(place)
    assert list_files(place, recursive=True) == [], "the probe is gone"
    target = join(place, "a", "file")
    assert not exists(target)
    write_atomic(target, b"one")
    write_atomic(target, b"two")
    assert exists(target)
    assert exists(join(place, "a"))
    assert not exists(join(place, "a", "fil")), "a key's beginning is no folder"
    assert read_bytes(target) == b"two"
    with pytest.raises(ArtifactError, match="a/none"):
        read_bytes(join(place, "a", "none"))
    remove_file(target)
    assert not exists(target)


def test_a_file_is_moved_whole(place, monkeypatch):
    monkeypatch.setattr("rayembed.assets.storage._COPIED_AT_ONCE", 7)
    write_atomic(join(place, "from", "file"), b"more than seven bytes")
    move_file(join(place, "from", "file"), join(place, "to", "other"))
    assert list_files(place, recursive=True) == ["to/other"]
    assert read_bytes(join(place, "to", "other")) == b"more than seven bytes"
    with pytest.raises(ArtifactError, match="cannot move"):
        move_file(join(place, "from", "file"), join(place, "to", "other"))


class Cut(io.BytesIO):
    """Gives its content, then what a signal or a source raises in place of its end."""

    def __init__(self, content: bytes, end: BaseException | int) -> None:
        super().__init__(content)
        self._end = end

    def read(self, size=-1):
        piece = super().read(size)
        if piece:
            return piece
        if isinstance(self._end, int):
            signal.raise_signal(self._end)
            raise AssertionError("the signal raises KeyboardInterrupt")
        raise self._end


CUTS = {
    "interrupt": (1_000, signal.SIGINT, KeyboardInterrupt),
    "interrupt of a long upload": (25_000_000, signal.SIGINT, KeyboardInterrupt),
    "exit by a handler": (1_000, SystemExit(1), SystemExit),
    "source fails": (6_000_000, OSError("the source is away"), StorageError),
}


@pytest.fixture
def python_hears_sigint():
    """As in a terminal: shells start what runs in the background with SIGINT ignored."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("former", [None, b"whole"], ids=["new", "overwritten"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("where", ["s3", "disk"])
def test_a_write_that_is_cut_off_leaves_what_was_there(
    environment, python_hears_sigint, place, tmp_path, monkeypatch, where, cut, former
):
    size, end, kind = CUTS[cut]
    folder = join(place, cut.replace(" ", "-")) if where == "s3" else str(tmp_path / "folder")
    target = join(folder, "weights.safetensors")
    if former:
        write_atomic(target, former)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *_: Cut(bytes(size), end))
        with pytest.raises(kind):
            store_file(tmp_path / "source", target)
    # Whatever was left of the stream is gone by now.
    gc.collect()
    assert list_files(folder, recursive=True) == (["weights.safetensors"] if former else [])
    if former:
        assert read_bytes(target) == former
    write_atomic(target, b"the control")
    assert read_bytes(target) == b"the control"


@pytest.mark.parametrize("end", [KeyboardInterrupt(), OSError("the source is away")])
def test_a_move_that_is_cut_off_leaves_the_source_alone(place, monkeypatch, end):
    source, target = join(place, "from"), join(place, "to")
    write_atomic(source, bytes(6_000_000))
    filesystem, inside = open_storage(source)
    cut = SimpleNamespace(
        open_input_stream=lambda _: Cut(bytes(3_000_000), end),
        open_output_stream=filesystem.open_output_stream,
        delete_file=filesystem.delete_file,
    )
    with monkeypatch.context() as patch:
        patch.setattr(
            "rayembed.assets.storage.open_storage",
            lambda path: (cut, inside if path == source else inside.replace("from", "to")),
        )
        with pytest.raises((KeyboardInterrupt, StorageError)):
            move_file(source, target)
    assert list_files(place, recursive=True) == ["from"]
    move_file(source, target)
    assert list_files(place, recursive=True) == ["to"]


def test_a_folder_of_which_a_file_cannot_be_read_leaves_no_part_of_it(place, tmp_path, monkeypatch):
    for name in ("a", "weights"):
        (tmp_path / name).write_bytes(b"whole")
    real = Path.open

    def opened(path, *mode):
        return Cut(bytes(1000), OSError("away")) if path.name == "weights" else real(path, *mode)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", opened)
        with pytest.raises(StorageError, match="cannot copy"):
            upload_folder(tmp_path, place)
    assert list_files(place, recursive=True) == ["a"]
    upload_folder(tmp_path, place)
    assert read_bytes(join(place, "weights")) == b"whole"


@pytest.fixture
def silent_server(monkeypatch):
    """Storage that takes connections and never answers, with little patience for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        monkeypatch.setattr(clients, "PATIENCE", clients.Patience(1, 1, tries=1))
        yield


def fetched(folder: str) -> dict[str, bytes]:
    """The files of a checkpoint in storage, as they come to this machine."""
    with checkpoint_on_disk(folder) as place:
        return {p.relative_to(place).as_posix(): p.read_bytes() for p in place.rglob("*.*")}


CALLS = {
    "read": read_bytes,
    "checkpoint": fetched,
    "write": lambda path: write_atomic(path, b"content"),
    "rows": lambda path: read_sealed(path, remedy=""),
    "list": lambda path: list_files(path, recursive=True),
    "look": exists,
    "remove": remove_file,
    "json": lambda path: read_json(path, ""),
    # No mistake of the user's, as a missing one is.
    "earlier records": lambda path: RecordsSource(path=path).held_out_folder(),
    "ids": lambda path: listed_values(HeldOutIds(column="id", file=path), ""),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_never_answers_is_a_storage_error_in_time(silent_server, call):
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"does not answer: asked 1 times, 1 s each"):
        CALLS[call](f"s3://{BUCKET}/file")
    assert time.monotonic() - began < 20  # 1 to 3 where nothing else runs; pyarrow's own take 100


def test_a_checkpoint_comes_whole_or_not_at_all(place, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    files = {f"state-0000{n}.safetensors": bytes([n]) * 3_000_000 for n in range(3)}
    files["position.json"] = b"{}"
    for name, content in files.items():
        write_atomic(join(place, "step-4", name), content)
    write_atomic(join(place, "step-40", "position.json"), b"of another")
    assert fetched(join(place, "step-4")) == files
    with pytest.raises(ArtifactError, match=f"cannot copy '{place}/step-5' to ") as caught:
        fetched(join(place, "step-5"))
    assert not isinstance(caught.value, StorageError), "no later try helps"
    plain = pyarrow.fs.copy_files
    failing = [OSError("Failed to flush response stream"), OSError("reset by the storage")]

    def copy_files(*arguments, **named):
        if failing:
            raise failing.pop(0)
        plain(*arguments, **named)

    monkeypatch.setattr(pyarrow.fs, "copy_files", copy_files)
    with pytest.raises(StorageError, match="reset by the storage"):  # the first is asked again
        fetched(join(place, "step-4"))
    assert fetched(join(place, "step-4")) == files
    failing.append(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.raises(StorageFullError, match=rf"'{tmp_path}/checkpoint-.*or set TMPDIR"):
        fetched(join(place, "step-4"))
    assert list(tmp_path.iterdir()) == []


def test_small_reads_of_a_busy_server_are_asked_again(monkeypatch):
    """Whose errors are longer than the few bytes that are read, and so are none to the client."""
    monkeypatch.setattr(clients, "PATIENCE", clients.Patience(tries=8))
    monkeypatch.setattr(clients, "_FIRST_PAUSE", 0.001)
    table = pa.table({"value": [1, 2]})
    reads = {
        "bytes": lambda path: read_bytes(f"{path}/bytes"),
        "segment": lambda path: shuffle.read_bucket([f"{path}/segment"], 1)[0].to_pydict(),
        "header": lambda path: read_header(f"{path}/header"),
    }
    with unreliable_s3(failing=0.0, hanging=0.0) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place = f"s3://{BUCKET}/busy"
        write_atomic(f"{place}/bytes", b"few")
        shuffle.write_buckets(f"{place}/segment", table, np.array([0, 1]), 2)
        write_atomic(f"{place}/header", save({}, {"made_of": "x"}))
        expected = {name: read(place) for name, read in reads.items()}
        server.failing = 0.2
        for _ in range(5):
            assert {name: read(place) for name, read in reads.items()} == expected
        monkeypatch.setattr(clients, "_MISTAKEN", "none of them is")
        for read in reads.values():
            with pytest.raises(StorageError, match="Failed to flush"):
                [read(place) for _ in range(30)]


def test_a_bucket_has_one_client_a_process_and_environment(place, monkeypatch):
    first = open_storage(join(place, "a"))[0]
    assert open_storage(join(place, "b", "c"))[0] is first
    assert open_storage("s3://other/a")[0] is not first
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        assert open_storage(place)[0] is not first, "a forked child has its own"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another")
    assert open_storage(place)[0] is not first


def test_a_client_is_replaced_after_a_number_of_uses(place, monkeypatch):
    clients._client.cache_clear()
    monkeypatch.setattr(clients, "_MOST_USES", 3)
    used = [open_storage(place)[0] for _ in range(7)]
    assert [one is other for one, other in pairwise(used)] == [True, True, False, True, True, False]
    assert used[0] == used[3] == used[6], "of the same settings"


@pytest.mark.slow("a client has a hundred tries, and pauses before each")
def test_a_server_that_is_always_busy_is_asked_again_however_long(monkeypatch):
    with unreliable_s3(failing=0.0, hanging=0.0) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        place, failed = f"s3://{BUCKET}/busy", 0
        write_atomic(place, b"few")
        server.failing = 0.3
        for _ in range(400):
            try:
                assert exists(place)
            except StorageError:
                failed += 1
    assert failed < 15, "three are to be expected of four tries each"


def test_threads_that_begin_together_share_a_client(place):
    clients._client.cache_clear()
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: open_storage(join(place, str(n)))[0], range(64)))
    assert all(one is found[0] for one in found)


NAMES = ("a b", "a%20b", "100%", "day=2024-01-01 00%3A00", "what?", "who?.jsonl", "a+b&c#d", "*")
"""Names of objects that an address or a pattern might take for more."""


@pytest.mark.parametrize("options", ["", "?region=us-east-1"])
def test_a_key_is_the_one_that_is_named(place, options):
    place = f"{place}{len(options)}{options}"
    for name in NAMES:
        write_atomic(join(place, name, name), name.encode())
    assert list_files(place, recursive=True) == sorted(f"{name}/{name}" for name in NAMES)
    for name in NAMES:
        assert read_bytes(join(place, name, name)) == name.encode()
        assert list_files(join(place, name), recursive=True) == [name]
        filesystem, inside = open_storage_for_ray(join(place, name, name))
        with filesystem.open_input_stream(inside) as stream:
            assert stream.read() == name.encode()
        assert (resolve(join(place, name)) / name).read_bytes() == name.encode()
        remove_file(join(place, name, name))
        assert not exists(join(place, name, name))


def test_rows_below_a_prefix_are_those_of_the_listed_keys(place):
    for name in NAMES:
        row = json.dumps({"query": name, "positive": "p"})
        write_atomic(join(place, name, "part-0.jsonl"), row.encode())
    for path in (place, f"{place}?region=us-east-1", f"{place}/*/part-*.jsonl"):
        rows = [row for piece in list_pieces(path) for row in read_rows(piece)]
        assert sorted(row.values["query"] for row in rows) == sorted(NAMES)
    for name in NAMES:
        (piece,) = list_pieces(join(place, name, "part-0.jsonl"))
        assert [row.values["query"] for row in read_rows(piece)] == [name]


def test_rows_that_change_in_object_storage_are_told(place):
    write_atomic(join(place, "a.jsonl"), b'{"query": "q"}\n')
    (piece,) = list_pieces(join(place, "a.jsonl"))
    assert len(list(read_rows(piece))) == 1
    write_atomic(join(place, "a.jsonl"), b'{"query": "q"}\n{"query": "r"}\n')
    with pytest.raises(DataError, match=r"'a\.jsonl' changed after this job listed it"):
        list(read_rows(piece))


def test_endpoint_and_region_in_the_address(place, environment, monkeypatch):
    address = environment["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    query = f"?scheme=http&endpoint_override={address}&region=us-east-1"
    target = join(place + query, "deep", "file")
    write_atomic(target, b"one")
    assert read_bytes(target) == b"one"
    assert list_files(place + query, recursive=True) == ["deep/file"]


def test_what_cannot_be_written_is_told_before_it_is_used(place):
    with pytest.raises(PlacementError, match=r"'s3://no-such-bucket/runs' cannot be written"):
        check_writable("s3://no-such-bucket/runs")


def test_listing_and_removing_a_folder(place):
    for name in ("top", "sub/one", "sub/deep/two"):
        write_atomic(join(place, name), b"")
    assert list_files(place, recursive=False) == ["top"]
    assert list_files(place, recursive=True) == ["sub/deep/two", "sub/one", "top"]
    assert list_files(join(place, "none"), recursive=True) == []
    remove_folder(join(place, "sub"))
    remove_folder(join(place, "sub"))
    assert list_files(place, recursive=True) == ["top"]


def test_a_replaced_model_is_fetched_again_and_an_unchanged_one_is_not(place, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "weights").write_bytes(b"x" * 6_000_000)  # more than one part
    upload_folder(model, place)
    cache = tmp_path / "cache"
    first = resolve(place, cache=cache)
    assert (first / "weights").read_bytes() == b"x" * 6_000_000
    assert resolve(place, cache=cache) == first
    filesystem, inside = open_storage(place)
    before = filesystem.get_file_info(f"{inside}/weights").mtime_ns
    while filesystem.get_file_info(f"{inside}/weights").mtime_ns == before:
        # Of the same sizes: only the time tells, and S3 gives it in seconds.
        (model / "weights").write_bytes(b"y" * 6_000_000)
        upload_folder(model, place)
    second = resolve(place, cache=cache)
    assert second != first
    assert (second / "weights").read_bytes()[:1] == b"y"
    with pytest.raises(AssetError, match="no file at"):
        resolve(join(place, "none"), cache=cache)


def test_another_machine_goes_on_with_the_small_files_of_a_run(place, tmp_path):
    here = StoredFolder(place, tmp_path / "here")
    here.fetch()
    (here.local / "metrics.jsonl").write_text("1\n")
    (here.local / ".metrics.jsonl.tmp").write_text("half")
    (here.local / "models").mkdir()
    (here.local / "models" / "large").write_text("is another's to copy")
    here.keep()
    write_atomic(join(place, "stage", "weights"), b"")
    assert list_files(place, recursive=True) == ["metrics.jsonl", "stage/weights"]

    there = StoredFolder(place, tmp_path / "there")
    there.local.mkdir()
    (there.local / "scores.md").write_text("of a run that was removed")
    there.fetch()
    assert seen(there.local) == {"metrics.jsonl": "1\n"}
    with (there.local / "metrics.jsonl").open("a") as file:
        file.write("2\n")
    there.keep()
    here.fetch()
    assert (here.local / "metrics.jsonl").read_text() == "1\n2\n"


def seen(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.name[0] != "."}


def lost(folder):
    return [seen(found) for found in folder.parent.glob(f"{folder.name}.lost-*")]


@pytest.fixture
def unkept(place, tmp_path, monkeypatch):
    """A folder with files that its machine could not copy to storage."""
    folder = StoredFolder(place, tmp_path / "run")
    folder.fetch()
    (folder.local / "metrics.jsonl").write_text("1\n")
    (folder.local / "outbox.taken").write_text("1")
    folder.keep()
    (folder.local / "metrics.jsonl").write_text("1\n2\n")
    (folder.local / "outbox.taken").write_text("2")
    (folder.local / "scores.md").write_text("new")
    with monkeypatch.context() as patch:
        patch.setattr(folder, "place", "s3://no-such-bucket/run")
        with pytest.raises(ArtifactError, match="on this machine"):
            folder.keep()
    return folder.local


def test_what_could_not_be_kept_goes_to_storage_with_the_next_submission(place, unkept):
    again = StoredFolder(place, unkept)
    again.fetch()
    ours = {"metrics.jsonl": "1\n2\n", "outbox.taken": "2", "scores.md": "new"}
    assert seen(unkept) == ours
    again.keep()
    assert {name: read_bytes(join(place, name)).decode() for name in ours} == ours
    assert lost(unkept) == []


def test_the_first_files_of_a_run_survive_when_none_could_be_kept(place, tmp_path):
    folder = StoredFolder(place, tmp_path / "run")
    folder.fetch()
    (folder.local / "run.yaml").write_text("name: run")
    StoredFolder(place, tmp_path / "run").fetch()
    assert seen(folder.local) == {"run.yaml": "name: run"}


def test_a_log_that_another_machine_went_on_with_is_taken(place, unkept):
    write_atomic(join(place, "metrics.jsonl"), b"1\n2\n3\n")
    StoredFolder(place, unkept).fetch()
    assert seen(unkept)["metrics.jsonl"] == "1\n2\n3\n"
    assert seen(unkept)["scores.md"] == "new"
    write_atomic(join(place, "metrics.jsonl"), b"1\n")
    StoredFolder(place, unkept).fetch()
    assert seen(unkept)["metrics.jsonl"] == "1\n"  # what is safely in storage is not ahead of it
    assert lost(unkept) == []


def test_files_that_changed_on_both_sides_are_put_aside_together(place, unkept, caplog):
    ours = seen(unkept)
    write_atomic(join(place, "metrics.jsonl"), b"1\nof another\n")
    StoredFolder(place, unkept).fetch()
    assert seen(unkept) == {"metrics.jsonl": "1\nof another\n", "outbox.taken": "1"}
    assert lost(unkept) == [ours]
    assert f"{unkept}.lost-" in caplog.text


def test_a_run_that_was_removed_from_storage_does_not_come_back(place, unkept):
    ours = seen(unkept)
    for name in list_files(place, recursive=True):
        remove_file(join(place, name))
    StoredFolder(place, unkept).fetch()
    assert seen(unkept) == {}
    assert lost(unkept) == [ours]


def test_only_changed_files_are_written(place, tmp_path):
    folder = StoredFolder(place, tmp_path / "run", recursive=True)
    folder.fetch()
    (folder.local / "results").mkdir()
    (folder.local / "results" / "task.json").write_text(json.dumps({"score": 1}))
    folder.keep()
    remove_file(join(place, "results", "task.json"))
    folder.keep()
    assert list_files(place, recursive=True) == []
    (folder.local / "results" / "task.json").write_text(json.dumps({"score": 2}))
    folder.keep()
    assert json.loads(read_bytes(join(place, "results", "task.json"))) == {"score": 2}


def test_storage_that_goes_away_is_an_error_that_says_where_the_file_is(
    place, tmp_path, monkeypatch
):
    folder = StoredFolder(place, tmp_path / "run")
    folder.fetch()
    (folder.local / "metrics.jsonl").write_text("1\n")
    monkeypatch.setattr(folder, "place", "s3://no-such-bucket/run")
    with pytest.raises(StorageError, match=rf"cannot write .*no-such-bucket.*{folder.local}"):
        folder.keep()


def test_a_folder_on_disk_is_used_where_it_is(tmp_path):
    (tmp_path / "file").write_text("stays")
    folder = StoredFolder(str(tmp_path), tmp_path)
    folder.fetch()
    folder.keep()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
