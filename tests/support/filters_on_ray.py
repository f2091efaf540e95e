"""Cleaning and a step after it on a cluster, whose processes are killed."""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from dies_once import DiesOnce, innermost

from rayembed.config.data import DatasetConfig
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import DatasetArtifact, PipelineContext
from rayembed.data.engine.on_ray import execute_with_ray_data
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.sources.check import check_source
from rayembed.data.sources.convert import make_records
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.vectors.teacher import TeacherLoader

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

LANGUAGES = ("de", "en")


def load(config, weights: str, device: str):
    def encode(texts: Sequence[str], role: str) -> np.ndarray:
        seeds = [sum(map(ord, text.split()[0])) for text in texts]
        return np.array([np.random.default_rng(s).integers(-3, 4, 4) for s in seeds], np.float32)

    return encode


def prepare(
    root: Path, storage: Path, execute: Execute, settings: Mapping[str, Any]
) -> list[DatasetArtifact]:
    values = {
        "name": "own",
        "source": {"kind": "pairs", "path": "*.jsonl", "language": "language"},
        **settings,
    }
    dataset = parse(DatasetConfig, values)
    teacher_loader = TeacherLoader(load=load, fingerprint=lambda reference: reference)
    context = PipelineContext(str(storage), 0, execute, teacher_loader, str(root))
    made = [make_records(context, check_source(dataset, str(root)), HeldOut())]
    for step in dataset.steps:
        made.append(step.make(context, dataset, made[-1], HeldOut()))
    return made


def killed_and_whole(
    tmp_path: Path, settings: Mapping[str, Any], tasks: Collection[str]
) -> list[DatasetArtifact]:
    """What is made though the first process of each of these tasks is killed, after a check that it
    is the same without.
    """
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
        dies = type(innermost(task)).__name__ in tasks  # each costs seconds
        return execute_with_ray_data(DiesOnce(task, marks) if dies else task, units, needs)

    killed = prepare(tmp_path, tmp_path / "killed", execute, settings)
    assert {mark.name for mark in marks.iterdir()} == set(tasks)
    whole = prepare(tmp_path, tmp_path / "whole", in_process, settings)
    for ours, theirs in zip(killed, whole, strict=True):
        assert {**ours.manifest, "seconds": 0} == {**theirs.manifest, "seconds": 0}
        read = [
            {path.name: path.read_bytes() for path in Path(made.folder).glob("[pr]*/*.parquet")}
            for made in (ours, theirs)
        ]
        assert read[0] == read[1]
        assert read[0]
    return killed
