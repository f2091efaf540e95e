"""The data jobs from their command lines to finished folders, with a tiny teacher."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_server import Reply, chat_server, completion
from tiny_job import run_here
from tiny_models import save_encoder

from rayembed.data.engine.artifacts import open_artifact
from rayembed.data.engine.parts import read_records
from rayembed.pipeline.data.jobs import data_job
from rayembed.recipes.catalogue import recipe_names
from rayembed.recipes.data_recipes import data_recipe_names

pytestmark = pytest.mark.job

WORDS = "cats dogs live fox jumps river ancient world Paris capital France bridge"
BATCH = 8


def text(number: int) -> str:
    """A text of its own: the words stand in an order that only this number has."""
    words = WORDS.split()
    return " ".join(words[(number * (place + 3)) % len(words)] for place in range(5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_encoder(folder / "teacher")
    rows = [
        {"query": f"question {i} {text(i)}", "positive": f"answer {i} {text(i)} {text(i + 1)}"}
        for i in range(100)
    ]
    lines = [json.dumps(row) for row in [*rows, rows[5], {"query": "has none"}]]
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return folder


def arguments(folder: Path) -> list[str]:
    pairs = "data.datasets.pairs"
    teacher = folder / "teacher"
    assignments = [
        f"placement.storage_path={folder / 'out'}",
        f"{pairs}.source.path={folder / 'pairs.jsonl'}",
        f"{pairs}.source.max_rejected_share=0.05",
        f"{pairs}.consistency.teacher={teacher}",
        f"{pairs}.consistency.top_k=60",
        f"{pairs}.mining.teacher={teacher}",
        f"{pairs}.mining.num_negatives=2",
        f"{pairs}.mining.rule.kind=top_k",
        f"{pairs}.clusters.teacher={teacher}",
        f"{pairs}.clusters.batch_pairs={BATCH}",
    ]
    return [f"--set={assignment}" for assignment in assignments]


@pytest.mark.ray
def test_a_job_does_its_steps_and_a_second_run_does_no_work(folder: Path) -> None:
    done = run_here("cluster_pairs", *arguments(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    folders = {p.parent.parent.name: p.parent for p in folder.glob("out/data/*/*/manifest.json")}
    assert sorted(folders) == ["clustered", "filtered", "mined", "records"]
    prepared = {kind: open_artifact(str(path)) for kind, path in folders.items()}
    assert prepared["records"].manifest["rejected"] == {"no positive": 1}
    assert prepared["records"].manifest["dropped"] == {"duplicate": 1}
    rows = {kind: found.manifest["rows_out"] for kind, found in prepared.items()}
    assert rows["records"] == 100 >= rows["filtered"] > rows["clustered"] // BATCH * BATCH > 0
    assert rows["mined"] == rows["filtered"]
    records = [r for part in prepared["clustered"].parts for r in read_records(part.path)]
    assert len(records) == rows["clustered"]
    assert {len(record.negatives) for record in records} == {2}
    for path in folders.values():
        assert "<h2>Examples</h2>" in (path / "audit.html").read_text()
        assert str(path) in done.stdout or path.parent.name != "clustered"
    assert "training with the same data set, seed and storage finds it" in done.stdout
    assert "rows/s" in done.stderr
    assert "█" in done.stderr
    before = {path: path.stat().st_mtime_ns for path in folder.glob("out/data/**/*")}
    again = run_here("mine_negatives", *arguments(folder))
    assert again.returncode == 0, again.stderr[-4000:]
    assert again.stdout.count("was there") == 3
    assert "nothing to do" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.glob("out/data/**/*")} == before


def test_labels_are_repaired_by_a_judge(folder: Path, capsys) -> None:
    def first_of_some(body: dict[str, Any], before: int) -> Reply:
        asks_of = re.search(r"question (\d+)", body["messages"][0]["content"])
        assert asks_of is not None
        return completion(json.dumps({"relevant": [1] if int(asks_of[1]) % 10 == 0 else []}))

    with chat_server(reply=first_of_some) as server:
        judge = f"{{kind: endpoint, llm: {{url: '{server.url}', model: m}}}}"
        argv = [
            *(one for one in arguments(folder) if "storage_path" not in one),
            f"--set=placement.storage_path={folder / 'repaired'}",
            "--set=placement.runtime=local",
            f"--set=data.datasets.pairs.repair.judge={judge}",
        ]
        assert data_job("repaired")(argv) == 0
        asked = server.asked.total()
        assert data_job("repaired")(argv) == 0
        assert server.asked.total() == asked
    printed = capsys.readouterr().out
    (manifest,) = folder.glob("repaired/data/repaired/*/manifest.json")
    told = json.loads(manifest.read_text())
    assert told["made_of"].startswith("mined/")
    assert asked == told["rows_in"] == told["judged_rows"]
    assert 5 <= told["relabelled"] <= 10
    assert told["rows_out"] == told["rows_in"] + told["relabelled"]
    assert str(manifest.parent) in printed
    assert (manifest.parent / "audit.html").exists()
    # An endpoint that is away is told before anything is made.
    argv[-2:] = [f"--set=placement.storage_path={folder / 'away'}", "--set=seed=1", *argv[-2:]]
    assert data_job("repaired")(argv) == 2
    assert "nothing answers there" in capsys.readouterr().err
    assert not (folder / "away" / "data").exists()


@pytest.mark.parametrize("name", [*data_recipe_names(), *recipe_names()])
def test_what_a_dry_run_prints_is_the_run(name: str, tmp_path: Path, capsys) -> None:
    assert data_job("records")(["--recipe", name, "--dry-run"]) == 0
    captured = capsys.readouterr()
    file = tmp_path / "run.yaml"
    file.write_text(captured.out)
    asked, _ = data_job("records").resolve(["--recipe", name])
    assert data_job("records").resolve(["--recipe", str(file)])[0] == asked
    assert asked.run.fingerprint in captured.out.splitlines()[0]
    for dataset in asked.run.data.datasets:
        assert f" {dataset.name} " in captured.err


def test_what_is_asked_wrongly_is_told_before_ray_starts(capsys) -> None:
    for argv, message in (
        (["--recipe", "pair"], "no recipe 'pair'; did you mean 'pairs'?"),
        (["--datasets", "pears"], "no data set 'pears'; did you mean 'pairs'?"),
        (["--set", "data.datasets.pairs.minin.teacher=x"], "did you mean 'mining'?"),
        ([], "data.datasets.pairs.mining is null; set it, for instance --set"),
    ):
        assert data_job("mined")(argv) == 2
        assert message in capsys.readouterr().err


def test_the_list_shows_recipes_and_the_catalogue(capsys) -> None:
    assert data_job("records")(["--list"]) == 0
    printed = capsys.readouterr().out
    for name in data_recipe_names():
        assert f" {name} " in printed
