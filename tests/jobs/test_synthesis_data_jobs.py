"""Data jobs and adaptations in which a language model judges labels or writes queries."""

import json
import re
from pathlib import Path
from typing import Any

import corpus_adaptation
import pairs_job
import pytest
from chat_server import Reply, chat_server, completion

from rayembed.pipeline.data.jobs import data_job
from rayembed.pipeline.run.training_job import training_job

pytestmark = pytest.mark.job


def test_labels_are_repaired_by_a_judge(tmp_path: Path, capsys) -> None:
    folder = pairs_job.write_inputs(tmp_path)

    def first_of_some(body: dict[str, Any], before: int) -> Reply:
        asks_of = re.search(r"question (\d+)", body["messages"][0]["content"])
        assert asks_of is not None
        return completion(json.dumps({"relevant": [1] if int(asks_of[1]) % 10 == 0 else []}))

    with chat_server(reply=first_of_some) as server:
        judge = f"{{kind: endpoint, llm: {{url: '{server.url}', model: m}}}}"
        argv = [
            *(one for one in pairs_job.arguments(folder) if "storage_path" not in one),
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
        argv = [
            *corpus_adaptation.arguments(tmp_path, "asked"),
            f"--set=data.datasets.corpus.source={source}",
        ]
        done = corpus_adaptation.adapt([one for one in argv if "source.path" not in one])
        assert done.returncode == 0, done.stderr[-4000:]
        assert server.asked.total() == 200
    assert corpus_adaptation.manifest(tmp_path, "synthetic")["rows_out"] == 200
    assert corpus_adaptation.manifest(tmp_path, "records")["rejected"] == {"held out": 20}
    assert "Held out   corpus-held-out: 20 queries over 20 documents" in done.stdout
    # Without its server another model is told at once.
    away = [one.replace("model: m}", "model: other}") for one in argv if "source.path" not in one]
    assert training_job("biencoder-corpus")(["--name=other", *away[2:]]) == 2
    assert "source.llm.url = " in (told := capsys.readouterr().err)
    assert "nothing answers there" in told
