"""Several jobs that make the same folder, folders that are made anew, and what they leave."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dies_once import innermost

from rayembed.assets import store
from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.clusters.cluster import make_clustered
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.parts import write_part
from rayembed.data.engine.work_items import (
    EXAMPLES_KEPT,
    Execute,
    in_process,
    run_resumable,
    run_tasks,
)
from rayembed.data.filtering.consistency import make_filtered
from rayembed.data.hashes import text_hash
from rayembed.data.mining.mine import make_mined
from rayembed.data.records import Record
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.errors import ArtifactError, StorageError

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


def filtered(storage: Path, execute: Execute) -> DatasetArtifact:
    config = dataset(consistency={"teacher": "t", "top_k": 4, "shard_rows": 15})
    return make_filtered(at(storage, execute), config, before(storage))


def mined(storage: Path, execute: Execute) -> DatasetArtifact:
    config = dataset(mining={"teacher": "t", "num_negatives": 2, "rule": {"kind": "top_k"}})
    return make_mined(at(storage, execute), config, before(storage), HeldOut())


def clustered(storage: Path, execute: Execute) -> DatasetArtifact:
    config = dataset(clusters={"teacher": "t", "batch_pairs": 4, "restarts": 2, "iterations": 5})
    return make_clustered(at(storage, execute), config, before(storage))


STEPS = {
    "cleaned": records_of(
        {"kind": "pairs", "path": "pairs"},
        {
            "near_duplicates": {"threshold": 0.8, "ngram": 1, "of": "positive"},
            "overlap": {"tasks": ["evaluation.txt"]},
        },
    ),
    "nli": records_of({"kind": "nli", "path": "nli"}, {}),
    "beir": records_of(
        {
            "kind": "beir",
            "path": "judged.tsv",
            "corpus": "corpus.jsonl",
            "queries": "queries.jsonl",
        },
        {},
    ),
    "classes": records_of({"kind": "classes", "path": "classes", "label": "label"}, {}),
    "filtered": filtered,
    "mined": mined,
    "clustered": clustered,
}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayembed.data.clusters.cluster.write_plot", lambda path, manifest: None)


steps = pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)


def content(made: DatasetArtifact) -> tuple[dict[str, Any], list[str]]:
    assert not Path(made.folder, "working").exists()
    assert all(Path(part.path).exists() for part in made.parts)
    return {**made.manifest, "seconds": 0}, [part.digest for part in made.parts]


@steps
def test_two_jobs_on_one_folder_both_end_well(step: Step, tmp_path: Path) -> None:
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


@steps
def test_a_job_that_loses_its_scratch_to_nobody_fails(step: Step, tmp_path: Path) -> None:
    """Teeth of the test above: scratch that goes while no manifest is there is an error."""

    def robs(task, units, needs):
        yield from in_process(task, units, needs)
        for folder in (tmp_path / "out").rglob("working"):
            shutil.rmtree(folder)

    with pytest.raises(ArtifactError):
        step(tmp_path, robs)
    # What is left of the try does no harm: results of scratch went with it.
    assert content(step(tmp_path, in_process)) == content(step(tmp_path / "new", in_process))


@steps
def test_a_step_is_done_again_when_its_manifest_was_removed(step: Step, tmp_path: Path) -> None:
    first = step(tmp_path, in_process)
    wanted = content(first)
    Path(first.folder, "manifest.json").unlink()
    again = step(tmp_path, in_process)
    assert not again.reused
    assert content(again) == wanted


@steps
def test_what_a_killed_job_left_goes_with_the_next_run(step: Step, tmp_path: Path) -> None:
    first = step(tmp_path, in_process)
    Path(first.folder, "working").mkdir()
    Path(first.folder, "working", "left").write_text("killed between manifest and removal")
    again = step(tmp_path, in_process)
    assert again.reused
    assert content(again) == content(first)


def test_the_manifest_of_the_first_stays(tmp_path: Path) -> None:
    made = before(tmp_path)
    manifest = Path(made.folder, "manifest.json")
    text = manifest.read_text()
    assert before(tmp_path) == made
    assert manifest.read_text() == text


@pytest.mark.parametrize("step", [filtered, mined, clustered])
def test_vectors_that_were_removed_are_made_again(step: Step, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("content", ['{"parts": [["part', "[]", '{"kind": "x"}'])
def test_a_broken_manifest_names_itself_and_what_to_remove(content: str, tmp_path: Path) -> None:
    folder = Path(before(tmp_path).folder)
    (folder / "manifest.json").write_text(content)
    with pytest.raises(
        ArtifactError, match=rf"manifest\.json' is broken: .*Remove .*{folder.name}"
    ):
        before(tmp_path)


@dataclass(frozen=True)
class Number:
    key: str


def test_a_broken_result_of_a_unit_counts_as_missing(tmp_path: Path) -> None:
    done: list[str] = []

    def task(unit: Number) -> dict[str, Any]:
        done.append(unit.key)
        return {"rows_in": 1, "rows_out": 1, "rejected": {}, "of": unit.key}

    units = [Number(key) for key in "abcd"]
    whole = run_resumable(str(tmp_path), "count", task, units, in_process)
    for key, content in (("b", '{"rows_in": 1, '), ("c", "7")):
        (tmp_path / f"units/count.{key}.json").write_text(content)
    assert run_resumable(str(tmp_path), "count", task, units, in_process) == whole
    assert done == [*"abcd", *"bc"]
    assert run_resumable(str(tmp_path), "count", task, units, in_process) == whole
    assert done == [*"abcd", *"bc"]


def test_of_examples_of_all_units_a_few_stay_in_memory(tmp_path: Path) -> None:
    done: list[str] = []

    def task(unit: Number) -> dict[str, Any]:
        done.append(unit.key)
        shown = [
            {"reason": reason, "row": f"{unit.key} {number}"}
            for number in range(3)
            for reason in ("bad", "worse")
        ]
        counts = {"rows_in": 6, "rows_out": 0, "rejected": {"bad": 3, "worse": 3}}
        return {**counts, "examples": shown} if unit.key != "4" else {**counts, "parts": []}

    def kept(results: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        return [example for result in results for example in result.get("examples", [])]

    units = [Number(str(number)) for number in range(60)]
    every = kept([task(unit) for unit in units])
    whole = run_tasks("show", task, units, in_process)
    assert len(kept(whole)) == 2 * EXAMPLES_KEPT
    assert kept(whole)[:EXAMPLES_KEPT] == every[:EXAMPLES_KEPT]
    assert whole[4] == task(units[4])
    # Some results are there, of units in the middle; others come anew.
    run_resumable(str(tmp_path), "show", task, units[3:30], in_process)
    done.clear()
    resumed = run_resumable(str(tmp_path), "show", task, units, in_process)
    assert len(done) == 33
    assert len(kept(resumed)) <= 4 * EXAMPLES_KEPT
    assert kept(resumed)[:EXAMPLES_KEPT] == every[:EXAMPLES_KEPT]
    told = [
        ArtifactWriter(str(tmp_path / name), "records", "d", {}).finish(results, [])
        for name, results in (("whole", whole), ("resumed", resumed))
    ]
    assert told[0].manifest["examples"] == told[1].manifest["examples"] == every[:EXAMPLES_KEPT]
    assert (
        told[0].manifest["rejected"] == told[1].manifest["rejected"] == {"bad": 180, "worse": 180}
    )


def test_a_folder_whose_parts_are_gone_is_not_finished(tmp_path: Path) -> None:
    made = before(tmp_path)
    (Path(made.folder) / "manifest.json").unlink()
    Path(made.parts[1].path).unlink()
    writer = ArtifactWriter(str(tmp_path / "out"), "records", "d", {})
    named = [[part.name, part.rows] for part in made.parts]
    with pytest.raises(ArtifactError, match=rf"1 of 3 files .*{made.parts[1].name}'\. Remove the"):
        writer.finish([{"rows_in": 30, "rows_out": 30, "rejected": {}}], named)
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("fails", ["exists", "remove_folder"])
def test_scratch_that_cannot_be_removed_ends_no_finished_step(
    fails: str, tmp_path: Path, monkeypatch, caplog
) -> None:
    """The next run removes it; a storage that does not take the manifest is the control."""
    writer = ArtifactWriter(str(tmp_path / "out"), "records", "d", {})
    scratch = Path(writer.working_folder, "file")
    scratch.parent.mkdir(parents=True)
    scratch.touch()
    works: Callable[[str], Any] = getattr(store, fails)

    def refuse(path: str) -> Any:
        if path != writer.working_folder:
            return works(path)
        raise StorageError(f"HTTP 503 at {path}")

    def refuse_manifest(path: str, values: Any, **how: Any) -> None:
        raise StorageError("HTTP 503")

    with monkeypatch.context() as patch:
        patch.setattr(store, fails, refuse)
        patch.setattr(store, "write_json", refuse_manifest)
        with pytest.raises(StorageError):
            writer.get_or_make(lambda: writer.finish([], []))
    with monkeypatch.context() as patch:
        patch.setattr(store, fails, refuse)
        assert not writer.get_or_make(lambda: writer.finish([], [])).reused
        assert writer.get_or_make(lambda: pytest.fail("it is finished")).reused
    told = f"HTTP 503 at {writer.working_folder}; the next run tries again"
    assert [record.getMessage() for record in caplog.records].count(told) == 2
    assert scratch.exists()
    assert writer.existing() is not None
    assert not scratch.parent.exists()
