"""A program that trains and is sent SIGTERM: a checkpoint, an end in MLflow, and it goes on."""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import prepared
import pytest
from mlflow import MlflowClient
from own_pairs import UNGUARDED, write_pairs
from tiny_models import save_encoder

import rayembed

PROGRAM = """
import json, logging, os, signal, sys
from pathlib import Path

import rayembed
from rayembed.training.trainer import Callback

folder, line, handler = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
steps = []


class Steps(Callback):
    def on_step_end(self, record):
        steps.append(record["step"])
        told(f"step {record['step']} is done")
        (folder / "steps").write_text(json.dumps(steps))


def told(text):
    if line and line in text:
        os.kill(os.getpid(), signal.SIGTERM)
    return True


def hears(record):
    return told(record.getMessage())


class Shown(logging.StreamHandler):
    pass


shown = Shown()
shown.addFilter(hears)
logging.basicConfig(level=logging.WARNING, handlers=[shown])
logging.getLogger("rayembed").setLevel(logging.INFO)
if handler:
    signal.signal(signal.SIGTERM, eval(handler))
settings = json.loads((folder / "settings.json").read_text())
asked = {"steps": 6, "batch_size": 16, "name": "own", "output": folder / "out"}
pairs = folder / "pairs.jsonl"
rayembed.train(folder / "encoder", pairs, callbacks=[Steps()], settings=settings, **asked)
print("the program goes on")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    save_encoder(folder / "encoder")
    write_pairs(folder / "pairs.jsonl")
    lengths = {"model.query_max_length": 32, "model.document_max_length": 32}
    more = {"model.backbone.dtype": "float32", "evaluation.baselines": []}
    (folder / "settings.json").write_text(json.dumps({**lengths, **UNGUARDED, **more}))
    return folder


def run(folder, line="", handler=""):
    """Exit code, output, log and trained steps of the program, sent SIGTERM when it says a line."""
    (folder / "steps").write_text("[]")
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(rayembed.__file__).parents[1]),
    }
    program = folder / "program.py"
    program.write_text(PROGRAM)
    done = prepared.run(
        [sys.executable, program, str(folder), line, handler], env=environment, timeout=120
    )
    return done, json.loads((folder / "steps").read_text())


def statuses(folder):
    client = MlflowClient(f"sqlite:///{folder}/out/mlflow.db")
    runs = client.search_runs([e.experiment_id for e in client.search_experiments()])
    return [one.info.status for one in runs]


@pytest.fixture
def folder(inputs):
    with tempfile.TemporaryDirectory() as place:
        for one in inputs.iterdir():
            Path(place, one.name).symlink_to(one)
        yield Path(place)


def test_it_makes_a_checkpoint_after_the_step_and_the_same_call_goes_on(folder):
    done, steps = run(folder, "step 2 is done")
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert not done.stdout
    assert "SIGTERM: the call is stopped in order" in done.stderr
    assert "stopped; the same call goes on from what is finished" in done.stderr
    assert "Traceback" not in done.stderr
    *_, last = steps
    assert 2 <= last < 6
    assert f"the checkpoint of step {last} is made" in done.stderr
    assert statuses(folder) == ["KILLED"]

    # where it means nothing the program goes on, and the run from where it was stopped
    done, steps = run(folder, "step 5 is done", "signal.SIG_IGN")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("the program goes on\n")
    assert steps == list(range(last + 1, 7))
    assert statuses(folder) == ["FINISHED"]


@pytest.mark.parametrize(
    ("line", "handler", "code", "trained"),
    [
        ("data → ", "", -signal.SIGTERM, 0),
        ("finetune 0/6", "", -signal.SIGTERM, 1),
        ("finetune ✓", "", -signal.SIGTERM, 6),
        ("step 3 is done", "lambda *_: sys.exit(7)", 7, 4),
    ],
    ids=["data", "before the first step", "scores", "a handler of the program"],
)
def test_it_is_stopped_in_order_at_any_time(folder, line, handler, code, trained):
    done, steps = run(folder, line, handler)
    assert done.returncode == code, done.stderr
    assert not done.stdout
    assert len(steps) <= trained
    assert set(statuses(folder)) <= {"KILLED"}
    assert len(statuses(folder)) == (trained > 0)
