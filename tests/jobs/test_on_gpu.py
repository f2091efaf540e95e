"""A whole job whose worker and evaluation run on a GPU."""

import json

import pytest
from tiny_job import submit, write_inputs

pytestmark = [pytest.mark.job, pytest.mark.ray, pytest.mark.gpu]


def test_a_job_on_one_gpu(tmp_path):
    write_inputs(tmp_path)
    done = submit(tmp_path, "--set", "placement.use_gpu=true")
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs" / "runs" / "tiny"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["stage"], r["step"]) for r in steps] == [
        *(("retrieval", step) for step in range(1, 5)),
        *(("blend", step) for step in range(1, 3)),
    ]
    assert (run / "models" / "blend" / "rayembed.json").exists()
    assert "stage 2: blend" in (run / "scores.md").read_text()
