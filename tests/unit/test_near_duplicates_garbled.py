"""A data job that removes near-duplicates, whose files are garbled or cut: each is refused with its
path and what to do, which helps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from further_data_jobs import dataset, stage, write_inputs
from garbled_jobs import OF_A_PLAN, Job, check_all_are_tried, damages, finished_jobs
from garbling import check_garbled

NEAR = {"of": "positive", "threshold": 0.9, "permutations": 16}
JOB: Job = partial(stage, "pairs", dataset("pairs") | {"cleaning": {"near_duplicates": NEAR}})
KINDS = {
    "rows in levels, first": r"near-duplicates/\w+-6/1/",
    "rows in levels, middle": r"near-duplicates/\w+-6/2/",
    "rows in levels, last": r"near-duplicates/\w+-6/3/",
    "other rows": r"near-duplicates/\w+-[1-5]/\d+/\d+\.arrow",
    "compared pairs": r"\.compared\.npy",
    "candidate pairs": r"\.pairs\.npy",
    "similar pairs": r"\.similar\.parquet",
}
CUT = ("rows in levels, last", "other rows")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished_jobs({"pairs": JOB}, root, tmp_path_factory.mktemp)


def test_all_files_of_the_job_are_of_a_kind_that_is_tried(undisturbed) -> None:
    further = r"working/found/|teacher_vectors/|\.further-document-"
    check_all_are_tried(undisturbed("pairs")[0], [*KINDS.values(), *OF_A_PLAN.values(), further])


@pytest.mark.parametrize(("name", "kind", "damage"), damages({"pairs": KINDS}, CUT))
def test_no_garbled_file_gives_anything_else(
    name: str, kind: str, damage: str, root: Path, undisturbed, tmp_path: Path
) -> None:
    wanted = undisturbed(name)[1]
    assert check_garbled(KINDS[kind], damage, lambda: JOB(root, tmp_path), wanted)
