"""The proofs of compressed models: every way, graphs of CPU runtimes, and what these leave out."""

from pathlib import Path

import numpy as np
import pytest
from tiny_folders import save_tiny
from tiny_models import LINES

from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.proof.check import check, cosines
from rayembed.proof.proof import read_proof
from rayembed.proof.write import write_proof
from rayembed_extras.compression.compress import make_smaller
from rayembed_extras.compression.contract import CalibrationText
from rayembed_extras.compression.gptq import GPTQ
from rayembed_extras.compression.layers import Layers
from rayembed_extras.compression.quantised import Fp8, Int8
from rayembed_extras.compression.runtimes import Onnx, OpenVINO
from rayembed_extras.compression.vocabulary import Vocabulary

WAYS = {
    "layers": [Layers(number=1)],
    "vocabulary": [Vocabulary()],
    "both": [Layers(number=1), Vocabulary()],
    "int8": [Int8()],
    "fp8": [Fp8()],
    "gptq": [GPTQ(minimum_texts=4)],
    "onnx": [Onnx(precision="float32")],
    "onnx, int8": [Onnx(precision="int8-dynamic")],
    "openvino": [OpenVINO(precision="float32")],
}
TEXTS = [CalibrationText(text, role) for text in LINES for role in ("query", "document")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model with a proof."""
    folder = save_tiny("biencoder", tmp_path_factory.mktemp("plain") / "model")
    write_proof(folder)
    return folder


@pytest.mark.parametrize("name", WAYS)
def test_each_variant_has_a_proof_of_its_own(name, plain, tmp_path):
    folder = Path(make_smaller(str(tmp_path), "variant", WAYS[name], plain, TEXTS))
    proof = read_proof(folder)
    model = load_model(folder)

    def embed(texts):
        return np.stack([encode(model, text.text, role=text.role) for text in texts])

    assert check(proof, embed).same
    names = {mistake.name for mistake in proof.mistakes}
    assert names >= {"no_prompt", "no_eos", "double_bos"}
    in_graph = name.startswith(("onnx", "openvino"))
    assert ("cls_pooling" in names) == (not in_graph)  # a graph pools by itself
    assert proof.dtype == ("int8" if name == "onnx, int8" else "float32")
    if name in ("onnx", "openvino"):
        whole = read_proof(plain)
        assert proof.texts == whole.texts
        assert cosines(proof.vectors, whole.vectors)[0].min() >= proof.tolerance["float32"]
