"""Files and packages of graphs: what the hub gives of them, and what a registered one needs."""

import json

import pytest

from rayembed.assets.hub import model_files
from rayembed.errors import ArtifactError
from rayembed.models.loading.saved_folder import read_graph
from rayembed.registry.register import _runtime, pip_requirements
from rayembed_extras.compression.runtimes import Onnx, OpenVINO
from rayembed_extras.compression.settings import COMPRESSIONS

BESIDE = ["config.json", "modules.json", "rayembed.json"]


def test_the_hub_gives_our_graphs_and_not_those_beside_other_weights():
    ours = [*BESIDE, "corpus.safetensors", "context.xml", "context.bin", "graph.bin", "graph.xml"]
    assert model_files([*ours, "README.md"]) == sorted(ours)
    assert model_files([*BESIDE, "graph.onnx", "graph.onnx.data"]) == sorted(
        [*BESIDE, "graph.onnx", "graph.onnx.data"]
    )
    assert model_files([*BESIDE, "model.safetensors", "model.onnx", "onnx/model.onnx"]) == sorted(
        [*BESIDE, "model.safetensors"]
    )


def test_a_registered_model_needs_the_runtime_of_its_graph_alone(tmp_path):
    def names(runtime):
        return {line.partition("==")[0] for line in pip_requirements(runtime)}

    assert not names(None) & {"onnxruntime", "openvino", "nncf", "onnx"}
    assert names("onnx") - names(None) == {"onnxruntime"}
    assert names("openvino") - names(None) == {"openvino"}
    (tmp_path / "rayembed.json").write_text(json.dumps({"graph": {"runtime": "onnx"}}))
    assert _runtime(tmp_path) == "onnx"
    (tmp_path / "rayembed.json").write_text("{}")
    assert _runtime(tmp_path) is None
    assert _runtime(tmp_path / "none") is None


def test_settings_of_a_graph_that_do_not_hold_are_told(tmp_path):
    stated = {"format_version": 2, "graph": {"runtime": "tensorrt", "file": "graph.engine"}}
    (tmp_path / "rayembed.json").write_text(json.dumps(stated))
    with pytest.raises(ArtifactError, match="settings of the graph"):
        read_graph(tmp_path)
    assert read_graph(tmp_path / "none") is None


def test_both_are_members_of_the_table_with_labels_of_their_own():
    classes = COMPRESSIONS.classes()
    assert (classes["onnx"], classes["openvino"]) == (Onnx, OpenVINO)
    ways = [
        *(cls(precision=one) for cls in (Onnx, OpenVINO) for one in ("float32", "int8-static")),
        OpenVINO(precision="int8-static", bfloat16=True),
    ]
    assert len({way.label for way in ways}) == len(ways)
