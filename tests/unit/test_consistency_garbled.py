"""A data job that filters, with garbled or cut files: each is refused with its path and what to do,
which helps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from further_data_jobs import TEACHER, dataset, stage, write_inputs
from garbled_jobs import OF_A_PLAN, Job, check_all_are_tried, damages, finished_jobs
from garbling import check_garbled

JOB: Job = partial(stage, "brought", dataset("brought") | {"consistency": TEACHER | {"top_k": 20}})
KINDS = {
    "rows of shards": r"shards/\w+-\d+/\d+/\d+\.arrow",
    "ranks": r"ranks/\d+\.npz",
    "filtered rows": r"filtered/[^/]+/parts/part-\w+\.parquet",
}
CUT = ("rows of shards",)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in")
    write_inputs(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return finished_jobs({"brought": JOB}, root, tmp_path_factory.mktemp)


def test_all_files_of_the_job_are_of_a_kind_that_is_tried(undisturbed) -> None:
    further = r"working/found/|teacher_vectors/|\.further-document-|\.given\."
    check_all_are_tried(undisturbed("brought")[0], [*KINDS.values(), *OF_A_PLAN.values(), further])


@pytest.mark.parametrize(("name", "kind", "damage"), damages({"brought": KINDS}, CUT))
def test_no_garbled_file_gives_anything_else(
    name: str, kind: str, damage: str, root: Path, undisturbed, tmp_path: Path
) -> None:
    wanted = undisturbed(name)[1]
    assert check_garbled(KINDS[kind], damage, lambda: JOB(root, tmp_path), wanted)
