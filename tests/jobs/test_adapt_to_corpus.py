"""Documents without a label through the job: queries, filter, mining, distillation, scores."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
import pytest
from chat_server import Reply, chat_server, completion
from tiny_job import ROOT
from tiny_models import save_encoder

from rayembed.pipeline.run.training_job import training_job

pytestmark = pytest.mark.job

WORDS = "cats dogs live fox jumps river ancient world Paris capital France bridge"


def write_corpus(path: Path, number: int = 200) -> None:
    known = WORDS.split()
    rows = []
    for i in range(number):
        words = [known[(i * (place + 3)) % len(known)] for place in range(6)]
        text = f"Number {i} has {' '.join(words)} in it. It is not {' '.join(words[::-1])} {i}."
        rows.append({"title": f"{words[0]} {i}", "text": text})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arguments(folder: Path, name: str) -> list[str]:
    """Of the job: a tiny start model that is its own teacher, and few steps."""
    if not (folder / "encoder").exists():
        save_encoder(folder / "encoder")
        write_corpus(folder / "corpus.jsonl")
    settings = {
        "data.datasets.corpus.source.path": folder / "corpus.jsonl",
        "data.datasets.corpus.consistency.teacher": folder / "encoder",
        "data.datasets.corpus.consistency.top_k": 60,
        "data.datasets.corpus.mining.teacher": folder / "encoder",
        "data.datasets.corpus.mining.candidates": 60,
        "model.backbone.path": folder / "encoder",
        "model.backbone.dtype": "float32",
        "model.query_max_length": 32,
        "model.document_max_length": 32,
        "stages.adapt.batch.global_pairs": 8,
        "stages.adapt.optimizer.learning_rate": 0.01,
        "stages.adapt.steps": 4,
        "evaluation.guard": "null",
        "evaluation.benchmarks": "[]",
        "placement.storage_path": folder / "outputs",
    }
    return ["--name", name, *(f"--set={path}={value}" for path, value in settings.items())]


def adapt(argv: list[str]) -> subprocess.CompletedProcess[str]:
    job = (sys.executable, str(ROOT / "jobs" / "adapt_to_corpus.py"), *argv)
    return prepared.run(job)


def manifest(folder: Path, kind: str) -> dict[str, Any]:
    (path,) = folder.glob(f"outputs/data/{kind}/corpus-*/manifest.json")
    return json.loads(path.read_text())


def test_a_corpus_becomes_a_scored_and_registered_model(tmp_path: Path) -> None:
    done = adapt(arguments(tmp_path, "mine"))
    assert done.returncode == 0, done.stderr[-4000:]
    records, filtered = manifest(tmp_path, "records"), manifest(tmp_path, "filtered")
    assert records["rejected"] == {"held out": 20}
    assert 0 < filtered["rows_out"] < records["rows_out"] == 180
    assert manifest(tmp_path, "mined")["rows_out"] == filtered["rows_out"]
    with (tmp_path / "outputs" / "runs" / "mine" / "scores.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["model", "corpus-held-out"]
    assert [name for name, _ in rows] == ["untrained", "stage 1: adapt", "BM25"]
    for told in (
        "Held out   corpus-held-out: ",
        "Model ",
        "SentenceTransformer(",
        "Registry   mine",
    ):
        assert told in done.stdout


@pytest.mark.slow(
    "the command above with queries of another source, which has tests of its own: "
    "tests/unit/test_synthesis_queries.py"
)
def test_queries_of_a_language_model_in_the_same_command(tmp_path: Path, capsys) -> None:
    def writes(body: dict[str, Any], before: int) -> Reply:
        number = re.search(r"Number (\d+) has (\w+ \w+)", body["messages"][0]["content"])
        assert number is not None
        return completion(json.dumps({"queries": [f"what has {number[2]} {number[1]}"]}))

    with chat_server(reply=writes) as server:
        llm = f"{{url: '{server.url}', model: m}}"
        source = f"{{kind: queries, path: '{tmp_path / 'corpus.jsonl'}', llm: {llm}}}"
        argv = [*arguments(tmp_path, "asked"), f"--set=data.datasets.corpus.source={source}"]
        done = adapt([one for one in argv if "source.path" not in one])
        assert done.returncode == 0, done.stderr[-4000:]
        assert server.asked.total() == 200
    assert manifest(tmp_path, "synthetic")["rows_out"] == 200
    assert manifest(tmp_path, "records")["rejected"] == {"held out": 20}
    assert "Held out   corpus-held-out: 20 queries over 20 documents" in done.stdout
    # Without its server another model is told at once.
    away = [one.replace("model: m}", "model: other}") for one in argv if "source.path" not in one]
    assert training_job("biencoder-corpus")(["--name=other", *away[2:]]) == 2
    assert "source.llm.url = " in (told := capsys.readouterr().err)
    assert "nothing answers there" in told
