"""Several jobs that make the same folder, folders that are made anew, and what they leave."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from several_jobs import (
    CHECKS,
    Step,
    at,
    before,
    check_a_job_that_loses_its_scratch_to_nobody_fails,
    check_vectors_that_were_removed_are_made_again,
    dataset,
    records_of,
)

from rayembed.assets import store
from rayembed.data.clusters.cluster import make_clustered
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact
from rayembed.data.engine.work_items import (
    EXAMPLES_KEPT,
    Execute,
    in_process,
    run_resumable,
    run_tasks,
)
from rayembed.data.mining.mine import make_mined
from rayembed.data.sources.tasks import HeldOut
from rayembed.errors import ArtifactError, StorageError


def mined(storage: Path, execute: Execute) -> DatasetArtifact:
    config = dataset(mining={"teacher": "t", "num_negatives": 2, "rule": {"kind": "top_k"}})
    return make_mined(at(storage, execute), config, before(storage), HeldOut())


def clustered(storage: Path, execute: Execute) -> DatasetArtifact:
    config = dataset(clusters={"teacher": "t", "batch_pairs": 4, "restarts": 2, "iterations": 5})
    return make_clustered(at(storage, execute), config, before(storage))


STEPS = {
    "cleaned": records_of(
        {"kind": "pairs", "path": "pairs"},
        {"overlap": {"tasks": ["evaluation.txt"]}},
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
    "mined": mined,
    "clustered": clustered,
}


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayembed.data.clusters.cluster.write_plot", lambda path, manifest: None)


def cases() -> Iterator[Any]:
    for name, step in STEPS.items():
        for check in CHECKS:
            # Only the last task of this step has scratch.
            if (name, check) != ("cleaned", check_a_job_that_loses_its_scratch_to_nobody_fails):
                yield pytest.param(step, check, id=f"{name}-{check.__name__}")


@pytest.mark.parametrize(("step", "check"), cases())
def test_what_holds_for_every_step(step: Step, check: Callable[..., None], tmp_path: Path) -> None:
    check(step, tmp_path)


@pytest.mark.parametrize("step", [mined, clustered])
def test_vectors_that_were_removed_are_made_again(step: Step, tmp_path: Path) -> None:
    check_vectors_that_were_removed_are_made_again(step, tmp_path)


def test_the_manifest_of_the_first_stays(tmp_path: Path) -> None:
    made = before(tmp_path)
    manifest = Path(made.folder, "manifest.json")
    text = manifest.read_text()
    assert before(tmp_path) == made
    assert manifest.read_text() == text


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
    with pytest.raises(
        ArtifactError, match=rf"1 of the 3 files .*{made.parts[1].name}'\. Remove the"
    ):
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
    told = f"HTTP 503 at {writer.working_folder}; the next run tries again to remove it"
    assert [record.getMessage() for record in caplog.records].count(told) == 2
    assert scratch.exists()
    assert writer.existing() is not None
    assert not scratch.parent.exists()
