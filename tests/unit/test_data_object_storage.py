"""A job whose storage is an address that tells the endpoint itself, from rows to lineage."""

import itertools
import json

import pytest
from data_job import load
from s3_server import BUCKET, s3_server

from rayembed.assets.storage import join, read_bytes, write_atomic
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.plan.audit import lineage
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.prepare import prepare
from rayembed.data.vectors.teacher import TeacherLoader

pytestmark = pytest.mark.allow_hosts(["127.0.0.1", "::1", "localhost"])

EVALUATION = "which colour has the number eleven on the seventh wall"


def write_inputs(root: str) -> None:
    rows = [{"query": f"ask {i}", "positive": f"answer {i} of this kind"} for i in range(40)]
    rows.append({"query": EVALUATION, "positive": "none"})
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    write_atomic(join(root, "rows/pairs.jsonl"), content)
    documents = "".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20, 60))
    write_atomic(join(root, "documents.jsonl"), documents.encode())
    write_atomic(join(root, "evaluation.txt"), f"{EVALUATION}\n".encode())
    told = json.dumps({"text": "another text that an evaluation shows to models"})
    write_atomic(join(root, "evaluation.jsonl"), told.encode())


def run_at(root: str) -> Run:
    teacher = {"teacher": "small"}
    dataset = {
        "name": "own",
        "source": {"kind": "pairs", "path": "rows"},
        "cleaning": {"overlap": {"tasks": ["evaluation.txt", join(root, "evaluation.jsonl")]}},
        "mining": teacher | {"num_negatives": 2, "corpus": {"path": "documents.jsonl"}},
        "clusters": teacher | {"batch_pairs": 8, "iterations": 3, "restarts": 1},
    }
    stage = {
        "name": "first",
        "datasets": {"own": 1},
        "batch": {
            "policy": "clustered",
            "global_pairs": 8,
            "num_negatives": 2,
            "in_batch_negatives": True,
        },
        "optimizer": {"learning_rate": 1e-3},
        "steps": 4,
    }
    model = {"kind": "biencoder", "backbone": {"path": "none"}, "pooling": {"kind": "mean"}}
    return parse(
        Run,
        {
            "name": "test",
            "model": model,
            "data": {"root": root, "datasets": [dataset]},
            "stages": [stage],
            "evaluation": {"benchmarks": []},
        },
    )


def test_all_steps_at_an_address_with_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as environment:
        endpoint = environment.pop("AWS_ENDPOINT_URL")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
        query = f"region=us-east-1&endpoint_override={endpoint}"
        root, storage = f"s3://{BUCKET}/in?{query}", f"s3://{BUCKET}/out?{query}"
        write_inputs(root)
        run = run_at(root)
        teacher_loader = TeacherLoader(
            load=load, fingerprint=lambda reference: f"weights of {reference}"
        )
        pipeline_context = PipelineContext(storage, 0, teacher_loader=teacher_loader, root=root)
        folder = prepare(run, pipeline_context)["first"]
        plan = BatchPlan.open(folder)
        records = [record for step in range(4) for record in plan.read(step)]
        _, folders = lineage(plan, 0)[0]
        audit = read_bytes(join(folder, "audit.md")).decode()
        assert prepare(run, pipeline_context) == {"first": folder}, "all is found again"
    assert len(records) == 32
    assert len({record.query for record in records}) == 32
    assert any("document" in n.text for record in records for n in record.negatives)
    kinds = [prepared.manifest["kind"] for prepared in folders]
    assert kinds == ["clustered", "mined", "records"]
    for later, earlier in itertools.pairwise(folders):
        assert later.manifest["made_of"] == f"{earlier.manifest['kind']}/own-{earlier.fingerprint}"
    cleaned = folders[-1].manifest
    assert cleaned["dropped"] == {"text of a benchmark": 1}
    assert [name.startswith("part-") for name, _ in cleaned["parts"]] == [True]
    assert "## own" in audit
