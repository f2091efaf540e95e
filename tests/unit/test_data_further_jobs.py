"""Data jobs beside that of `test_data_whole_job`, over files of the other kinds: garbled or cut,
each is refused with its path and what to do, which helps, or gives the same.
"""

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

import pytest
from data_job import (
    LOCKS,
    READ_BY_OTHER_SOFTWARE,
    READ_BY_PEOPLE,
    READ_IN_A_FINISHED_JOB,
    READ_IN_A_FRESH_JOB,
    RESULTS,
)
from further_data_jobs import DATASETS, sequences, stage, synthetic, write_inputs
from garbling import check_garbled, damaged, follow, garbled

from rayembed.assets import array_files
from rayembed.assets.store import Entry
from rayembed.data.mining import corpus
from rayembed.errors import ArtifactError

Job = Callable[[Path, Path], list[Any]]

JOBS: dict[str, Job] = {name: partial(stage, name) for name in DATASETS}
JOBS |= {"synthetic": synthetic, "sequences": sequences}

_OF_A_PLAN = {
    "places": r"plans/.*/scattered/places/\w+\.arrow",
    "rows of steps": r"plans/.*/scattered/\w+-\d+/1/\d+\.arrow",
}
KINDS = {
    "written": {
        "answers": r"answers/\w+/queries-\w+-\d+/\w+\.parquet",
        "written queries": r"synthetic/[^/]+/parts/part-\w+\.parquet",
        "indexes of shards": r"mined/[^/]+/working/index/\w+-\d+\.npy",
        "groups of clusters": r"centroids-\d+\.groups\.npz",
    },
    "brought": {
        "verdicts": r"answers/\w+/judge-\w+/\w+\.parquet",
        "repaired rows": r"repaired/[^/]+/parts/part-\w+\.parquet",
        "examples of repair": r"repaired/[^/]+/working/\w+\.json",
        "vectors of given negatives": r"\.given\.npy",
        "given negatives": r"\.given\.texts\.npy",
        "index of what is embedded": r"teacher_vectors/[^/]+/working/\w+\.\w+\.npy",
        "further texts": r"\.further-document-\w+\.texts\.npy",
        **_OF_A_PLAN,
    },
    "pairs": {
        "held-out groups": r"chosen/groups-\w+\.npz",
        "texts of groups": r"chosen/texts-\w+\.npz",
        "rows in levels, first": r"near-duplicates/\w+-6/1/",
        "rows in levels, middle": r"near-duplicates/\w+-6/2/",
        "rows in levels, last": r"near-duplicates/\w+-6/3/",
        "found in shards": r"mined/[^/]+/working/found/[\w-]+\.npz",
    },
    "inferred": {"scattered premises": r"working/scattered/\w+\.arrow"},
    "graded": {"held-out graded pairs": r"held_out/[^/]+/graded\.jsonl"},
    "synthetic": {"answers": r"answers/\w+/[\w-]+/\w+\.parquet"},
    "sequences": {"sequences": r"sequences/[^/]+/parts/part-\w+\.parquet", **_OF_A_PLAN},
}
CUT = ("answers", "indexes of shards", "found in shards", "rows in levels, last", "given negatives")
READ_LATER = {
    "written": r"answers/\w+/.*\.parquet|clustered/.*\.(npy|npz)",
    "brought": r"vectors/\w+/\w+\.(queries|documents|further-document-\w+)\.npy|"
    r"first-\w+/(query|document)\.\w+\.npy",
    "graded": r"held_out/[^/]+/graded\.jsonl",
    "synthetic": r"answers/\w+/[\w-]+-tasks-\w+\.json",
}
"""What is read of a finished job: by the next one, or by those who train, in files that are mapped;
where manifests are gone, by a job that goes on."""

ALL = [
    *(pattern for kinds in KINDS.values() for pattern in kinds.values()),
    *READ_LATER.values(),
    *READ_IN_A_FRESH_JOB.values(),
    *READ_IN_A_FINISHED_JOB.values(),
    *(READ_BY_OTHER_SOFTWARE, READ_BY_PEOPLE, RESULTS, LOCKS),
]
"""What is tried here and in `test_data_whole_job`, and what nobody reads."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Storage of each finished job with its scratch files, and what came of it."""
    done: dict[str, tuple[Path, list[Any]]] = {}

    def finished(name: str) -> tuple[Path, list[Any]]:
        if name not in done:
            storage = tmp_path_factory.mktemp(name)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Entry, "_remove_working", lambda self: None)
                done[name] = storage, JOBS[name](root, storage)
        return done[name]

    return finished


