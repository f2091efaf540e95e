"""The training job with its storage in S3: whole there, and found by a machine that knows nothing.

Every submission has an empty cache folder, as another head node would. They share this process,
because starting processes is what a tiny job spends its time on; from its command line and on Ray
the job runs in test_train_job.py.
"""

import contextlib
import io
import json
import os

import numpy as np
import pytest
from s3_server import BUCKET, s3_server
from tiny_job import make_run, write_inputs

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import join, list_files, open_storage, read_bytes, remove_folder
from rayembed.config.document import read_yaml
from rayembed.config.override import override
from rayembed.errors import ArtifactError
from rayembed.machine import hardware
from rayembed.machine.hardware import Precision
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.pipeline.run.runtime import Here
from rayembed.pipeline.run.train import train
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.checkpoints.weights import read_made_of
from rayembed.training.metrics_sink import MetricsSink

pytestmark = pytest.mark.job

STORAGE = f"s3://{BUCKET}/outputs"
RUN = f"{STORAGE}/runs/tiny"


@pytest.fixture(scope="module")
def storage():
    """An empty bucket; the environment is as before afterwards."""
    before = dict(os.environ)
    with s3_server() as variables:
        os.environ.update(variables)
        yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module")
def elsewhere(storage, tmp_path_factory):
    """Runs the job with an empty cache and gives what it printed; only the bucket stays."""
    folder = tmp_path_factory.mktemp("job")
    write_inputs(folder)

    # Less is scored than in test_train_job.py: two models lie and are found as four do.
    settings = [f"placement.storage_path={STORAGE}", "placement.runtime=local"]
    settings += [f"placement.tracking_uri=sqlite:///{folder}/mlflow.db"]
    settings += ["evaluation.before_training=false", "evaluation.baselines=[]"]
    settings += ["model.backbone.dtype=auto"]
    measured = hardware.bfloat16_speed  # as the workers take it, which no test imitates

    def start(*assignments):
        os.environ["RAYEMBED_CACHE"] = str(tmp_path_factory.mktemp("cache"))
        run = override(make_run(folder), [*settings, *assignments])
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as printed,
        ):
            patch.setattr(hardware, "bfloat16_speed", measured)
            train(run)
        return printed.getvalue()

    return start


@pytest.fixture(scope="module")
def trained(elsewhere):
    return elsewhere()


def _written(path):
    filesystem, inside = open_storage(path)
    return filesystem.get_file_info(inside).mtime_ns


def _table(printed):
    rows = [line.split() for line in printed.splitlines() if line.startswith("stage ")]
    assert len(rows) == 2, printed
    return rows


def test_a_run_is_whole_in_storage(trained, tmp_path):
    files = list_files(RUN, recursive=True)
    small = {"run.yaml", "metrics.jsonl", "mlflow.json", "mlflow_outbox.jsonl"}
    small |= {"mlflow_outbox.taken", "scores.md", "scores.csv", "scores.png", "loss.png"}
    assert small <= set(files)
    for stage in ("retrieval", "blend"):
        held = {name for name in files if name.startswith(f"models/{stage}/")}
        assert {f"models/{stage}/{n}" for n in ("rayembed.json", "made-of.json")} <= held
    assert "models/blend/README.md" in files
    results = [name for name in files if name.endswith("/WikiSentenceRetrieval.json")]
    assert len(results) == 2
    assert all(name.startswith("evaluation/results/") for name in results)
    steps = [
        json.loads(line)["global_step"] for line in read_bytes(f"{RUN}/metrics.jsonl").splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert f"resolve_model('{RUN}/models/blend')" in trained
    folder = resolve_model(f"{RUN}/models/blend", cache=tmp_path)
    vectors = encode(load_model(folder), ["Paris", "own7"], role="document")
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def test_elsewhere_it_does_only_what_is_not_done(trained, elsewhere, monkeypatch):
    """The second stage is lost; everything before it stays as it is, and it comes out the same,
    though the machines there compute another number type fast.
    """
    begun = read_yaml(read_bytes(f"{RUN}/run.yaml").decode())["model"]["backbone"]["dtype"]
    assert begun in ("float32", "bfloat16")
    other = Precision("float32" if begun == "bfloat16" else "bfloat16", "so it is there")
    kept = ["retrieval/weights.safetensors", "models/retrieval/made-of.json"]
    kept += [name for name in list_files(RUN, recursive=True) if name.startswith("evaluation/")]
    before = {name: _written(join(RUN, name)) for name in kept}
    first = read_bytes(f"{RUN}/metrics.jsonl").splitlines()
    weights = read_made_of(f"{RUN}/blend/weights.safetensors")  # and a digest of the tensors
    remove_folder(f"{RUN}/blend")
    with monkeypatch.context() as there:
        there.setattr(Here, "precision", lambda self, placement: other)
        assert "tiny version 1 (models:/tiny@candidate)" in elsewhere()
    assert {name: _written(join(RUN, name)) for name in kept} == before
    assert read_made_of(f"{RUN}/blend/weights.safetensors") == weights
    second = read_bytes(f"{RUN}/metrics.jsonl").splitlines()
    assert second[:4] == first[:4]
    assert second[4:] != first[4:], "the second stage ran again"
    assert [json.loads(line)["global_step"] for line in second] == [1, 2, 3, 4, 5, 6]
    # Where bfloat16 is emulated a model that is saved in it is scored in float32.
    assert _table(elsewhere()) == _table(trained)
    assert read_bytes(f"{RUN}/metrics.jsonl").splitlines() == second, "nothing is left to train"


def test_another_run_of_that_name_is_refused_elsewhere(trained, elsewhere):
    before = _written(f"{RUN}/run.yaml")
    with pytest.raises(ArtifactError, match=f"cannot go on in '{RUN}': there is another run of"):
        elsewhere("seed=1")
    assert _written(f"{RUN}/run.yaml") == before


def test_a_step_that_a_checkpoint_counts_is_in_storage(storage, tmp_path):
    place = f"{STORAGE}/sink/metrics.jsonl"
    sink = MetricsSink(str(tmp_path / "metrics.jsonl"), place)
    for step in (1, 2):
        sink.append({"stage": "only", "step": step, "loss": 0.5}, 10)
    sink.keep()
    (tmp_path / "fetched.jsonl").write_bytes(read_bytes(place))
    records = MetricsLog(tmp_path / "fetched.jsonl").records()
    assert [record["global_step"] for record in records] == [11, 12]
