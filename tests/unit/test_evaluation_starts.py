"""What the processes of an evaluation on Ray import, and how many run tasks: its fixed cost."""

import pickle
import subprocess
import sys

import pytest
from tiny_models import save_encoder

from rayembed.config.evaluation import ModelUnderTest
from rayembed.evaluation.pooled.on_ray import runners_by_now
from rayembed.evaluation.pooled.pool import Workers
from rayembed.evaluation.run_scores import make_spec

SEEN = """
import pickle, sys
from pathlib import Path

def told(what, *names):
    print(what, *(name for name in names if name in sys.modules))

from rayembed.evaluation.pooled.progress import PoolProgress
told("progress", "mteb", "torch", "ray")
from rayembed.evaluation.pooled.dispatch_on_ray import Worker
worker = Worker(pickle.loads(Path(sys.argv[1]).read_bytes()), None, "cpu", 1)
assert worker.ready() is None
told("worker", "mteb", "datasets", "sklearn", "torch")
import rayembed.evaluation.pooled.on_ray
told("runner", "mteb", "datasets", "sklearn", "torch")
"""


def test_only_who_scores_imports_mteb(tmp_path):
    spec = make_spec(ModelUnderTest(reference=str(save_encoder(tmp_path / "tiny"))))
    (tmp_path / "spec").write_bytes(pickle.dumps(spec))
    command = [sys.executable, "-c", SEEN, str(tmp_path / "spec")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "progress",
        "worker torch",
        "runner mteb datasets sklearn torch",
    ]


@pytest.mark.parametrize(
    ("now", "began", "expected"),
    [
        (109.0, None, 1),  # it still starts
        (500.0, None, 1),
        (119.0, 110.0, 1),  # its start took 10 s
        (120.0, 110.0, 2),
        (129.9, 110.0, 2),
        (130.0, 110.0, 4),
        (140.0, 110.0, 5),
        (9e9, 110.0, 5),
        (1059.0, 1000.0, 1),  # it waited for a place
        (1060.0, 1000.0, 2),
    ],
)
def test_further_runners_begin_when_the_first_has_worked_for_as_long_as_it_started(
    now, began, expected
):
    assert runners_by_now(Workers(number=4), now, 100.0, began) == expected


def test_as_many_as_the_settings_name_begin_at_once():
    assert runners_by_now(Workers(number=4, tasks_at_once=3), 100.0, 100.0, None) == 3
