"""A small data job in one process that writes files of nearly every kind that data steps write."""

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.machine.hardware import Precision

STEPS, BATCH = 3, 8
SEARCHES = {
    "kind": "beir",
    "path": "beir/qrels/train.tsv",
    "corpus": "beir/corpus.jsonl",
    "queries": "beir/queries.jsonl",
}
RESULTS, LOCKS = r"units/[^/]+\.json", r"plans/[^/]+\.lock"
EVALUATION = "which colour has the number eleven on the seventh wall of the old house"

READ_IN_A_FRESH_JOB = {
    "parts": r"parts/part-\w+\.parquet",
    "part indexes": r"parts/part-\w+\.index\.npz",
    "documents to mine from": r"data/documents/.*\.parquet",
    "held-out choice": r"converted/.*/rows-\w+\.npz",
    "held-out texts": r"held_out/[^/]+/texts\.npz",
    "held-out set": r"held_out/[^/]+/beir/.*\.(jsonl|tsv)",
    "scattered judgements": r"scattered/(documents|judgements|queries)/\w+\.arrow",
    "needed ids": r"scattered/needed-[\w-]+\.npy",
    "class examples": r"examples/(examples|merged|further)-\w+\.parquet",
    "evaluation texts": r"evaluation-texts/texts\.parquet",
    "index of evaluation texts": r"evaluation-texts/index\.npz",
    "n-grams of evaluation texts": r"evaluation-texts/grams\.npz",
    "vectors": r"vectors/\w+/\w+\.(queries|documents)\.npy",
    "vectors' texts": r"vectors/\w+/\w+\.index\.npz",
    "versions of vectors": r"vectors/\w+/versions\.json",
    "documents that are not mined": r"mined/[^/]+/working/excluded-\w+\.npy",
    "mining's examples": r"mined/[^/]+/working/\w+\.json",
    "centroids": r"centroids-\d+\.npy",
    "assigned clusters": r"assigned/\w+\.npy",
    "rows by cluster": r"clustered/[^/]+/working/\w+-\d+/\d+/\d+\.arrow",
    "places in batches": r"working/places/\w+\.arrow",
    "teacher's type": r"working/teacher_dtype",
    "rows sent to a plan": r"plans/[^/]+/working/scattered\S*/\S+\.arrow",
    "plan": r"plans/[^/]+/steps-\d+\.parquet",
    "plan's manifest": r"plans/[^/]+/manifest\.json",
}

READ_IN_A_FINISHED_JOB = {
    "manifests": r"data/[^/]+/[^/]+/manifest\.json",
    "held-out set": r"held_out/[^/]+/beir/.*\.(jsonl|tsv)",
    "plan": r"plans/[^/]+/steps-\d+\.parquet",
}

READ_BY_PEOPLE = r"audit\.(html|md)|clusters\.png|removed/.*\.parquet|rejected\.jsonl"


@contextmanager
def without_pages() -> Iterator[None]:
    """Leave out pages and pictures for people, which take half of a small job's time."""
    with pytest.MonkeyPatch.context() as patch:
        for page in ("prepare.write_folder_audit", "clusters.cluster.write_plot"):
            patch.setattr(f"rayembed.data.{page}", lambda *_, **__: None)
        yield


def load(config: Any, weights: str, device: str) -> Any:
    """Texts of one number are alike."""

    def encode(texts: Sequence[str], role: str) -> np.ndarray:
        numbers = [int(re.findall(r"\d+", text + " 0")[0]) for text in texts]
        made = [np.random.default_rng(n).standard_normal(8) for n in numbers]
        return np.array([m / np.linalg.norm(m) for m in made], dtype=np.float32)

    return encode


LOADER = TeacherLoader(
    load=load,
    fingerprint=lambda reference: f"weights of {reference}",
    precision=lambda: Precision("float32", "as set"),
)


def write_inputs(root: Path) -> None:
    """Rows of a data set of each layout whose steps write files of their own."""
    (root / "beir" / "qrels").mkdir(parents=True)
    rows = [
        {"query": f"ask {i}", "positive": f"answer {i} of this kind and more", "negatives": ["bad"]}
        for i in range(40)
    ]
    rows += [{"query": "ask 3 again", "positive": rows[3]["positive"] + " words", "negatives": []}]
    rows += [{"query": f"a long text before. {EVALUATION}", "positive": "none", "negatives": []}]
    write_rows(root / "pairs.jsonl", rows)
    documents = [{"text": f"document {i}"} for i in range(20, 60)]
    documents += [{"text": f"document 60 tells {EVALUATION} once more"}]
    write_rows(root / "documents.jsonl", documents)
    write_rows(
        root / "classes.jsonl", [{"text": f"text {i}", "label": f"{i % 4}"} for i in range(24)]
    )
    write_rows(
        root / "beir/corpus.jsonl", [{"_id": f"d{i}", "text": f"passage {i}"} for i in range(9)]
    )
    write_rows(
        root / "beir/queries.jsonl", [{"_id": f"q{i}", "text": f"search {i}"} for i in range(9)]
    )
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(9))
    (root / "beir/qrels/train.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    (root / "evaluation.txt").write_text(f"{EVALUATION}\n")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_over(root: Path) -> Run:
    """The run whose data sets these are."""
    return parse(Run, settings_over(root))


def settings_over(root: Path) -> dict[str, Any]:
    """Settings of that run."""
    teacher = {"teacher": "small"}
    overlap = {"tasks": ["evaluation.txt"], "contained": {"ngram": 8}, "negatives": True}
    own = {
        "name": "own",
        "source": {"kind": "pairs", "path": "pairs.jsonl", "negatives": "negatives"},
        "held_out": {"kind": "fraction", "share": 0.3},
        "cleaning": {"overlap": overlap},
        "mining": teacher | {"num_negatives": 2, "corpus": {"path": "documents.jsonl"}},
        "clusters": teacher | {"batch_pairs": BATCH, "iterations": 3, "restarts": 1},
    }
    classes = {"name": "classes", "source": {"kind": "classes", "path": "classes.jsonl"}}
    beir = {"name": "beir", "source": SEARCHES}
    stage = {
        "name": "first",
        "datasets": {"own": 1, "classes": 1, "beir": 1},
        "batch": {"global_pairs": BATCH, "num_negatives": 2, "in_batch_negatives": True},
        "optimizer": {"learning_rate": 1e-3},
        "steps": STEPS,
    }
    # A stage of the data set's clusters, which the other one takes singly.
    batch = stage["batch"] | {"policy": "clustered"}
    similar = stage | {"name": "similar", "datasets": {"own": 1}, "batch": batch, "steps": 1}
    model = {"kind": "biencoder", "backbone": {"path": "none"}, "pooling": {"kind": "mean"}}
    return {
        "name": "test",
        "model": model,
        "data": {"root": str(root), "datasets": [own, classes, beir]},
        "stages": [stage, similar],
        "evaluation": {"benchmarks": []},
    }


def prepared(root: Path, storage: Path | str, execute: Execute = in_process) -> list[Any]:
    """The records of all batches, after all steps that are not done yet."""
    context = PipelineContext(str(storage), 0, execute, LOADER, root=str(root))
    plan = BatchPlan.open(prepare(run_over(root), context)["first"])
    return [record for step in range(STEPS) for record in plan.read(step)]
