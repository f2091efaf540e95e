"""A whole training job on a tiny model: its run, its inputs, its submission."""

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from forked_workers import script
from made_up_articles import HELD_OUT, sample_over, validation_over, write_articles
from tiny_models import save_decoder

import rayembed
from rayembed.config.run import Run
from rayembed.config.settings import parse

ROOT = Path(rayembed.__file__).parents[2]
TASK = "Given a sentence, retrieve the rest of its article"


def write_inputs(folder: Path) -> None:
    """The backbone, the articles and the run.yaml that `submit` reads."""
    save_decoder(folder / "backbone")
    write_articles(folder / "articles.json")
    (folder / "run.yaml").write_text(make_run(folder).to_yaml())


def make_run(folder: Path) -> Run:
    sample = sample_over(folder / "articles.json")
    sizes = {"held_out": HELD_OUT - 30, "documents": 60, "queries": 20, "max_length": 64}
    optimizer = {"learning_rate": 1e-2}
    return parse(
        Run,
        {
            "name": "tiny",
            "model": {
                "kind": "nvembed",
                "backbone": {"path": str(folder / "backbone"), "dtype": "float32"},
                "pooling": {"kind": "latent_attention", "num_latents": 4, "num_heads": 2},
                "lora": {"rank": 2, "alpha": 4, "dropout": 0.1},
                "query_max_length": 100,
                "document_max_length": 100,
            },
            "data": {
                "datasets": [
                    {
                        "name": "sentences",
                        "source": sample.pairs("sentence"),
                        "query_instruction": TASK,
                    },
                    {"name": "topics", "source": sample.topics(), "task": "classification"},
                ],
            },
            "stages": [
                {
                    "name": "retrieval",
                    "datasets": {"sentences": 1},
                    "batch": {"global_pairs": 8, "num_negatives": 0, "in_batch_negatives": True},
                    "optimizer": optimizer,
                    "steps": 4,
                },
                {
                    "name": "blend",
                    "datasets": {"topics": 1},
                    "batch": {"global_pairs": 4, "num_negatives": 2, "in_batch_negatives": False},
                    "optimizer": optimizer,
                    "steps": 2,
                },
            ],
            "evaluation": {
                "own_sets": sample.scores(**sizes),
                "baselines": ["bm25"],
                "instructions": {"WikiSentenceRetrieval": TASK},
                "validation": {
                    "data": {"kind": "own_sets", "sets": validation_over(sample, sizes)},
                    "every_steps": 2,
                    "weights": {"WikiSentenceRetrieval": 3},
                },
            },
            "placement": {
                "runtime": "ray",
                "storage_path": str(folder / "outputs"),
                "zero_stage": 2,
                "micro_batch_tokens": 512,
            },
        },
    )


def sentence_run(
    folder: Path,
    name: str,
    model: Mapping[str, Any],
    *,
    dataset: Mapping[str, Any],
    policy: str,
    optimizer: Mapping[str, Any],
) -> Run:
    """A run of one stage of three steps over sentences of the articles, without scores."""
    source = sample_over(folder / "articles.json").pairs("sentence")
    batch = {"global_pairs": 8, "num_negatives": 0, "in_batch_negatives": True}
    return parse(
        Run,
        {
            "name": name,
            "model": model,
            "data": {
                "datasets": [{"name": "sentences", "source": source, **dataset}],
            },
            "stages": [
                {
                    "name": "retrieval",
                    "datasets": {"sentences": 1},
                    "batch": {"policy": policy, **batch},
                    "optimizer": optimizer,
                    "steps": 3,
                }
            ],
            "placement": {
                "storage_path": str(folder / "outputs"),
                "zero_stage": 2,
                "micro_batch_tokens": 256,
            },
        },
    )


def submit(
    folder: Path,
    *arguments: str,
    job: str = "train_nvembed",
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """The job as a process, whose workers are forks."""
    settings = {"OMP_NUM_THREADS": "1", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    return subprocess.run(
        script(f"jobs/{job}.py", "--recipe", f"{folder}/run.yaml", *arguments),
        cwd=ROOT,
        env={**os.environ, **settings, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )


def run_here(job: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What the script of `jobs` would do as a process, in this one.

    A process of its own costs half a minute of a core before the job begins: imports, a Ray, and
    workers that import it all again.
    """
    printed, logged = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logger = logging.getLogger("rayembed")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    path = str(ROOT / "jobs" / f"{job}.py")
    code: Any = 0
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(logged),
            patch.object(sys, "argv", [path, *arguments]),
        ):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    return subprocess.CompletedProcess([], code, printed.getvalue(), logged.getvalue())
