"""Storage that is full or has lost a part: the job tells, and going on loses nothing."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from networks import SkippedError
from scene import CHECKPOINT_EVERY, FAULT_AT, Scene, UnexpectedError

from rayembed.training.checkpoints.checkpoint import find_damage
from rayembed.training.checkpoints.checkpoint_list import checkpoint_name, listed_checkpoints

DISK = "64m"


def disk_full_at_checkpoint(scene: Scene) -> tuple[str, str]:
    """A small disk that has room for half a checkpoint; later somebody makes room."""
    with small_disk(scene.storage):
        job = scene.submit()
        scene.wait_for(lambda: listed_checkpoints(str(scene.checkpoints)), job, "a checkpoint")
        first = scene.checkpoints / checkpoint_name(CHECKPOINT_EVERY)
        size = sum(path.stat().st_size for path in first.iterdir())
        filler = scene.storage / "of somebody else"
        fill(filler, leave=size // 2)
        job.ends_with(1)
        told = job.line("^error: ")
        if "does not fit" not in told:
            raise UnexpectedError(f"it is not told what was too large: {told}")
        if (count := job.text().count("Traceback")) != 0:
            raise UnexpectedError(f"{count} tracebacks:\n{job.text()[-3000:]}")
        filler.unlink()
        scene.submit().ends_with(0)
        # What is compared outlives the disk.
        shutil.copytree(scene.storage, scene.folder / "kept")
    shutil.copytree(scene.folder / "kept", scene.storage, dirs_exist_ok=True)
    return told, "makes room, submits again"


def newest_checkpoint_cut_off(scene: Scene) -> tuple[str, str]:
    """The driver is killed, and the newest checkpoint has lost the end of a file."""
    job = scene.submit()
    scene.wait_for_step(FAULT_AT, job)
    scene.kill_driver(job)
    newest = scene.checkpoints / listed_checkpoints(str(scene.checkpoints))[-1]
    state = newest / "state-00000.safetensors"
    os.truncate(state, state.stat().st_size // 2)
    if find_damage(str(newest)) is None:
        raise UnexpectedError("a checkpoint that was cut off passes for whole")
    again = scene.submit()
    again.ends_with(0)
    return again.line("is incomplete and is removed"), "submits again"


def list_of_checkpoints_cut_off(scene: Scene) -> tuple[str, str]:
    """The driver is killed, and Ray Train's list of checkpoints ends in the middle."""
    job = scene.submit()
    scene.wait_for_step(FAULT_AT, job)
    scene.kill_driver(job)
    (listed,) = scene.checkpoints.glob("*.json")
    os.truncate(listed, listed.stat().st_size // 2)
    try:
        json.loads(listed.read_text())
    except ValueError:
        pass
    else:
        raise UnexpectedError("the list is whole")
    again = scene.submit()
    again.ends_with(0)
    return again.line("is rebuilt from"), "submits again"


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    """A disk of its own at the folder, in memory."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        raise SkippedError(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(path: Path, *, leave: int) -> None:
    """Take all room of a disk but so many bytes."""
    with path.open("wb", buffering=0) as file:
        room = os.statvfs(path.parent)
        free = room.f_bavail * room.f_frsize
        os.posix_fallocate(file.fileno(), 0, max(1, free - leave))
