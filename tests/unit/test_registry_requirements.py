"""A registered model loads where nothing is installed but what it says it needs."""

import re

import numpy as np
import pytest
import yaml
from closure import closure, embed_alone, link_closure
from registered import registered_folders
from tiny_folders import ARCHITECTURES

from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.registry.register import pip_requirements

TEXTS = ["Paris is the capital of France", "the quick brown fox"]


def test_requirements_are_exact_and_on_an_index():
    found = pip_requirements()
    assert any(line.startswith("sentence-transformers==") for line in found)
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in found)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    home = tmp_path_factory.mktemp("models")
    folders = {kind: save(home / kind) for kind, save in ARCHITECTURES.items()}
    return folders


@pytest.fixture(scope="module")
def registered(saved, tmp_path_factory):
    return registered_folders(saved, tmp_path_factory.mktemp("storage"))


@pytest.mark.timeout(1800)
def test_every_architecture_loads_with_only_its_requirements_visible(saved, registered, tmp_path):
    lines = pip_requirements()
    for folder in registered.values():
        assert (folder / "requirements.txt").read_text().split() == lines
        conda = yaml.safe_load((folder / "conda.yaml").read_text())
        assert {"pip": lines} in conda["dependencies"]
    without = [line for line in lines if not line.startswith("xxhash")]
    lacking = link_closure(without, tmp_path / "lacking")
    rest = link_closure(set(lines) - set(without), tmp_path / "rest")
    assert not closure(without).keys() & {"xxhash", "rayembed", "datasets", "ray"}
    home = tmp_path / "home"
    home.mkdir()
    told = embed_alone(
        {
            "without xxhash": (registered["nvembed"], lacking),
            **{kind: (registered[kind], rest) for kind in ARCHITECTURES},
        },
        TEXTS,
        home,
    )
    # The control: with one package of the list taken away the first model does not load.
    assert set(told["errors"]) == {"without xxhash"}, told["errors"]
    assert "No module named 'xxhash'" in told["errors"]["without xxhash"]
    assert told["code"].startswith(tuple(map(str, registered.values())))
    for kind, folder in saved.items():
        model = load_model(folder)
        for vectors, role in zip(told["vectors"][kind], ("query", "document"), strict=True):
            wanted = encode(model, TEXTS, role=role)
            np.testing.assert_allclose(vectors, wanted, atol=1e-6, err_msg=f"{kind} {role}")
