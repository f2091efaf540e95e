"""Clustering on Ray Data makes what one process makes, also when its processes are killed."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from dies_once import innermost

from rayembed.config.data import DatasetConfig
from rayembed.config.mining import ClusterConfig
from rayembed.data.clusters.cluster import make_clustered
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.on_ray import execute_with_ray_data
from rayembed.data.engine.parts import write_part
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.records import Record
from rayembed.data.sources.pairs import PairsSource
from rayembed.data.vectors.teacher import TeacherLoader

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def load(config: Any, weights: str, device: str):
    def encode(texts, role):
        made = np.stack([np.random.default_rng(list(t.encode())).standard_normal(8) for t in texts])
        return (made / np.linalg.norm(made, axis=1, keepdims=True)).astype(np.float32)

    return encode


def fingerprint(reference: str) -> str:
    return "weights"


class KillsItsProcess:
    """The task; the first process that does some kind of it dies in the middle."""

    def __init__(self, task: Any, marks: str) -> None:
        self.task, self.marks = task, marks

    def __call__(self, unit: Any, *device: str) -> dict[str, Any]:
        mark = Path(self.marks) / type(innermost(self.task)).__name__
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.task(unit, *device)


def cluster_with(storage: Path, execute: Execute) -> DatasetArtifact:
    rows = [Record(str(i), f"query {i}", (f"document {i}",), "d") for i in range(70)]
    writer = ArtifactWriter(str(storage), "records", "d", {"rows": 70})
    parts = [write_part(writer.parts_folder, rows[i : i + 25]) for i in range(0, 70, 25)]
    result = {"rows_in": 70, "rows_out": 70, "rejected": {}}
    before = writer.finish([result], [[p.path.rsplit("/", 1)[-1], p.rows] for p in parts])
    clusters = ClusterConfig(teacher="t", batch_pairs=8, restarts=2, iterations=10)
    dataset = DatasetConfig(name="d", source=PairsSource(path="none"), clusters=clusters)
    pipeline_context = PipelineContext(str(storage), 0, execute, TeacherLoader(load, fingerprint))
    return make_clustered(pipeline_context, dataset, before)


def test_the_same_batches_although_every_kind_of_task_was_killed_once(
    cluster: None, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def kills(task, units, needs):
        return execute_with_ray_data(KillsItsProcess(task, str(marks)), units, needs)

    here = cluster_with(tmp_path / "here", in_process)
    there = cluster_with(tmp_path / "there", kills)
    assert sorted(mark.name for mark in marks.iterdir()) == [
        "AssignPart",
        "EmbedPart",
        "FindCentroids",
        "GatherBatches",
        "ScatterPairs",
    ]
    assert [p.digest for p in there.parts] == [p.digest for p in here.parts]
    told = set(here.manifest) - {"seconds"}
    assert {key: there.manifest[key] for key in told} == {key: here.manifest[key] for key in told}
