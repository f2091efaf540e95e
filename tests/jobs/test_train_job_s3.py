"""The training job with its storage in S3: whole there, and found by a machine that knows nothing.

Every submission starts a Ray of its own and has an empty cache folder, as another head node would.
"""

import json

import numpy as np
import pytest
from s3_server import BUCKET, s3_server
from tiny_job import submit, write_inputs

from rayembed.assets.resolver import resolve_model
from rayembed.assets.storage import join, list_files, open_storage, read_bytes, remove_folder
from rayembed.models.build import load_model
from rayembed.models.encoding import encode
from rayembed.registry.metrics_log import MetricsLog
from rayembed.training.on_ray import _MetricsSink

pytestmark = [pytest.mark.job, pytest.mark.ray]

STORAGE = f"s3://{BUCKET}/outputs"
RUN = f"{STORAGE}/runs/tiny"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Submits the job with an empty cache; the server is the only thing that stays."""
    folder = tmp_path_factory.mktemp("job")
    write_inputs(folder)
    with s3_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)

        def start(*arguments):
            cache = tmp_path_factory.mktemp("cache")
            settings = {"placement.storage_path": STORAGE}
            settings["placement.tracking_uri"] = f"sqlite:///{folder}/mlflow.db"
            given = [x for key, value in settings.items() for x in ("--set", f"{key}={value}")]
            return submit(folder, *given, *arguments, environment={"RAYEMBED_CACHE": str(cache)})

        yield start


@pytest.fixture(scope="module")
def trained(elsewhere):
    done = elsewhere()
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def _written(path):
    filesystem, inside = open_storage(path)
    return filesystem.get_file_info(inside).mtime_ns


def _table(printed):
    return [line for line in printed.splitlines() if "│" in line]


def test_a_run_is_whole_in_storage(trained, tmp_path):
    files = list_files(RUN, recursive=True)
    small = {"run.yaml", "metrics.jsonl", "mlflow.json", "mlflow_outbox.jsonl"}
    small |= {"mlflow_outbox.taken", "scores.md", "scores.csv", "scores.png", "loss.png"}
    assert small <= set(files)
    for stage in ("untrained", "retrieval", "blend"):
        held = {name for name in files if name.startswith(f"models/{stage}/")}
        assert {f"models/{stage}/{n}" for n in ("rayembed.json", "made-of.json")} <= held
    assert "models/blend/README.md" in files
    results = [name for name in files if name.endswith("/WikiSentenceRetrieval.json")]
    assert len(results) == 4  # untrained, two stages, BM25
    assert all(name.startswith("evaluation/results/") for name in results)
    steps = [
        json.loads(line)["global_step"] for line in read_bytes(f"{RUN}/metrics.jsonl").splitlines()
    ]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert f"resolve_model('{RUN}/models/blend')" in trained
    folder = resolve_model(f"{RUN}/models/blend", cache=tmp_path)
    vectors = encode(load_model(folder), ["Paris", "own7"], role="document")
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3


def test_submitted_again_elsewhere_it_finds_everything_done(trained, elsewhere):
    names = ["metrics.jsonl", "blend/weights.safetensors", "models/blend/made-of.json"]
    names += [name for name in list_files(RUN, recursive=True) if name.startswith("evaluation/")]
    before = {name: _written(join(RUN, name)) for name in names}
    again = elsewhere()
    assert again.returncode == 0, again.stderr[-4000:]
    assert {name: _written(join(RUN, name)) for name in names} == before
    assert "tiny version 1 (models:/tiny@candidate)" in again.stdout
    assert _table(again.stdout) == _table(trained)


def test_elsewhere_it_goes_on_with_the_same_metrics_log(trained, elsewhere):
    first = read_bytes(f"{RUN}/metrics.jsonl").splitlines()
    remove_folder(f"{RUN}/blend")
    again = elsewhere()
    assert again.returncode == 0, again.stderr[-4000:]
    second = read_bytes(f"{RUN}/metrics.jsonl").splitlines()
    assert second[:4] == first[:4]
    assert second[4:] != first[4:], "the second stage ran again"
    assert [json.loads(line)["global_step"] for line in second] == [1, 2, 3, 4, 5, 6]


def test_another_run_of_that_name_is_refused_elsewhere(trained, elsewhere):
    before = _written(f"{RUN}/run.yaml")
    other = elsewhere("--set", "seed=1")
    assert other.returncode == 1
    assert f"cannot go on in '{RUN}': there is another run of that name" in other.stderr
    assert "Traceback" not in other.stderr
    assert _written(f"{RUN}/run.yaml") == before


def test_a_step_that_a_checkpoint_counts_is_in_storage(elsewhere, tmp_path):
    place = f"{STORAGE}/sink/metrics.jsonl"
    sink = _MetricsSink(str(tmp_path / "metrics.jsonl"), place)
    for step in (1, 2):
        sink.append({"stage": "only", "step": step, "loss": 0.5}, 10)
    sink.keep()
    (tmp_path / "fetched.jsonl").write_bytes(read_bytes(place))
    records = MetricsLog(tmp_path / "fetched.jsonl").records()
    assert [record["global_step"] for record in records] == [11, 12]
