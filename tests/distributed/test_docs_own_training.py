"""The script of docs/own_training.md, run as the page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_up_records import made_up_records
from own_pairs import own_run

from rayembed.data.engine.parts import write_part
from rayembed.data.plan.order import PlanConfig
from rayembed.data.plan.write import write_plan
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode

pytestmark = pytest.mark.distributed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "own_training.md"


def test_the_script_trains_and_exports(tmp_path):
    run = own_run(tmp_path, "stages.finetune.checkpoint_every_steps=2")
    (tmp_path / "run.yaml").write_text(run.to_yaml())
    records = [r for r in made_up_records(60) if r.in_batch and r.dataset == "pairs"]
    part = write_part(str(tmp_path / "rows"), records)
    plan = PlanConfig(
        weights={"pairs": 1.0},
        global_pairs=8,
        num_negatives=0,
        num_steps=4,
        seed=0,
        in_batch_negatives=True,
        key="finetune",
    )
    write_plan(str(tmp_path / "plan"), {"pairs": [part]}, plan)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    (command,) = re.findall(r"`torchrun (.*)`", code)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *command.split()],
        cwd=tmp_path,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-0000002", "step-0000004"]
    trained = encode(load_model(tmp_path / "model"), ["cats and dogs"], role="query")
    assert trained.shape == (1, 32)
