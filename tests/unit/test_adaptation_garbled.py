"""Files of an adaptation's sequences, garbled: refused with what to do, or the same."""

from pathlib import Path
from typing import Any

import pytest
from garbled_jobs import OF_A_PLAN, Job, check_all_are_tried, damages, finished_jobs
from garbling import check_garbled
from tiny_adaptation import save_masked, tiny_adaptation, write_corpus

from rayembed.data.engine.artifacts import PipelineContext
from rayembed_extras.adaptation.make import prepare_sequences
from rayembed_extras.adaptation.plan import SequencePlan


def sequences(root: Path, storage: Path) -> list[Any]:
    """Token sequences of all steps of an adaptation."""
    folder = prepare_sequences(tiny_adaptation(root), PipelineContext(str(storage), 5))
    plan = SequencePlan.open(folder)
    steps = [*range(plan.num_steps), *plan.held_out]
    return [
        (ids.tobytes(), code)
        for step in steps
        for ids, code in zip(*plan.read(step, range(12)), strict=True)
    ]


JOBS: dict[str, Job] = {"sequences": sequences}
KINDS = {"sequences": {"sequences": r"sequences/[^/]+/parts/part-\w+\.parquet", **OF_A_PLAN}}
CUT: tuple[str, ...] = ()
ALL = list(KINDS["sequences"].values())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("in")
    write_corpus(folder)
    save_masked(folder / "bert")
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
