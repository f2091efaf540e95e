"""A registered model loads where nothing is installed but what it says it needs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from closure import closure, link_closure
from mlflow import MlflowClient
from registered import register
from tiny_folders import ARCHITECTURES

from rayembed.models.encoding import encode
from rayembed.models.files import weights_fingerprint
from rayembed.models.load import load_model
from rayembed.registry.model_requirements import imported_modules, pip_requirements
from rayembed.registry.register import MODEL_ID_TAG
from rayembed.registry.tracking import Tracker

TEXTS = ["Paris is the capital of France", "the quick brown fox"]
ALONE = Path(os.environ["TESTS_SUPPORT"], "embed_alone.py")


def test_requirements_are_exact_and_on_an_index():
    found = pip_requirements()
    assert any(line.startswith("sentence-transformers==") for line in found)
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in found)


def test_only_what_loading_and_embedding_reach_is_required():
    """Training, evaluation and Ray are in the code that travels, and are no part of a model."""
    modules = imported_modules()
    assert {"mlflow", "torch", "peft", "xxhash", "sentence_transformers", "tokenizers"} <= modules
    assert not modules & {"rayembed", "json", "ray", "deepspeed", "mteb", "datasets", "typer"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    return {kind: save(home / kind) for kind, save in ARCHITECTURES.items()}


@pytest.fixture(scope="module")
def registered(saved, tmp_path_factory):
    """Folders of registered models, as MLflow downloads them, by architecture."""
    home = tmp_path_factory.mktemp("storage")
    uri = f"sqlite:///{home / 'mlflow.db'}"
    tracker = Tracker.open(
        uri, "tests", "run", "f" * 12, {}, {}, folder=home / "run", total_steps=1
    )
    client = MlflowClient(uri, uri)
    folders = {}
    for kind, folder in saved.items():
        made = register(
            folder,
            kind,
            tracker=tracker,
            scores={},
            weights_fingerprint=weights_fingerprint(folder),
            dimensions=(),
            instruction_template=None,
            global_step=0,
        )
        model_id = client.get_model_version(kind, str(made.version)).tags[MODEL_ID_TAG]
        place = client.get_logged_model(model_id).artifact_location
        folders[kind] = place.removeprefix("file://")
    return folders


@pytest.mark.timeout(1800)
def test_every_architecture_loads_with_only_its_requirements_visible(saved, registered, tmp_path):
    lines = pip_requirements()
    for folder in map(Path, registered.values()):
        assert (folder / "requirements.txt").read_text().split() == lines
        conda = yaml.safe_load((folder / "conda.yaml").read_text())
        assert {"pip": lines} in conda["dependencies"]
    without = [line for line in lines if not line.startswith("xxhash")]
    lacking = link_closure(without, tmp_path / "lacking")
    rest = link_closure(set(lines) - set(without), tmp_path / "rest")
    assert not closure(without).keys() & {"xxhash", "rayembed", "datasets", "ray"}
    answer = tmp_path / "answer.json"
    asked = {
        "lacking": str(lacking),
        "rest": str(rest),
        "models": dict(sorted(registered.items(), key=lambda item: item[0] == "biencoder")),
        "texts": TEXTS,
        "answer": str(answer),
    }
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ALONE)],
        input=json.dumps(asked),
        cwd=home,
        env={
            "HOME": str(home),
            "PATH": "/usr/bin:/bin",
            "HF_HUB_OFFLINE": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(answer.read_text())
    # The control: with one package of the list taken away the first model does not load.
    assert "No module named 'xxhash'" in told["error"]
    assert told["code"].startswith(registered["nvembed"])
    for kind, folder in saved.items():
        model = load_model(folder)
        for vectors, role in zip(told["vectors"][kind], ("query", "document"), strict=True):
            wanted = encode(model, TEXTS, role=role)
            np.testing.assert_allclose(vectors, wanted, atol=1e-6, err_msg=f"{kind} {role}")
