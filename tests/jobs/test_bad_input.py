"""What a user can get wrong: told plainly, once, before a name is taken or a worker starts.

All jobs run in this process, as `jobs/train_nvembed.py` runs them.
"""

import json
import os
import zipfile

import pytest
from tiny_job import write_inputs

from rayembed.pipeline.run.training_job import training_job

pytestmark = pytest.mark.job

NAME = "bad"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    write_inputs(folder)
    return folder


@pytest.fixture
def refused(folder, capfd):
    """A function that runs a job and checks all but the message, which it gives back."""

    def run(*assignments: str, code: int) -> str:
        arguments = [f"--set={assignment}" for assignment in assignments]
        place = "--set=placement.runtime=auto"
        argv = ["--recipe", f"{folder}/run.yaml", "--name", NAME, place, *arguments]
        assert training_job("nvembed-quickstart")(argv) == code
        printed = capfd.readouterr()
        assert "Traceback" not in printed.err + printed.out
        assert printed.err.count("error: ") == 1, printed.err
        assert not (folder / "outputs" / "runs" / NAME).exists()
        return printed.err.partition("error: ")[2]

    return run


def pairs(folder, rows, **columns):
    """The assignment that makes the rows the source of `sentences`."""
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    (folder / "pairs.jsonl").write_text(text)
    source = {"kind": "pairs", "path": f"{folder}/pairs.jsonl", **columns}
    return f"data.datasets.sentences.source={json.dumps(source)}"


GOOD = [{"query": f"query {i}", "positive": f"positive {i}"} for i in range(40)]


@pytest.mark.parametrize(
    ("assignments", "code", "message"),
    [
        (["model.poolin.kind=mean"], 2, "no setting 'model.poolin'; did you mean 'pooling'?"),
        (["model.backbone.path=/nowhere/model"], 2, "no file or folder '/nowhere/model'"),
        (["model.lora.target_modules=[q_prj]"], 2, "'q_prj'"),
        (["placement.storage_path=/proc/nothing"], 1, "/proc/nothing"),
        (["placement.tracking_uri=http://127.0.0.1:9"], 2, "http://127.0.0.1:9"),
        (["placement.cpus_per_worker=5000"], 2, "no node is large enough for one worker"),
        (["stages.retrieval.batch.global_pairs=512"], 2, "512"),
        (["evaluation.baselines=[bm25, /nowhere]"], 2, "evaluation.baselines.1 cannot be used"),
        (
            ["data.datasets.topics.mining={teacher: /nowhere}"],
            2,
            "data.datasets.topics.mining.teacher cannot be used",
        ),
        (
            ["data.datasets.sentences.query_instruction=" + "find the rest of it " * 40],
            2,
            "data.datasets.sentences.query_instruction: ",
        ),
    ],
    ids=["misspelt", "asset", "adapters", "storage", "mlflow", "node", "rows",
         "baseline", "teacher", "instruction"],
)  # fmt: skip
def test_settings(refused, assignments, code, message):
    assert message in refused(*assignments, code=code)


@pytest.mark.ray
def test_workers_that_do_not_fit(cluster, refused):
    pairs = "stages.retrieval.batch.global_pairs=64", "stages.blend.batch.global_pairs=64"
    told = refused("placement.workers=64", *pairs, code=1)
    assert "placement.workers=64 need 1 CPU each: only 4 fit" in told


@pytest.mark.parametrize(
    ("rows", "columns", "code", "messages"),
    [
        ([], {}, 2, ["data set 'sentences' is empty", "no rows at all"]),
        ([{"query": "a", "positive": ""}] * 3, {}, 2, ["3 rows, none usable", "no positive"]),
        ([*GOOD, {"query": "a"}], {}, 2, ["1 of 41 rows", "no positive: {'query': 'a'}"]),
        (
            [*GOOD, {"query": "\u200b\u0301", "positive": "b"}],
            {},
            2,
            ["1 of 41 rows", "query has no visible character: {'query': '"],
        ),
        ([*GOOD, "{not json"], {}, 2, ["1 of 41 rows", "not JSON"]),
        (GOOD, {"query": "queries"}, 2, ["no such column; did you mean 'query'?"]),
        (GOOD[:5], {}, 2, ["5 records in all", "fewer than one global batch"]),
        (
            [{**row, "task": "find the rest of it " * 40} for row in GOOD],
            {"instruction": "task"},
            2,
            ["column 'task' of the data set 'sentences'", "query_max_length"],
        ),
    ],
    ids=["empty", "none usable", "no positive", "invisible", "not JSON", "column", "few",
         "instruction"],
)  # fmt: skip
def test_rows(refused, folder, rows, columns, code, messages):
    told = refused(pairs(folder, rows, **columns), code=code)
    for message in messages:
        assert message in told


def test_a_package_with_another_hash(refused, folder, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "made_up-1.0-py3-none-any.whl", "w") as archive:
        info = "made_up-1.0.dist-info"
        archive.writestr("made_up/model/config.json", "{}")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: made_up\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_CONFIG_FILE": os.devnull,
        "RAYEMBED_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    reference = f"pypi://made-up==1.0/made_up/model?sha256={'0' * 64}"
    told = refused(f"model.backbone.path={reference}", code=1)
    assert f"SHA-256 should be {'0' * 64}, but is " in told


def test_relative_storage_of_a_submitted_job(refused, monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.chdir(tmp_path)
    told = refused("placement.storage_path=outputs", code=1)
    assert "placement.storage_path='outputs' is relative" in told
    assert not list(tmp_path.iterdir())
