"""A disk or quota that is full is told with the path and what helps, whoever writes."""

import errno
import os
import shutil

import pytest
from safetensors import SafetensorError

from rayembed.assets.atomic import room_for
from rayembed.assets.cache import filled
from rayembed.errors import AssetError, StorageFullError

ROOM = r"[\d,]+ bytes are free there"
QUOTA = "the quota is used up"


def system_error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


FULL = {
    "the system": (system_error(errno.ENOSPC), ROOM),
    "a quota": (system_error(errno.EDQUOT), QUOTA),
    "safetensors": (SafetensorError("No space left on device (os error 28)"), ROOM),
    "tokenizers": (Exception("Disk quota exceeded (os error 122)"), QUOTA),
    "pip": (AssetError("cannot fetch: [Errno 28] No space left on device"), ROOM),
}


@pytest.mark.parametrize("who", FULL)
def test_a_full_disk_is_told_with_path_and_room(tmp_path, who):
    error, room = FULL[who]
    path = tmp_path / "not there yet" / "file"
    told = rf"no room to write '{path}'.*{room}\. Make room or ask for more, then give the same"
    with pytest.raises(StorageFullError, match=told) as caught, room_for(path, "or ask for more"):
        raise error
    assert caught.value.__cause__ is error
    with pytest.raises(StorageFullError) as again, room_for(tmp_path / "outer"):
        raise caught.value
    assert again.value is caught.value, "what is written within it is named"


@pytest.mark.parametrize(
    "error", [system_error(errno.EACCES), ValueError("No space left on device"), AssetError("28")]
)
def test_other_errors_pass(tmp_path, error):
    with pytest.raises(type(error)) as caught, room_for(tmp_path / "file"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("who", FULL)
def test_an_entry_of_the_cache_without_room_leaves_nothing(tmp_path, who):
    entry, (error, room) = tmp_path / "kind" / "entry", FULL[who]

    def fill(folder) -> None:
        (folder / "first").write_text("there was room for it")
        raise error

    with pytest.raises(StorageFullError, match=rf"'{entry}'.*{room}.*or set RAYEMBED_CACHE to"):
        filled(entry, fill)
    assert [p.name for p in entry.parent.iterdir() if not p.name.endswith(".lock")] == []
    assert list(filled(entry, lambda folder: None).iterdir()) == []


def test_the_free_bytes_are_those_beside_the_path(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or usage)
    told = pytest.raises(StorageFullError, match=f"{usage.free:,} bytes")
    with told, room_for(tmp_path / "a" / "b"):
        raise system_error(errno.ENOSPC)
    mounted = pytest.raises(StorageFullError, match=f"{usage.free:,} bytes")
    with mounted, room_for(tmp_path):  # it may be a disk of its own
        raise system_error(errno.ENOSPC)
    assert asked == [tmp_path, tmp_path]
