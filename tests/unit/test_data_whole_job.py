"""A whole data job whose files are garbled, cut, or moved elsewhere in its middle: every file of
every step is refused with its path and what to do, or made again, and nothing else comes out.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from data_job import (
    LOCKS,
    READ_BY_PEOPLE,
    READ_IN_A_FINISHED_JOB,
    READ_IN_A_FRESH_JOB,
    RESULTS,
    prepared,
    without_pages,
    write_inputs,
)
from garbling import check_garbled, garbled

from rayembed.assets.store import Entry
from rayembed.data.engine.work_items import in_process

DAMAGES = ("flip", "cut")
CUT = ("parts", "part indexes", "rows by cluster", "vectors", "mining's examples")


def contents(storage: Path) -> dict[str, Any]:
    """All files by their path in the storage; manifests without the times that they tell."""
    found: dict[str, Any] = {}
    for path in sorted(storage.rglob("*")):
        name = str(path.relative_to(storage))
        if not path.is_file() or "audit.html" in name:  # which shows the manifest
            continue
        content = path.read_bytes()
        assert str(storage).encode() not in content, f"{name} tells where it lay"
        found[name] = content
        if path.name == "manifest.json":
            found[name] = {**json.loads(content), "seconds": 0, "digest": ""}
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list]]:
    """The storage of a finished job with its scratch files, and the records of its batches."""
    storage = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Entry, "_remove_working", lambda self: None)
        yield storage, prepared(root, storage)


def test_all_files_of_the_job_are_of_a_kind_that_is_tried(undisturbed) -> None:
    patterns = [*READ_IN_A_FRESH_JOB.values(), *READ_IN_A_FINISHED_JOB.values()]
    patterns += [READ_BY_PEOPLE, RESULTS, LOCKS]
    names = [str(path) for path in undisturbed[0].rglob("*") if path.is_file()]
    assert [name for name in names if not any(re.search(p, name) for p in patterns)] == []
    unused = [p for p in patterns if not any(re.search(p, name) for name in names)]
    assert unused == []


@pytest.mark.parametrize(
    ("kind", "damage", "job"),
    [
        *((kind, "flip", "fresh") for kind in READ_IN_A_FRESH_JOB),
        *((kind, "cut", "fresh") for kind in CUT),
        *((kind, damage, "finished") for kind in READ_IN_A_FINISHED_JOB for damage in DAMAGES),
    ],
)
def test_no_garbled_file_gives_other_records(
    kind: str, damage: str, job: str, root: Path, undisturbed, tmp_path: Path
) -> None:
    if job == "finished":
        shutil.copytree(undisturbed[0], tmp_path, dirs_exist_ok=True)
    kinds = READ_IN_A_FRESH_JOB if job == "fresh" else READ_IN_A_FINISHED_JOB
    with without_pages():
        check_garbled(kinds[kind], damage, lambda: prepared(root, tmp_path), undisturbed[1])


@pytest.mark.parametrize("damage", DAMAGES)
def test_units_with_garbled_results_are_done_again(
    damage: str, root: Path, undisturbed, tmp_path: Path, monkeypatch
) -> None:
    storage = tmp_path / "out"
    shutil.copytree(undisturbed[0], storage)
    shutil.rmtree(storage / "plans")
    for manifest in storage.rglob("manifest.json"):
        manifest.unlink()
    with garbled(RESULTS, damage) as garbling, monkeypatch.context() as patch:
        patch.setattr(Entry, "_remove_working", lambda self: None)
        assert prepared(root, storage) == undisturbed[1]
    assert len(garbling.seen) > 15
    assert contents(storage) == contents(undisturbed[0])


def test_a_job_whose_storage_is_moved_in_its_middle_ends_equal(
    root: Path, undisturbed, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(Entry, "_remove_working", lambda self: None)
    left = 0

    def stops(task: Any, items: Any, needs: Any = "cpu") -> Iterator[Any]:
        nonlocal left
        for result in in_process(task, items, needs):
            yield result
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    storage, moves = tmp_path / "0", 0
    while True:
        left = 4 + moves // 2  # some units are done again, as those whose scratch went
        try:
            records = prepared(root, storage, stops)
            break
        except KeyboardInterrupt:
            moves += 1
            storage = storage.rename(tmp_path / str(moves))
    assert moves > 4
    assert records == undisturbed[1]
    assert contents(storage) == contents(undisturbed[0])
