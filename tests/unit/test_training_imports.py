"""What a worker imports is what each start of one costs."""

import subprocess
import sys
from unittest.mock import patch

import pytest

from rayembed.training.engine import _deepspeed
from rayembed.training.metrics_sink import MetricsSink

HEAVY = ("torch", "ray", "mteb")
LIBRARY = """
from types import SimpleNamespace

ops = SimpleNamespace(__compatible_ops__={"deepspeed_shm_comm": True})
try:
    import mlflow
    has_mlflow = True
except Exception:
    has_mlflow = False
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A DeepSpeed that takes MLflow where it finds it, as the real one does; none is imported."""
    (tmp_path / "deepspeed.py").write_text(LIBRARY)
    (tmp_path / "mlflow.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with patch.dict(sys.modules):
        for name in ("deepspeed", "mlflow"):
            sys.modules.pop(name, None)
        yield


def test_deepspeed_takes_no_mlflow_with_it(library):
    deepspeed = _deepspeed()
    assert not deepspeed.has_mlflow
    assert deepspeed.ops.__compatible_ops__ == {"deepspeed_shm_comm": False}
    import mlflow  # whoever needs it imports it as ever

    assert mlflow.__name__ == "mlflow"


def test_without_that_it_would(library):
    import deepspeed

    assert deepspeed.has_mlflow


def test_the_writer_of_the_log_needs_neither_torch_nor_ray():
    """Its actor is a process of its own, which Ray imports the module of its class into."""
    script = (
        f"import {MetricsSink.__module__}, sys; print([n for n in {HEAVY} if n in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    heavier = [sys.executable, "-c", script.replace("metrics_sink", "trainer")]
    assert "torch" in subprocess.run(heavier, capture_output=True, text=True, check=True).stdout