@pytest.mark.parametrize("name", JOBS)
def test_all_files_of_the_jobs_are_of_a_kind_that_is_tried(name: str, undisturbed) -> None:
    files = [str(path) for path in undisturbed(name)[0].rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [file for file in files if not any(re.search(p, file) for p in ALL)] == []


@pytest.mark.parametrize(
    ("name", "kind", "damage"),
    [
        (name, kind, damage)
        for name, kinds in KINDS.items()
        for kind in kinds
        for damage in (("flip", "cut") if kind in CUT else ("flip",))
    ],
)
def test_no_garbled_file_gives_anything_else(
    name: str, kind: str, damage: str, root: Path, undisturbed, tmp_path: Path
) -> None:
    wanted = undisturbed(name)[1]
    job = JOBS[name]
    assert check_garbled(KINDS[name][kind], damage, lambda: job(root, tmp_path), wanted)


@pytest.mark.parametrize("name", READ_LATER)
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_what_changes_in_a_finished_job_is_made_again(
    name: str, damage: str, root: Path, undisturbed, tmp_path: Path
) -> None:
    finished, wanted = undisturbed(name)
    storage = tmp_path / "out"
    shutil.copytree(finished, storage)
    if name in ("written", "synthetic"):
        shutil.rmtree(storage / "plans", ignore_errors=True)
        for manifest in storage.rglob("manifest.json"):
            manifest.unlink()
    broken = _damage(storage, READ_LATER[name], damage)
    refused = 0
    while (error := _refusal(lambda: JOBS[name](root, storage))) is not None:
        assert any(repr(str(path)) in str(error) for path in broken), error
        follow(error)
        refused += 1
    assert 0 < refused <= len(broken)
    assert JOBS[name](root, storage) == wanted


def _refusal(job: Callable[[], Any]) -> ArtifactError | None:
    try:
        job()
    except ArtifactError as error:
        return error
    return None


def _damage(folder: Path, pattern: str, damage: str) -> list[Path]:
    """Damage all files below a folder whose path matches."""
    files = [path for path in sorted(folder.rglob("*")) if re.search(pattern, str(path))]
    assert files
    for path in files:
        path.write_bytes(damaged(path.read_bytes(), damage, path.name))
    return files


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_what_miners_map_of_a_large_corpus_is_made_again(
    damage: str, root: Path, undisturbed, tmp_path: Path, monkeypatch
) -> None:
    """It lies in this machine's cache, which jobs of the same storage share."""
    wanted = undisturbed("written")[1]
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "_MAPPED_DOCUMENTS", 1)
    storage = tmp_path / "out"

    def again() -> list[Any]:
        corpus.open_corpus.cache_clear()
        shutil.rmtree(storage / "data/mined", ignore_errors=True)
        return JOBS["written"](root, storage)

    assert again() == wanted
    broken = _damage(tmp_path / "cache", r"mining/corpus-[^/]+/files/\w+\.npy", damage)
    assert len(broken) == 10
    if damage == "flip":  # what is shorter is no whole entry, and filled again at once
        with pytest.raises(ArtifactError, match=r"mining/corpus.*is broken.*Remove it") as caught:
            again()
        follow(caught.value)
    assert again() == wanted


def test_without_checks_flipped_bits_give_something_else(
    root: Path, undisturbed, tmp_path: Path, monkeypatch
) -> None:
    """The control: what the tests above do not find is there to be found."""
    monkeypatch.setattr(array_files, "check_seal", lambda content, seal: None)
    wanted, others = undisturbed("brought")[1], 0
    for seed in range(8):
        pattern = KINDS["brought"]["vectors of given negatives"]
        with garbled(pattern, "flip", str(seed)), suppress(ArtifactError, TokenError):
            others += JOBS["brought"](root, tmp_path / str(seed)) != wanted
        if others:
            break
    assert others
