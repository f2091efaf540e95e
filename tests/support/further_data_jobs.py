"""Small data jobs in one process that write files of those kinds that `data_job` does not write."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import data_job
import pytest
from toy_model import ToyTokenizer

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine import shuffle
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.mining import candidate_search
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.plan.stream import PairSteps
from rayembed.data.prepare import prepare
from rayembed.data.vectors.teacher import TeacherLoader
from rayembed.machine.hardware import Precision

FILES, STEPS, BATCH = 6, 2, 8
DATASETS = ("searched", "brought", "pairs", "inferred", "graded")
TEACHER = {"teacher": "small"}
IVF = {"kind": "ivf", "lists": 2, "probes": 2}


@contextmanager
def cut_small() -> Iterator[None]:
    """What is cut by size is cut as that of very many rows: shuffles and corpora."""
    with pytest.MonkeyPatch.context() as patch, data_job.without_pages():
        patch.setattr(shuffle, "FAN_OUT", 2)
        patch.setattr(candidate_search, "SHARD_STEP", 8)
        patch.setattr(candidate_search, "SHARD_DOCUMENTS", 16)
        yield


def write_inputs(root: Path) -> None:
    """Files of the data sets."""
    for folder in ("people", "asked", "brought", "pairs"):
        (root / folder).mkdir()
    for number in range(FILES):
        rows = range(number, 48, FILES)
        people = [{"text": f"Person {i} of town {i % 5}.", "id": f"{i}"} for i in rows]
        data_job.write_rows(root / f"people/{number}.jsonl", people)
        asked = [
            {"query": f"who is {i}?", "positive": f"Person {i} of town {i % 5}."} for i in rows
        ]
        data_job.write_rows(root / f"asked/{number}.jsonl", asked)
        brought = [
            {"query": f"ask {i}", "positive": f"answer {i}", "negatives": others}
            for i in rows
            for others in [[f"bad {i + 100}", f"no {i + 200}"]]
        ]
        data_job.write_rows(root / f"brought/{number}.jsonl", brought)
        pairs = [
            {"query": f"find {i}", "positive": f"this is found for number {i // 2 * 2} there"}
            for i in rows
        ]
        data_job.write_rows(root / f"pairs/{number}.jsonl", pairs)
    data_job.write_rows(
        root / "nli.jsonl",
        [
            {"premise": f"it is {i // 2}", "hypothesis": f"so {i}", "label": 2 * (i % 2)}
            for i in range(32)
        ],
    )
    data_job.write_rows(
        root / "graded.jsonl",
        [{"sentence1": f"one {i}", "sentence2": f"other {i}", "score": i % 6} for i in range(60)],
    )


def dataset(name: str) -> dict[str, Any]:
    """A data set whose steps write files of their own kinds."""
    mining = TEACHER | {"num_negatives": 2}
    clusters = TEACHER | {"batch_pairs": BATCH, "pairs_per_cluster": 4, "exact_clusters": 5}
    clusters |= {"iterations": 3, "restarts": 1}
    return {
        "searched": {
            "source": {"kind": "pairs", "path": "asked"},
            "mining": mining | {"search": IVF},
            "clusters": clusters,
        },
        "brought": {
            "source": {"kind": "pairs", "path": "brought", "negatives": "negatives"},
            "mining": mining | {"pool": "given"},
        },
        "pairs": {
            "source": {"kind": "pairs", "path": "pairs"},
            "held_out": {"kind": "groups", "column": "positive", "share": 0.5},
            "mining": mining | {"corpus": {"path": "people"}},
        },
        "inferred": {"source": {"kind": "nli", "path": "nli.jsonl"}},
        "graded": {
            "source": {"kind": "graded", "path": "graded.jsonl"},
            "held_out": {"kind": "fraction", "share": 0.25},
        },
    }[name]


def run_over(root: Path, name: str, settings: dict[str, Any]) -> Run:
    """A run of one stage over a data set of these settings."""
    is_graded = name == "graded"
    batch = {"num_negatives": 0 if is_graded else 2, "in_batch_negatives": not is_graded}
    batch["policy"] = "clustered" if "clusters" in settings else "blended"
    stage = {
        "name": "first",
        "datasets": {name: 1},
        "batch": {"global_pairs": BATCH, **batch},
        "optimizer": {"learning_rate": 1e-3},
        "steps": STEPS,
        "teachers": [] if is_graded else [TEACHER],
        "loss": {"kind": "cosent" if is_graded else "similarity_distillation"},
    }
    model = {"kind": "biencoder", "backbone": {"path": "none"}, "pooling": {"kind": "mean"}}
    return parse(
        Run,
        {
            "name": "test",
            "model": model,
            "data": {"root": str(root), "datasets": [{"name": name, **settings}]},
            "stages": [stage],
            "evaluation": {"benchmarks": []},
        },
    )


def stage(name: str, settings: dict[str, Any], root: Path, storage: Path) -> list[Any]:
    """Records of all batches over a data set, and their teacher's vectors."""
    loader = TeacherLoader(
        load=data_job.load,
        fingerprint=lambda name: f"weights of {name}",
        precision=lambda: Precision("float32", "as set"),
    )
    context = PipelineContext(str(storage), 0, teacher_loader=loader, root=str(root))
    with cut_small():
        plan = BatchPlan.open(prepare(run_over(root, name, settings), context)["first"])
    steps = PairSteps(plan, ToyTokenizer())
    vectors = [array for step in range(STEPS) for array in steps(step).teacher_vectors]
    records = [record for step in range(STEPS) for record in plan.read(step)]
    return [*records, *(array.tobytes() for array in vectors)]
