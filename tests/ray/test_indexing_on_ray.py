"""An index that Ray builds has the rows of one that this process builds; a killed worker changes
nothing.
"""

from dataclasses import replace

import pytest
from dies_once import DiesOnce
from made_up_index import build, documents, rows_of, settings, write
from tiny_folders import save_biencoder

from rayembed.data.engine.on_ray import execute_with_ray_data
from rayembed_extras.indexing import build as building
from rayembed_extras.indexing.build import build_index

pytestmark = pytest.mark.ray


def test_ray_builds_and_updates_the_same_index(cluster, tmp_path):
    model = save_biencoder(tmp_path / "model" / "tiny")
    path = write(tmp_path / "docs.jsonl", documents(60))
    here = settings(tmp_path / "here", model, path, store__number_type="float16")
    _, expected = build(here)
    there = settings(
        tmp_path / "there",
        model,
        path,
        store__number_type="float16",
        placement={"storage_path": str(tmp_path / "there"), "runtime": "ray"},
    )
    made, found = build(there)
    assert made.record.parts == 6
    assert found == expected
    rows = documents(62)
    rows[5]["text"] = "seven foxes"
    del rows[20]
    write(path, rows)
    here_made = build_index(here, update=True)
    made = build_index(there, update=True)
    assert (made.counts["new"], made.counts["changed"], made.counts["deleted"]) == (2, 1, 1)
    assert rows_of(made) == rows_of(here_made)


def test_killed_processes_change_nothing(cluster, tmp_path, monkeypatch):
    """A process of each task is killed when all but its result is there."""
    model = save_biencoder(tmp_path / "model" / "tiny")
    path = write(tmp_path / "docs.jsonl", documents(45))
    _, expected = build(settings(tmp_path / "here", model, path))
    marks = tmp_path / "marks"
    marks.mkdir()
    context_of = building.context_of

    def execute(task, items, needs="cpu"):
        return execute_with_ray_data(DiesOnce(task, marks), items, needs)

    monkeypatch.setattr(
        building, "context_of", lambda *given: replace(context_of(*given), execute=execute)
    )
    placement = {"storage_path": str(tmp_path / "there"), "runtime": "ray"}
    made, found = build(settings(tmp_path / "there", model, path, placement=placement))
    assert sorted(mark.name for mark in marks.iterdir()) == [
        *("ComparePart", "EmbedIndexPart", "ReadIndexDocuments", "SendToParts")
    ]
    assert found == expected
    assert (made.counts["new"], made.counts["in"]) == (45, 45)
