"""Graphs of CPU runtimes, in float32 and int8, against the proof of the model they are made of."""

import json
import re
import shutil

import onnx
import pytest
import torch
from proved_models import save_proved
from sentence_transformers import SentenceTransformer

from rayembed.errors import ArtifactError, ConfigError
from rayembed.proof.proof import read_proof
from rayembed.proof.write import write_proof
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


class TokenVectors(torch.nn.Module):
    """A transformer with tensors as its inputs and output."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, mask, types):
        return self.model(
            input_ids=ids, attention_mask=mask, token_type_ids=types
        ).last_hidden_state


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    """The folder as other tools export it: a graph of token vectors in place of the weights."""
    home = tmp_path_factory.mktemp("exported") / "model"
    ignored = shutil.ignore_patterns("model.safetensors", "rayembed.json", "proof")
    shutil.copytree(folder, home, ignore=ignored)
    dense = next(folder.glob("*_Dense"))
    shutil.copyfile(dense / "model.safetensors", home / dense.name / "model.safetensors")
    model = SentenceTransformer(str(folder), device="cpu")
    read = model.tokenizer(["one text", "another, longer text"], padding=True, return_tensors="pt")
    read["token_type_ids"] = torch.zeros_like(read["input_ids"])
    names = ["input_ids", "attention_mask", "token_type_ids"]
    (home / "onnx").mkdir()
    shape = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    torch.onnx.export(
        TokenVectors(model[0].auto_model),
        tuple(read[name] for name in names),
        home / "onnx" / "model.onnx",
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_shapes=[shape] * len(names),
        dynamo=True,
        verbose=False,
    )
    return home


def test_an_onnx_file_of_another_tool(folder, exported):
    for target in (exported / "onnx" / "model.onnx", exported):
        verdict = verify(target, folder, repeat=1)
        assert verdict.same, verdict.line
        assert verdict.number_type == "float32"
    with pytest.raises(ConfigError, match="no proof to compare"):
        verify(exported / "onnx" / "model.onnx")


def test_a_mistake_in_an_onnx_file_is_named(folder, exported, tmp_path):
    home = shutil.copytree(exported, tmp_path / "model")
    path = home / "1_Pooling" / "config.json"
    modes = json.loads(path.read_text())
    modes |= {"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}
    path.write_text(json.dumps(modes))
    assert verify(home / "onnx" / "model.onnx", folder, repeat=1).mistakes == ("cls_pooling",)
    (home / "modules.json").unlink()
    with pytest.raises(ArtifactError, match=r"names no pooling: copy modules\.json and 1_Pooling"):
        verify(home / "onnx" / "model.onnx", folder)
    (home / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json next to"):
        verify(home / "onnx" / "model.onnx", folder)


def changed_graph(exported, home, change):
    """A copy of the exported folder whose graph `change(model)` has changed."""
    home = shutil.copytree(exported, home)
    file = home / "onnx" / "model.onnx"
    model = onnx.load(file)
    change(model)
    onnx.save(model, file)
    return file


@pytest.mark.parametrize("name", ["attention_mask", "token_type_ids"])
@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "INT32", "BOOL"])
def test_inputs_of_an_onnx_file_have_its_number_type(kind, name, folder, exported, tmp_path):
    number = getattr(onnx.TensorProto, kind)

    def change(model):
        (given,) = (one for one in model.graph.input if one.name == name)
        given.type.tensor_type.elem_type = number
        for node in model.graph.node:
            node.input[:] = ["whole" if one == name else one for one in node.input]
        cast = onnx.helper.make_node("Cast", [name], ["whole"], to=onnx.TensorProto.INT64)
        model.graph.node.insert(0, cast)

    verdict = verify(changed_graph(exported, tmp_path / "model", change), folder, repeat=1)
    assert verdict.same, verdict.line


@pytest.mark.parametrize(
    ("name", "kind"),
    [("task_id", "INT64"), ("past_key_values.0.key", "FLOAT"), ("input_ids_mask", "STRING")],
)
def test_an_onnx_file_with_other_inputs_is_refused_by_name(name, kind, folder, exported, tmp_path):
    def change(model):
        number = getattr(onnx.TensorProto, kind)
        model.graph.input.append(onnx.helper.make_tensor_value_info(name, number, [1]))

    file = changed_graph(exported, tmp_path / "model", change)
    words = rf"has the inputs {re.escape(name)} \(tensor\({kind.lower()}\)\), .* allowed: input_ids"
    with pytest.raises(ArtifactError, match=words):
        verify(file, folder)


@pytest.mark.parametrize("stated", [None, 320, 200])
def test_an_onnx_file_reads_each_role_to_its_length(stated, folder, exported, tmp_path):
    two = shutil.copytree(folder, tmp_path / "two")
    path = two / "rayembed.json"
    settings = json.loads(path.read_text())
    settings["model"]["query_max_length"] = 24
    path.write_text(json.dumps(settings))
    write_proof(two)
    home = shutil.copytree(exported, tmp_path / "exported")
    (home / "sentence_bert_config.json").unlink(missing_ok=True)
    if stated is not None:
        (home / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": stated}))
    verdict = verify(home, two, within="float32", repeat=1)
    assert verdict.same == (stated != 200), verdict.line


def test_the_onnx_file_of_a_compressed_model_is_loaded_as_its_folder(folder, tmp_path):
    graph = tmp_path / "graph"
    WAYS["onnx"].compress(CompressionSource(folder, [CalibrationText("Paris", "query")]), graph)
    (file,) = graph.glob("*.onnx")
    verdict = verify(file, folder, repeat=1)
    assert verdict.same, verdict.line
    assert verdict.figures["software"] == "rayembed"
