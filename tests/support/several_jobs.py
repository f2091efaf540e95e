"""What holds for every data step: several jobs make the same folder, folders are made anew."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dies_once import innermost

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import write_part
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.hashes import text_hash
from rayembed.data.records import Record
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.errors import ArtifactError

Step = Callable[[Path, Execute], DatasetArtifact]


def load(config: Any, weights: str, device: str):
    def encode(texts: Sequence[str], role: str) -> np.ndarray:
        seeds = [text_hash(text.split()[-1]) + 2**63 for text in texts]
        made = np.array([np.random.default_rng(seed).standard_normal(4) for seed in seeds])
        return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)

    return encode


def at(storage: Path, execute: Execute) -> PipelineContext:
    teacher_loader = TeacherLoader(load, lambda reference: "weights")
    return PipelineContext(str(storage / "out"), 0, execute, teacher_loader, str(storage))


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


def records_of(source: dict[str, Any], cleaning: dict[str, Any]) -> Step:
    """The step that converts the rows of `write_sources`."""
    values = {"name": "d", "source": source, "cleaning": cleaning}

    def make(storage: Path, execute: Execute) -> DatasetArtifact:
        if not (storage / "pairs").exists():
            write_sources(storage)
        checked = check_source(parse(DatasetConfig, values), str(storage))
        return make_records(at(storage, execute), checked, HeldOut())

    return make


def write_sources(folder: Path) -> None:
    for name in ("pairs", "nli", "classes"):
        (folder / name).mkdir(parents=True)
    for half in range(2):
        numbers = range(half, 20, 2)
        pairs = [{"query": f"what is {i}", "positive": f"it is thing {i % 9}"} for i in numbers]
        write(folder / "pairs" / f"{half}.jsonl", pairs)
        claims = [
            {"premise": f"p {i % 5}", "hypothesis": f"h {i}", "label": i // 5 % 3} for i in numbers
        ]
        write(folder / "nli" / f"{half}.jsonl", claims)
        classes = [{"text": f"text {i}", "label": f"class {i % 3}"} for i in numbers]
        write(folder / "classes" / f"{half}.jsonl", classes)
    write(folder / "corpus.jsonl", [{"_id": f"d{i}", "text": f"document {i}"} for i in range(9)])
    write(folder / "queries.jsonl", [{"_id": f"q{i}", "text": f"query {i}"} for i in range(9)])
    judged = "".join(f"q{i}\td{8 - i}\t1\n" for i in range(9))
    (folder / "judged.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    (folder / "evaluation.txt").write_text("what is 3\nwhat is 4\n")


def before(storage: Path) -> DatasetArtifact:
    """Records as an earlier step leaves them."""
    rows = [Record(str(i), f"query {i % 7}", (f"document {i % 9}",), "d") for i in range(30)]
    writer = ArtifactWriter(str(storage / "out"), "records", "d", {})
    parts = [write_part(writer.parts_folder, rows[i : i + 12]) for i in range(0, 30, 12)]
    named = [[part.path.rsplit("/", 1)[-1], part.rows] for part in parts]
    return writer.finish([{"rows_in": 30, "rows_out": 30, "rejected": {}}], named)


def dataset(**settings: Any) -> DatasetConfig:
    source = {"kind": "pairs", "path": "none.jsonl"}
    return parse(DatasetConfig, {"name": "d", "source": source, **settings})


def content(made: DatasetArtifact) -> tuple[dict[str, Any], list[str]]:
    assert not Path(made.folder, "working").exists()
    assert all(Path(part.path).exists() for part in made.parts)
    return {**made.manifest, "seconds": 0}, [part.digest for part in made.parts]


def check_two_jobs_on_one_folder_both_end_well(step: Step, tmp_path: Path) -> None:
    """Wherever one is, the other makes the whole folder before it goes on."""
    done = 0

    def before_unit(number: int, other: Callable[[], None]) -> Execute:
        def execute(task, units, needs):
            nonlocal done
            for unit in units:
                if done == number:
                    other()
                done += 1
                yield task(unit)

        return execute

    wanted = content(step(tmp_path / "alone", before_unit(-1, lambda: None)))
    made: list[DatasetArtifact] = []
    for number in range(done):
        done = 0
        made.clear()
        storage = tmp_path / str(number)
        other = partial(lambda storage: made.append(step(storage, in_process)), storage)
        made.append(step(storage, before_unit(number, other)))
        assert [content(one) for one in made] == [wanted, wanted]


def check_a_job_that_loses_its_scratch_to_nobody_fails(step: Step, tmp_path: Path) -> None:
    """Teeth of the test above: scratch that goes while no manifest is there is an error."""

    def robs(task, units, needs):
        yield from in_process(task, units, needs)
        for folder in (tmp_path / "out").rglob("working"):
            shutil.rmtree(folder)

    with pytest.raises(ArtifactError):
        step(tmp_path, robs)
    # What is left of the try does no harm: results of scratch went with it.
    assert content(step(tmp_path, in_process)) == content(step(tmp_path / "new", in_process))


def check_a_step_is_done_again_when_its_manifest_was_removed(step: Step, tmp_path: Path) -> None:
    first = step(tmp_path, in_process)
    wanted = content(first)
    Path(first.folder, "manifest.json").unlink()
    again = step(tmp_path, in_process)
    assert not again.reused
    assert content(again) == wanted


def check_what_a_killed_job_left_goes_with_the_next_run(step: Step, tmp_path: Path) -> None:
    first = step(tmp_path, in_process)
    Path(first.folder, "working").mkdir()
    Path(first.folder, "working", "left").write_text("killed between manifest and removal")
    again = step(tmp_path, in_process)
    assert again.reused
    assert content(again) == content(first)


def check_vectors_that_were_removed_are_made_again(step: Step, tmp_path: Path) -> None:
    def stops(task, units, needs):
        if type(innermost(task)).__name__ != "EmbedPart":
            raise KeyboardInterrupt
        yield from in_process(task, units, needs)

    with pytest.raises(KeyboardInterrupt):
        step(tmp_path, stops)
    shutil.rmtree(tmp_path / "out" / "data" / "vectors")
    found = step(tmp_path, in_process)
    assert content(found) == content(step(tmp_path / "new", in_process))
    # Of one part too, for another step of the same teacher.
    index = min((tmp_path / "out" / "data" / "vectors").rglob("*.index.npz"))
    index.unlink()
    Path(found.folder, "manifest.json").unlink()
    shutil.rmtree(Path(found.folder, "units"), ignore_errors=True)
    assert content(step(tmp_path, in_process)) == content(found)
    assert index.exists()


CHECKS = (
    check_two_jobs_on_one_folder_both_end_well,
    check_a_job_that_loses_its_scratch_to_nobody_fails,
    check_a_step_is_done_again_when_its_manifest_was_removed,
    check_what_a_killed_job_left_goes_with_the_next_run,
)
