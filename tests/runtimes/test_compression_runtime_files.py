"""Files and packages of graphs: what the hub gives of them, and what a registered one needs."""

import json
from pathlib import Path

import pytest
from pydantic import ValidationError
from tiny_folders import save_biencoder

from rayembed.assets.folder_formats import format_of, stated_format
from rayembed.assets.hub import model_files
from rayembed.config.table import NamedTable
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.load import check_loadable, load_model
from rayembed.registry.register import _code, pip_requirements
from rayembed_extras.compression.runtime_model import GRAPH, read_graph
from rayembed_extras.compression.runtimes import Onnx, OpenVINO
from rayembed_extras.compression.settings import COMPRESSIONS, GraphConfig

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


def stated(folder, runtime):
    """A folder whose settings name a graph."""
    graph = {"runtime": runtime, "file": f"graph.{runtime}"}
    values = {"format_version": 2, "format": "graph", "graph": graph}
    (folder / "rayembed.json").write_text(json.dumps(values))
    return folder


def test_a_registered_model_needs_the_runtime_of_its_graph_and_its_code_alone(tmp_path):
    def names(packages=()):
        return {line.partition("==")[0] for line in pip_requirements(packages)}

    assert not names() & {"onnxruntime", "openvino", "nncf", "onnx"}
    for runtime, package in (("onnx", "onnxruntime"), ("openvino", "openvino")):
        own = format_of(stated(tmp_path, runtime))
        assert own is GRAPH
        assert names(own.packages(tmp_path)) - names() == {package}
    assert [Path(folder).name for folder in _code(own)] == ["rayembed", "rayembed_extras"]
    assert all((Path(folder) / "__init__.py").is_file() for folder in _code(own))
    assert [Path(folder).name for folder in _code(None)] == ["rayembed"]
    (tmp_path / "rayembed.json").write_text("{}")
    assert format_of(tmp_path) is None
    assert format_of(tmp_path / "none") is None
    (tmp_path / "rayembed.json").write_text("[]")
    with pytest.raises(ArtifactError, match="must hold a JSON object"):
        format_of(tmp_path)


def test_without_compression_a_graph_is_refused_with_what_reads_it(tmp_path, monkeypatch):
    from rayembed.assets import folder_formats

    save_biencoder(tmp_path)
    settings = json.loads((tmp_path / "rayembed.json").read_text())
    settings |= {"format": "graph", "graph": {"runtime": "onnx", "file": "graph.onnx"}}
    (tmp_path / "rayembed.json").write_text(json.dumps(settings))
    with pytest.raises(ArtifactError, match=r"graph files graph\.onnx are missing"):
        load_model(tmp_path)
    none = NamedTable("nothing", folder_formats.FolderFormat, "format", {})
    monkeypatch.setattr(folder_formats, "FORMATS", none)
    assert stated_format(tmp_path) == "graph"
    for load in (load_model, check_loadable):
        with pytest.raises(
            ConfigError, match=r"'graph', which no installed package .*'\.\[compress\]'"
        ):
            load(tmp_path)


def test_settings_of_a_graph_that_do_not_hold_are_told(tmp_path):
    stated = {"format_version": 2, "graph": {"runtime": "tensorrt", "file": "graph.engine"}}
    (tmp_path / "rayembed.json").write_text(json.dumps(stated))
    with pytest.raises(ArtifactError, match="settings of the graph"):
        read_graph(tmp_path)


def test_both_are_members_of_the_table_with_labels_of_their_own():
    classes = COMPRESSIONS.classes()
    assert (classes["onnx"], classes["openvino"]) == (Onnx, OpenVINO)
    ways = [
        *(cls(precision=one) for cls in (Onnx, OpenVINO) for one in ("float32", "int8-static")),
        OpenVINO(precision="int8-static", bfloat16=True),
    ]
    assert len({way.label for way in ways}) == len(ways)


@pytest.mark.parametrize("name", ["../graph.onnx", "/tmp/graph.onnx", "a/graph.onnx"])
def test_graphs_lie_in_their_folder(name):
    for setting in ("file", "context_file"):
        with pytest.raises(ValidationError):
            GraphConfig(**{"runtime": "onnx", "file": "graph.onnx", setting: name})
