"""Graphs of CPU runtimes, in float32 and int8, against the proof of the model they are made of."""

import shutil

import pytest
import torch
from proved_models import save_proved
from sentence_transformers import SentenceTransformer

from rayembed.proof.proof import read_proof
from rayembed_extras.compression.contract import CalibrationText, CompressionSource
from rayembed_extras.compression.runtimes import Onnx, OpenVINO
from rayembed_extras.verification import verify

WAYS = {
    "onnx": Onnx(precision="float32"),
    "onnx int8": Onnx(precision="int8-dynamic"),
    "openvino": OpenVINO(precision="float32"),
    "openvino int8": OpenVINO(precision="int8-dynamic"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_proved(tmp_path_factory.mktemp("mean") / "model", "mean")


@pytest.mark.parametrize("way", WAYS)
def test_no_alarm_for_a_graph_within_its_tolerance(way, folder, tmp_path):
    proof = read_proof(folder)
    texts = [CalibrationText(one.text, one.role) for one in proof.texts[:20]]
    graph = tmp_path / "graph"
    WAYS[way].compress(CompressionSource(folder, texts), graph)
    verdict = verify(graph, proof, repeat=1, within="int8" if "int8" in way else "bfloat16")
    assert verdict.same, verdict.line
    if "int8" not in way:
        assert verdict.number_type == "float32"


def test_no_alarm_for_bfloat16(folder):
    options = {"dtype": torch.bfloat16}
    model = SentenceTransformer(str(folder), device="cpu", model_kwargs=options)
    verdict = verify(model, folder, repeat=1)
    assert verdict.same, verdict.line


def test_a_mistake_in_a_graph_is_named(folder, tmp_path):
    """The control: the graph's own settings lose the prompts."""
    graph = tmp_path / "graph"
    texts = [CalibrationText("Paris", "query")]
    WAYS["onnx int8"].compress(CompressionSource(folder, texts), graph)
    shutil.rmtree(graph / "proof", ignore_errors=True)
    for name, old, new in (
        ("rayembed.json", '"query_prefix": "where "', '"query_prefix": ""'),
        ("rayembed.json", '"document_prefix": "the world "', '"document_prefix": ""'),
        ("config_sentence_transformers.json", '"query": "where "', '"query": ""'),
        ("config_sentence_transformers.json", '"document": "the world "', '"document": ""'),
    ):
        path = graph / name
        if path.exists():
            path.write_text(path.read_text().replace(old, new))
    found = verify(graph, read_proof(folder), repeat=1, within="int8")
    assert found.mistakes == ("no_prompt",)
