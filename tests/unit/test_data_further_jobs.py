"""Data jobs beside that of `test_data_whole_job`, over files of the other kinds: garbled or cut,
each is refused with its path and what to do, which helps, or gives the same.
"""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

import pytest
from further_data_jobs import DATASETS, dataset, stage, write_inputs
from garbled_jobs import (
    OF_A_PLAN,
    Job,
    check_all_are_tried,
    check_made_again,
    damage_files,
    damages,
    finished_jobs,
)
from garbling import check_garbled, follow, garbled

from rayembed.assets import array_files
from rayembed.data.mining import corpus
from rayembed.errors import ArtifactError

JOBS: dict[str, Job] = {name: partial(stage, name, dataset(name)) for name in DATASETS}

KINDS = {
    "searched": {
        "indexes of shards": r"mined/[^/]+/working/index/\w+-\d+\.npy",
        "groups of clusters": r"centroids-\d+\.groups\.npz",
    },
    "brought": {
        "vectors of given negatives": r"\.given\.npy",
        "given negatives": r"\.given\.texts\.npy",
        "index of what is embedded": r"teacher_vectors/[^/]+/working/\w+\.\w+\.npy",
        "further texts": r"\.further-document-\w+\.texts\.npy",
        **OF_A_PLAN,
    },
    "pairs": {
        "found in shards": r"mined/[^/]+/working/found/[\w-]+\.npz",
    },
    "inferred": {"scattered premises": r"working/scattered/\w+\.arrow"},
    "graded": {"held-out graded pairs": r"held_out/[^/]+/graded\.jsonl"},
}
CUT = ("indexes of shards", "found in shards", "given negatives")
READ_LATER = {
    "searched": r"clustered/.*\.(npy|npz)",
    "brought": r"vectors/\w+/\w+\.(queries|documents|further-document-\w+)\.npy|"
    r"first-\w+/(query|document)\.\w+\.npy",
    "graded": r"held_out/[^/]+/graded\.jsonl",
}
"""What is read of a finished job: by the next one, or by those who train, in files that are mapped;
where manifests are gone, by a job that goes on."""

ALL = [*(p for kinds in KINDS.values() for p in kinds.values()), *READ_LATER.values()]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished_jobs(JOBS, root, tmp_path_factory.mktemp)


@pytest.mark.parametrize("name", JOBS)
def test_all_files_of_the_jobs_are_of_a_kind_that_is_tried(name: str, undisturbed) -> None:
    check_all_are_tried(undisturbed(name)[0], ALL)


@pytest.mark.parametrize(
    ("name", "kind", "damage"),
    damages(KINDS, CUT),
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
    made_again = partial(check_made_again, JOBS[name], root, tmp_path / "out", undisturbed(name))
    made_again(damage, READ_LATER[name], goes_on=name == "searched")


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_what_miners_map_of_a_large_corpus_is_made_again(
    damage: str, root: Path, undisturbed, tmp_path: Path, monkeypatch
) -> None:
    """It lies in this machine's cache, which jobs of the same storage share."""
    wanted = undisturbed("searched")[1]
    monkeypatch.setenv("RAYEMBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus, "_MAPPED_DOCUMENTS", 1)
    storage = tmp_path / "out"

    def again() -> list[Any]:
        corpus.open_corpus.cache_clear()
        shutil.rmtree(storage / "data/mined", ignore_errors=True)
        return JOBS["searched"](root, storage)

    assert again() == wanted
    broken = damage_files(tmp_path / "cache", r"mining/corpus-[^/]+/files/\w+\.npy", damage)
    assert len(broken) == 10
    if damage == "flip":  # what is shorter is no whole entry, and filled again at once
        with pytest.raises(
            ArtifactError, match=r"mining/corpus.*is broken.*Remove the file"
        ) as caught:
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
