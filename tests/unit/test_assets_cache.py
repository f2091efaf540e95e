import multiprocessing
import os
import time
from pathlib import Path

import pytest
from filelock import FileLock
from garbling import damaged

from rayembed.assets.cache import cache_folder, filled, is_complete, mark_used, remove_unused
from rayembed.errors import AssetError


def _fill(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "b.txt").write_text("hello")


def _never(folder: Path) -> None:
    raise AssertionError("filled a second time")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_an_entry_is_filled_once(tmp_path):
    entry = tmp_path / "kind" / "entry"
    assert not is_complete(entry)
    files = filled(entry, _fill)
    assert (files / "a" / "b.txt").read_text() == "hello"
    assert filled(entry, _never) == files
    assert _names(tmp_path / "kind") == ["entry"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "bad manifest"])
def test_an_incomplete_entry_is_made_again(tmp_path, damage):
    entry = tmp_path / "entry"
    file = filled(entry, _fill) / "a" / "b.txt"
    match damage:
        case "truncated":
            file.write_text("hell")
        case "missing":
            file.unlink()
        case "no manifest":
            (entry / "manifest.json").unlink()
        case "bad manifest":
            (entry / "manifest.json").write_text("{")
    assert not is_complete(entry)
    filled(entry, _fill)
    assert file.read_text() == "hello"
    assert is_complete(entry)


@pytest.mark.parametrize("name", ["files/a/b.txt", "manifest.json"])
def test_a_flipped_bit_of_a_checked_entry_is_never_used(tmp_path, name):
    entry = tmp_path / "entry"
    file = filled(entry, _fill, checked=True) / "a" / "b.txt"
    filled(entry, _never, checked=True)
    whole = (entry / name).read_bytes()
    for place in range(40):
        (entry / name).write_bytes(damaged(whole, "flip", f"{name} {place}"))
        assert not is_complete(entry, checked=True)
        filled(entry, _fill, checked=True)
        assert file.read_text() == "hello"
        assert is_complete(entry, checked=True)
    file.write_text("hallo")
    assert not is_complete(entry, checked=True)
    # The control: where sizes alone are compared, it is used.
    filled(tmp_path / "other", _fill)
    (tmp_path / "other" / "files" / "a" / "b.txt").write_text("hallo")
    assert is_complete(tmp_path / "other")


@pytest.mark.parametrize("error", [KeyboardInterrupt, AssetError, RuntimeError])
def test_an_interrupted_fill_leaves_nothing(tmp_path, error):
    def fails(folder: Path) -> None:
        _fill(folder)
        raise error("now")

    with pytest.raises(error):
        filled(tmp_path / "entry", fails)
    assert _names(tmp_path) == []
    filled(tmp_path / "entry", _fill)
    assert _names(tmp_path) == ["entry"]


def test_the_rest_of_a_killed_process_is_removed(tmp_path):
    abandoned = tmp_path / ".entry.partial-abc"
    (abandoned / "files").mkdir(parents=True)
    of_another = tmp_path / ".other.partial-abc"
    of_another.mkdir()
    filled(tmp_path / "entry", _fill)
    assert not abandoned.exists()
    assert of_another.exists()


def _slow_fill(folder: Path) -> None:
    (folder / "x").write_text("1")
    with (folder.parents[1] / "calls").open("a") as calls:
        calls.write("call\n")
    time.sleep(0.5)
    (folder / "y").write_text("2")


def _fill_in_a_process(entry: Path) -> None:
    files = filled(entry, _slow_fill)
    assert (files / "y").read_text() == "2"


def test_two_processes_at_once_fill_once(tmp_path):
    context = multiprocessing.get_context("fork")
    entry = tmp_path / "entry"
    processes = [context.Process(target=_fill_in_a_process, args=(entry,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "calls").read_text() == "call\n"


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(AssetError, match="RAYEMBED_CACHE"):
        filled(tmp_path / "file" / "kind" / "entry", _fill)


def test_only_what_nobody_used_for_long_is_removed(tmp_path):
    def write(folder):
        (folder / "a").write_text("a")

    old, used, own, busy = (tmp_path / name for name in ("old", "used", "own", "busy"))
    for entry in (old, used, own, busy):
        filled(entry, write)
        os.utime(entry / "manifest.json", (1, 1))
    mark_used(used)
    with FileLock(str(tmp_path / ".busy.lock")):
        remove_unused(tmp_path, 60, keep=own)
    assert [entry.exists() for entry in (old, used, own, busy)] == [False, True, True, True]
    assert not list(tmp_path.glob(".*partial*"))


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    assert cache_folder(tmp_path / "other") == tmp_path / "other"
    monkeypatch.delenv("RAYEMBED_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "rayembed"
