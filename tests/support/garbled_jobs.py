"""What holds for the files of any data job: all are of a kind that is tried, and what changes in a
finished job is made again.
"""

import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from data_job import (
    LOCKS,
    READ_BY_PEOPLE,
    READ_IN_A_FINISHED_JOB,
    READ_IN_A_FRESH_JOB,
    RESULTS,
)
from garbling import damaged, follow

from rayembed.assets.store import Entry
from rayembed.errors import ArtifactError

Job = Callable[[Path, Path], list[Any]]
"""Of the inputs' folder and the storage: what training would read."""

OF_A_PLAN = {
    "places": r"plans/.*/scattered/places/\w+\.arrow",
    "rows of steps": r"plans/.*/scattered/\w+-\d+/1/\d+\.arrow",
}
TRIED_ELSEWHERE = [
    *READ_IN_A_FRESH_JOB.values(),
    *READ_IN_A_FINISHED_JOB.values(),
    *(READ_BY_PEOPLE, RESULTS, LOCKS),
]
"""What is tried in `test_data_whole_job`, and what nobody reads."""


def finished_jobs(
    jobs: dict[str, Job], root: Path, new_folder: Callable[[str], Path]
) -> Callable[[str], tuple[Path, list[Any]]]:
    """Storage of each job, done once with its scratch files kept, and what came of it."""
    done: dict[str, tuple[Path, list[Any]]] = {}

    def finished(name: str) -> tuple[Path, list[Any]]:
        if name not in done:
            storage = new_folder(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Entry, "_remove_working", lambda self: None)
                done[name] = storage, jobs[name](root, storage)
        return done[name]

    return finished


def damages(
    kinds: Mapping[str, Mapping[str, str]], cut: Collection[str]
) -> list[tuple[str, str, str]]:
    """Job, kind of file and damage of each case: all are flipped, those named are cut too."""
    return [
        (name, kind, damage)
        for name, of_job in kinds.items()
        for kind in of_job
        for damage in (("flip", "cut") if kind in cut else ("flip",))
    ]


def check_all_are_tried(storage: Path, patterns: Iterable[str]) -> None:
    """All files of a finished job are of a kind that is tried or read by nobody."""
    known = [*patterns, *TRIED_ELSEWHERE]
    files = [str(path) for path in storage.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [file for file in files if not any(re.search(p, file) for p in known)] == []


def check_made_again(
    job: Job,
    root: Path,
    storage: Path,
    finished: tuple[Path, list[Any]],
    damage: str,
    pattern: str,
    *,
    goes_on: bool,
) -> None:
    """Changed files of a finished job are refused, and following the advice gives the same.

    Args:
        goes_on: whether manifests are gone, so that a job goes on that was nearly done.
    """
    folder, wanted = finished
    shutil.copytree(folder, storage)
    if goes_on:
        shutil.rmtree(storage / "plans", ignore_errors=True)
        for manifest in storage.rglob("manifest.json"):
            manifest.unlink()
    broken = damage_files(storage, pattern, damage)
    refused = 0
    while (error := _refusal(lambda: job(root, storage))) is not None:
        assert any(repr(str(path)) in str(error) for path in broken), error
        follow(error)
        refused += 1
    assert 0 < refused <= len(broken)
    assert job(root, storage) == wanted


def _refusal(job: Callable[[], Any]) -> ArtifactError | None:
    try:
        job()
    except ArtifactError as error:
        return error
    return None


def damage_files(folder: Path, pattern: str, damage: str) -> list[Path]:
    """Damage all files below a folder whose path matches."""
    files = [path for path in sorted(folder.rglob("*")) if re.search(pattern, str(path))]
    assert files
    for path in files:
        path.write_bytes(damaged(path.read_bytes(), damage, path.name))
    return files
