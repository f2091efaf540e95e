"""Data jobs that ask a language model, whose files are garbled or cut: refused with their path
and what to do, which helps, or giving the same.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLLM
from further_data_jobs import TEACHER, dataset, stage, write_inputs
from garbled_jobs import Job, check_all_are_tried, check_made_again, damages, finished_jobs
from garbling import check_garbled

from rayembed.config.settings import parse
from rayembed.data.engine.parts import read_records
from rayembed_extras.synthesis.requests import ChatAnswer, Request
from rayembed_extras.synthesis.settings import SynthesisRun
from rayembed_extras.synthesis.synthesize import make_synthetic

LLM = {"url": "http://127.0.0.1:9", "model": "m"}
WRITTEN = {
    "source": {"kind": "queries", "path": "people", "llm": LLM},
    "mining": TEACHER | {"num_negatives": 2},
}
JUDGED = dataset("brought") | {
    "repair": {"judge": {"kind": "endpoint", "llm": LLM}, "action": "drop"}
}


def knows(request: Request) -> ChatAnswer:
    """A query for a document, and that the first candidate answers a query."""
    made = {"relevant": [1]}
    if "Candidates:" not in request.prompt:
        made = {"queries": [f"who is {request.prompt.split('Person ')[1].split()[0]}?"]}
    return ChatAnswer(request.id, request.group, request.key, "answered", json.dumps(made))


def asked(name: str, settings: dict[str, Any], root: Path, storage: Path) -> list[Any]:
    """Of a run whose language model is in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("questions", "write_queries"):
            answers = f"rayembed_extras.synthesis.{module}.asker"
            patch.setattr(answers, lambda *_: FakeLLM(answer=knows))
        return stage(name, settings, root, storage)


def synthetic(root: Path, storage: Path) -> list[Any]:
    """Records that a language model wrote."""
    settings = {"examples": {"short-long": 12, "short-short": 8}, "tasks_per_request": 4}
    run = {"synthesis": settings, "placement": {"storage_path": str(storage)}, "name": "made"}
    made = make_synthetic(parse(SynthesisRun, run), "fake", FakeLLM(broken_share=0.1))
    return [record for part in made.parts for record in read_records(part.path)]


JOBS: dict[str, Job] = {
    "written": partial(asked, "written", WRITTEN),
    "judged": partial(asked, "judged", JUDGED),
    "synthetic": synthetic,
}
KINDS = {
    "written": {
        "answers": r"answers/\w+/queries-\w+-\d+/\w+\.parquet",
        "written queries": r"synthetic/[^/]+/parts/part-\w+\.parquet",
    },
    "judged": {
        "verdicts": r"answers/\w+/judge-\w+/\w+\.parquet",
        "repaired rows": r"repaired/[^/]+/parts/part-\w+\.parquet",
        "examples of repair": r"repaired/[^/]+/working/\w+\.json",
    },
    "synthetic": {"answers": r"answers/\w+/[\w-]+/\w+\.parquet"},
}
CUT = ("answers",)
READ_LATER = {
    "written": r"answers/\w+/.*\.parquet",
    "synthetic": r"answers/\w+/[\w-]+-tasks-\w+\.json",
}
"""What is read by a job that goes on, where manifests are gone."""

ALL = [
    *(pattern for kinds in KINDS.values() for pattern in kinds.values()),
    *READ_LATER.values(),
    r"/data/(?!answers|synthetic|repaired/[^/]+/(parts|working))\w+/|/plans/",
    r"parts/index-\w+\.arrow",
]
"""What is tried here and in `test_data_further_jobs`."""


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
    made_again(damage, READ_LATER[name], goes_on=True)
