"""The data jobs from their command lines to finished folders, with a tiny teacher."""

from pathlib import Path

import pytest
from pairs_job import BATCH, arguments, write_inputs
from tiny_job import run_here

from rayembed.data.engine.artifacts import open_artifact
from rayembed.data.engine.parts import read_records
from rayembed.pipeline.data.jobs import data_job
from rayembed.recipes.catalogue import recipe_names
from rayembed.recipes.data_recipes import data_recipe_names

pytestmark = pytest.mark.job


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("data"))


@pytest.mark.ray
def test_a_job_does_its_steps_and_a_second_run_does_no_work(folder: Path) -> None:
    done = run_here("cluster_pairs", *arguments(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    folders = {p.parent.parent.name: p.parent for p in folder.glob("out/data/*/*/manifest.json")}
    assert sorted(folders) == ["clustered", "mined", "records"]
    prepared = {kind: open_artifact(str(path)) for kind, path in folders.items()}
    assert prepared["records"].manifest["rejected"] == {"no positive": 1}
    assert prepared["records"].manifest["dropped"] == {"duplicate": 1}
    rows = {kind: found.manifest["rows_out"] for kind, found in prepared.items()}
    assert rows["records"] == rows["mined"] == 100
    assert rows["clustered"] == 100 // BATCH * BATCH
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
    assert again.stdout.count("was there") == 2
    assert "nothing to do" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.glob("out/data/**/*")} == before


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
