"""The job that adapts an encoder to documents, over a small file of them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import prepared
from tiny_job import ROOT
from tiny_models import save_encoder

from rayembed.config.data import DatasetConfig

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
    settings: dict[str, Any] = {
        "data.datasets.corpus.source.path": folder / "corpus.jsonl",
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
    if "consistency" in DatasetConfig.model_fields:
        filtered = f"{{teacher: {folder / 'encoder'}, top_k: 60}}"
        settings["data.datasets.corpus.consistency"] = filtered
    return ["--name", name, *(f"--set={path}={value}" for path, value in settings.items())]


def adapt(argv: list[str]) -> subprocess.CompletedProcess[str]:
    job = (sys.executable, str(ROOT / "jobs" / "adapt_to_corpus.py"), *argv)
    return prepared.run(job)


def manifest(folder: Path, kind: str) -> dict[str, Any]:
    (path,) = folder.glob(f"outputs/data/{kind}/corpus-*/manifest.json")
    return json.loads(path.read_text())
