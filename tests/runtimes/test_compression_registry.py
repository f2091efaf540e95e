"""A registered variant loads where nothing is installed but what it says it needs."""

import numpy as np
import pytest
import yaml
from closure import closure, embed_alone, link_closure
from registered import registered_folders
from tiny_folders import save_biencoder

from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.registry.register import format_requirements, pip_requirements
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.quantised import Int8
from rayembed_extras.compression.runtimes import Onnx, OpenVINO

TEXTS = ["Paris is the capital of France", "the quick brown fox"]
WAYS = {
    "int8": Int8(),
    "onnx": Onnx(precision="float32"),
    "openvino": OpenVINO(precision="float32"),
}
ADDED = {"int8": "compressed-tensors", "onnx": "onnxruntime", "openvino": "openvino"}


@pytest.mark.timeout(1800)
def test_a_variant_loads_with_only_its_requirements_visible(tmp_path):
    plain = save_biencoder(tmp_path / "plain")
    texts = [CalibrationText(text, role) for text in TEXTS for role in ("query", "document")]
    for name, way in WAYS.items():
        way.compress(CompressionSource(plain, texts), tmp_path / name)
    made = registered_folders({name: tmp_path / name for name in WAYS}, tmp_path)
    shared = pip_requirements()
    lacking = link_closure(shared, tmp_path / "lacking")
    assert not closure(shared).keys() & {"onnxruntime", "openvino", "compressed-tensors"}
    asked = {"without onnxruntime": (made["onnx"], lacking)}
    for name, folder in made.items():
        lines = (folder / "requirements.txt").read_text().split()
        of_format = format_requirements(tmp_path / name)
        assert lines == [*pip_requirements([] if of_format else [ADDED[name]]), *of_format]
        conda = yaml.safe_load((folder / "conda.yaml").read_text())
        assert {"pip": lines} in conda["dependencies"]
        rest = set(lines) - set(shared)
        (added,) = rest
        assert added.partition("==")[0] == ADDED[name]
        asked[name] = (folder, link_closure(rest, tmp_path / f"{name}-rest"))
    (home := tmp_path / "home").mkdir()
    told = embed_alone(asked, TEXTS, home)
    assert set(told["errors"]) == {"without onnxruntime"}, told["errors"]
    assert "onnxruntime" in told["errors"]["without onnxruntime"]
    for name in WAYS:
        # A graph has the vectors of the model that it was made of.
        model = load_model(tmp_path / name if name == "int8" else plain)
        for role, vectors in zip(("query", "document"), told["vectors"][name], strict=True):
            wanted = encode(model, TEXTS, role=role)
            np.testing.assert_allclose(vectors, wanted, atol=1e-6 if name == "int8" else 1e-5)
