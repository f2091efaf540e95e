"""Mining all over a cluster: processes that are killed on the way change nothing in the output."""

import json

import mining_by_hand as by_hand
import pytest
from dies_once import DiesOnce
from mining_step import configured, mine, told

from rayembed.data.engine.on_ray import execute_with_ray_data

pytestmark = pytest.mark.ray


def test_killed_processes_change_nothing(cluster, tmp_path) -> None:
    rows = by_hand.made_up_rows(40, 1, labels=True)
    more = list(dict.fromkeys(by_hand.made_up_texts(40, 99)))
    (tmp_path / "corpus.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in more))
    (tmp_path / "questions.txt").write_text("\n".join(more[:20]))
    overlap = {"tasks": [str(tmp_path / "questions.txt")], "max_similarity": None}
    cleaning = {"overlap": overlap}
    config = configured(
        rule={"kind": "top_k_perc_pos", "max_relative_score": 0.8},
        corpus={"path": str(tmp_path / "corpus.jsonl")},
    )
    marks = tmp_path / "marks"
    marks.mkdir()

    def execute(task, units, needs):
        return execute_with_ray_data(DiesOnce(task, marks), units, needs)

    found, manifest = mine(tmp_path / "killed", rows, config, 3, cleaning=cleaning, execute=execute)
    assert sorted(mark.name for mark in marks.iterdir()) == [
        *("EmbedPartdocuments", "EmbedPartrows", "FindInDocuments", "MineParts", "ReadDocuments")
    ]
    whole, untouched = mine(tmp_path / "whole", rows, config, 3, cleaning=cleaning)
    assert found == whole
    banned = {text.lower() for text in more[:20]}
    allowed = [text for text in more if text.lower() not in banned]
    assert told(found) == by_hand.mined(rows, config, allowed)
    assert told(found) != by_hand.mined(rows, config, more), "the control"
    for made in (manifest, untouched):  # of which folders are named
        del made["seconds"], made["made_of"]
    assert manifest == untouched
    parts = [
        sorted(tmp_path.glob(f"{name}/out/data/mined/*/parts/*")) for name in ("killed", "whole")
    ]
    assert [p.name for p in parts[0]] == [p.name for p in parts[1]]
    assert [p.read_bytes() for p in parts[0]] == [p.read_bytes() for p in parts[1]]
