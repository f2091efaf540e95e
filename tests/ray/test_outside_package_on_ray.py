"""A loss, an optimiser and a schedule of a package from outside, on Ray's workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from own_pairs import own_run
from tiny_job import ROOT

pytestmark = pytest.mark.ray

CODE = """
from typing import Literal

from rayembed.config.optimizer import ScheduleConfig
from rayembed.losses.infonce import InfoNCE
from rayembed.optim.adamw import AdamW


class Halved(InfoNCE):
    kind: Literal["halved"] = "halved"

    def of_rows(self, queries_BD, candidates, parameters):
        return super().of_rows(queries_BD, candidates, parameters) / 2


class Told(AdamW):
    kind: Literal["told"] = "told"

    def build(self, groups, *, bfloat16):
        import os
        from pathlib import Path

        import ray

        here = f"{os.getpid()} {ray.is_initialized()}"
        Path(os.environ["TOLD"], str(os.getpid())).write_text(here)
        return super().build(groups, bfloat16=bfloat16)


class Stairs(ScheduleConfig):
    kind: Literal["stairs"] = "stairs"

    def factor(self, progress):
        return 1.0 if progress < 0.5 else 0.25
"""

POINTS = """[rayembed.losses]
halved = outside:Halved

[rayembed.optimizers]
told = outside:Told

[rayembed.schedules]
stairs = outside:Stairs
"""


@pytest.mark.slow(
    "a training on a Ray of its own, three minutes on two slow cores; a package from outside "
    "trains with gloo in tests/distributed/test_outside_package.py"
)
def test_a_loss_an_optimiser_and_a_schedule_from_outside_train_on_rays_workers(tmp_path):
    site, told = tmp_path / "site", tmp_path / "told"
    info = site / "outside-1.0.dist-info"
    for folder in (info, told):
        folder.mkdir(parents=True)
    (site / "outside.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    (tmp_path / "run.yaml").write_text(own_run(tmp_path).to_yaml())
    stage = "stages.finetune"
    changes = {
        "placement.runtime": "ray",
        "placement.workers": 2,
        f"{stage}.loss": "{kind: halved}",
        f"{stage}.optimizer": "{kind: told, learning_rate: 0.01, schedule: stairs}",
        "evaluation.before_training": "false",
        "evaluation.baselines": "[]",
    }
    words = [word for name, value in changes.items() for word in ("--set", f"{name}={value}")]
    job = [sys.executable, ROOT / "jobs" / "train_biencoder.py", "--recipe", tmp_path / "run.yaml"]
    path = os.pathsep.join([str(ROOT / "platform"), str(site)])
    environment = {**os.environ, "PYTHONPATH": path, "TOLD": str(told)}
    done = subprocess.run(
        [*job, *words], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    workers = [Path(file).read_text().split() for file in told.iterdir()]
    assert len(workers) == 2
    assert all(in_ray == "True" for _, in_ray in workers)
    lines = (tmp_path / "outputs" / "runs" / "own" / "metrics.jsonl").read_text().splitlines()
    rates = [row["learning_rate"] for row in map(json.loads, lines) if "learning_rate" in row]
    assert rates == pytest.approx([0.01, 0.01, 0.0025, 0.0025])
