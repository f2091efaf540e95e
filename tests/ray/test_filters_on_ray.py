"""Cleaning and the consistency filter on a cluster: killed processes change nothing."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import ray
from dies_once import DiesOnce, innermost

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.on_ray import execute_with_ray_data
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.filtering.consistency import make_filtered
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.teacher import TeacherLoader

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

LANGUAGES = ("de", "en")
KILLED = {"BandPart", "FindOverlap", "RankShard", "KeepConsistent"}


def load(config, weights: str, device: str):
    def encode(texts: Sequence[str], role: str) -> np.ndarray:
        seeds = [sum(map(ord, text.split()[0])) for text in texts]
        return np.array([np.random.default_rng(s).integers(-3, 4, 4) for s in seeds], np.float32)

    return encode


def prepare(root: Path, storage: Path, execute: Execute) -> tuple[DatasetArtifact, DatasetArtifact]:
    values = {
        "name": "own",
        "source": {"kind": "pairs", "path": "*.jsonl", "language": "language"},
        "cleaning": {
            "near_duplicates": {"threshold": 0.7, "ngram": 2},
            "overlap": {"tasks": ["evaluation.txt"]},
        },
        "consistency": {"teacher": "small", "shard_rows": 15},
    }
    dataset = parse(DatasetConfig, values)
    teacher_loader = TeacherLoader(load=load, fingerprint=lambda reference: reference)
    pipeline_context = PipelineContext(str(storage), 0, execute, teacher_loader, str(root))
    records = make_records(pipeline_context, check_source(dataset, str(root)), HeldOut())
    return records, make_filtered(pipeline_context, dataset, records)


def test_killed_processes_change_nothing(cluster, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(f"w{i}" for i in rng.integers(0, 300, count))

    rows = [
        {"query": text(5), "positive": text(20), "language": LANGUAGES[i % 2]} for i in range(50)
    ]
    rows += [{**row, "positive": row["positive"] + " more"} for row in rows[:9]]
    for number in range(3):
        lines = [json.dumps(row) for row in rows[number::3]]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    (tmp_path / "evaluation.txt").write_text("\n".join(row["query"] for row in rows[20:25]))
    marks = tmp_path / "marks"
    marks.mkdir()

    def execute(task, units, needs):
        dies = type(innermost(task)).__name__ in KILLED  # each costs seconds
        return execute_with_ray_data(DiesOnce(task, marks) if dies else task, units, needs)

    killed = prepare(tmp_path, tmp_path / "killed", execute)
    assert {mark.name for mark in marks.iterdir()} == KILLED
    whole = prepare(tmp_path, tmp_path / "whole", in_process)
    for ours, theirs in zip(killed, whole, strict=True):
        assert {**ours.manifest, "seconds": 0} == {**theirs.manifest, "seconds": 0}
        read = [
            {path.name: path.read_bytes() for path in Path(made.folder).glob("[pr]*/*.parquet")}
            for made in (ours, theirs)
        ]
        assert read[0] == read[1]
        assert read[0]
    assert killed[0].manifest["dropped"] == {"near-duplicate": 9, "text of a benchmark": 5}
    assert 0 < killed[1].manifest["rows_out"] < killed[1].manifest["rows_in"] == 45
