"""A registered graph loads where nothing is installed but what it says it needs."""

import numpy as np
import pytest
from closure import closure, embed_alone, link_closure
from registered import registered_folders
from tiny_folders import save_biencoder

from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.registry.register import pip_requirements
from rayembed_extras.compression.contract import CalibrationText, Source
from rayembed_extras.compression.runtimes import Onnx, OpenVINO

TEXTS = ["Paris is the capital of France", "the quick brown fox"]
WAYS = {"onnx": Onnx(precision="float32"), "openvino": OpenVINO(precision="float32")}


@pytest.mark.timeout(1800)
def test_a_graph_loads_with_only_its_requirements_visible(tmp_path):
    plain = save_biencoder(tmp_path / "plain")
    texts = [CalibrationText(text, role) for text in TEXTS for role in ("query", "document")]
    for name, way in WAYS.items():
        way.compress(Source(plain, texts), tmp_path / name)
    made = registered_folders({name: tmp_path / name for name in WAYS}, tmp_path)
    shared = pip_requirements()
    lacking = link_closure(shared, tmp_path / "lacking")
    assert not closure(shared).keys() & {"onnxruntime", "openvino"}
    asked = {"without onnxruntime": (made["onnx"], lacking)}
    for name, folder in made.items():
        lines = (folder / "requirements.txt").read_text().split()
        assert lines == pip_requirements(name)
        rest = set(lines) - set(shared)
        assert len(rest) == 1
        asked[name] = (folder, link_closure(rest, tmp_path / f"{name}-rest"))
    (home := tmp_path / "home").mkdir()
    told = embed_alone(asked, TEXTS, home)
    assert set(told["errors"]) == {"without onnxruntime"}, told["errors"]
    assert "onnxruntime" in told["errors"]["without onnxruntime"]
    for role, *found in zip(
        ("query", "document"), *(told["vectors"][name] for name in WAYS), strict=True
    ):
        wanted = encode(load_model(plain), TEXTS, role=role)
        for vectors in found:
            np.testing.assert_allclose(vectors, wanted, atol=1e-5)
