"""A data job with every step that there is: that of `data_job.py` with more of its settings, then
sequences for an adaptation, then synthetic pairs.

Beside the steps of that one: a language model writes queries for documents, negatives are found in
an index, scored by a cross-encoder, taken from those that rows bring, judged by a cross-encoder and
by a language model, and vectors of the stage's teacher are kept.
"""

import io
import json
import random
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import data_job
import pyarrow.parquet as pq
from chat_server import Reply, completion
from data_job import write_rows
from tiny_adaptation import save_masked, tiny_adaptation, write_corpus
from tiny_models import save_cross_encoder

from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.engine.parts import read_records
from rayembed.data.engine.work_items import Execute, in_process
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed_extras.adaptation.make import prepare_sequences
from rayembed_extras.adaptation.plan import SequencePlan
from rayembed_extras.synthesis.settings import SynthesisRun
from rayembed_extras.synthesis.synthesize import synthesize

TOLD = 16
"""Documents for which queries are written, two each."""

ANSWERS = re.compile(r"data/answers/\w+/")
"""Folder of a language model's answers, of which each step that asks it has one."""

TEACHER = {"teacher": "small"}
EXAMPLES = {"short-long": 12, "short-short": 8}


def write_inputs(root: Path) -> None:
    """What the job reads, with the models that it loads from folders."""
    data_job.write_inputs(root)
    write_rows(root / "told.jsonl", [{"text": f"told {i} in few words"} for i in range(TOLD)])
    save_cross_encoder(root / "reranker")
    save_masked(root / "bert")
    write_corpus(root)


def language_model(url: str) -> dict[str, Any]:
    """Settings of the endpoint at an address: silent for three seconds it is asked again."""
    quick = {"first_wait_seconds": 0.01, "timeout_seconds": 3, "max_resends": 8}
    return {"kind": "http", "url": url, "model": "writer", "concurrency": 4, **quick}


class Writer:
    """Replies of the language model, of which a share are errors and another share come too late.

    It writes queries with the number of their document, and finds every third candidate relevant.
    """

    def __init__(self) -> None:
        self.failing = self.hanging = 0.0
        self.seen: Counter[str] = Counter()
        """Number of requests by what became of them."""
        self._draw = random.Random(0)

    def __call__(self, body: dict[str, Any], before: int) -> Reply | None:
        chance = self._draw.random()
        if chance < self.hanging:
            self.seen["hung"] += 1
            return Reply(503, "too late", seconds=5)
        if chance < self.hanging + self.failing:
            self.seen["failed"] += 1
            return Reply(503, "the drill")
        self.seen["answered"] += 1
        prompt = body["messages"][0]["content"]
        if '"queries": [' in prompt:
            number = re.findall(r"told (\d+)", prompt)[0]
            queries = [f"wonder {number} of kind {kind}" for kind in "ab"]
            return completion(json.dumps({"queries": queries}))
        if "You judge search results" in prompt:
            numbers = map(int, re.findall(r"^\[(\d+)\]", prompt, re.MULTILINE))
            found = [n for n in numbers if zlib.crc32(f"{n} {prompt}".encode()) % 3 == 0]
            return completion(json.dumps({"relevant": found}))
        return None


def run_over(root: Path, url: str) -> Run:
    """The run of the batch plan."""
    values = data_job.settings_over(root)
    reranker = {"model": str(root / "reranker"), "max_length": 32}
    own, classes, _ = values["data"]["datasets"]
    own["cleaning"]["near_duplicates"] = {"of": "positive", "threshold": 0.6}
    own["consistency"] = TEACHER
    own["repair"] = {"judge": {"kind": "cross_encoder", **reranker}, "action": "drop"}
    classes["mining"] = TEACHER | {"num_negatives": 2, "pool": "given"}
    mining = {
        "num_negatives": 3,
        "search": {"kind": "ivf"},
        "rescoring": reranker,
        "rule": {"kind": "top_k"},
    }
    written = {
        "name": "written",
        "source": {
            "kind": "queries",
            "path": "told.jsonl",
            "per_document": 2,
            "llm": language_model(url),
        },
        "mining": {**TEACHER, **mining},
        "repair": {"judge": {"kind": "endpoint", "llm": language_model(url)}},
    }
    values["data"]["datasets"].append(written)
    stage, _ = values["stages"]
    stage["datasets"]["written"] = 1
    stage["teachers"] = [TEACHER, {"teacher": "another"}]
    stage["loss"] = {"kind": "similarity_distillation"}
    return parse(Run, values)


def synthesis_over(storage: str, url: str) -> SynthesisRun:
    """The run of the synthetic pairs."""
    settings = {"examples": EXAMPLES, "tasks_per_request": 5, "llm": language_model(url)}
    placement = {"storage_path": storage}
    return parse(SynthesisRun, {"name": "made", "synthesis": settings, "placement": placement})


def everything(
    root: Path,
    storage: str,
    url: str,
    execute: Execute = in_process,
) -> dict[str, Any]:
    """What training would read, after all steps that are not done yet."""
    context = PipelineContext(storage, 0, execute, data_job.LOADER, root=str(root))
    batches = BatchPlan.open(prepare(run_over(root, url), context)["first"])
    adaptation = tiny_adaptation(root)
    sequences = SequencePlan.open(prepare_sequences(adaptation, context))
    slots = range(sequences.global_sequences)
    pairs = synthesize(synthesis_over(storage, url))
    return {
        "batches": [record for step in range(batches.num_steps) for record in batches.read(step)],
        "sequences": [
            [ids.tolist() for ids in sequences.read(step, slots)[0]]
            for step in range(sequences.num_steps)
        ],
        "pairs": [record for part in pairs.parts for record in read_records(part.path)],
    }


def contents(storage: Path) -> dict[str, Any]:
    """Contents of all files below a folder; see `compared`."""
    paths = (path for path in storage.rglob("*") if path.is_file())
    return compared({str(path.relative_to(storage)): path.read_bytes() for path in paths})


def compared(files: dict[str, bytes]) -> dict[str, Any]:
    """Contents of files: those of manifests without the seconds that they tell, answers by what was
    asked, however many files they came in.
    """
    found: dict[str, Any] = {}
    for name, content in files.items():
        # The page shows the manifest, and local disks alone have locks.
        if name.endswith(("audit.html", ".lock")):
            continue
        if name.endswith("manifest.json"):
            found[name] = {**json.loads(content), "seconds": 0, "digest": ""}
        elif ANSWERS.match(name) and name.endswith(".parquet"):
            rows = pq.read_table(io.BytesIO(content)).to_pylist()
            found.setdefault(name.rpartition("/")[0], {}).update({row["key"]: row for row in rows})
        else:
            found[name] = content
    return found
