"""The teacher of mining, from a folder of sentence-transformers."""

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tiny_models import LINES, save_decoder, save_encoder

from rayembed.config.mining import MiningConfig
from rayembed.config.settings import parse
from rayembed.data.vectors.teacher import load_teacher
from rayembed.models.build import load_model
from rayembed.models.encoding import encode

TEXTS = ["where do cats live", "Paris is the capital of France"]


def test_prefixes_of_the_settings_replace_those_of_the_folder(tmp_path):
    encoder = save_encoder(tmp_path / "encoder")
    model = SentenceTransformer(
        modules=[Transformer(str(encoder)), Pooling(32, "mean")],
        device="cpu",
        prompts={"query": "the fox: ", "document": ""},
    )
    model.save(str(tmp_path / "teacher"))

    def vectors(**settings):
        config = parse(MiningConfig, {"teacher": str(tmp_path / "teacher"), **settings})
        encode = load_teacher(config)
        return encode(TEXTS, "query"), encode(TEXTS, "document")

    def expected(prefix):
        return model.encode([prefix + text for text in TEXTS], normalize_embeddings=True, prompt="")

    # The teacher works in bf16.
    for settings, queries in (({}, "the fox: "), ({"query_prefix": "the dog: "}, "the dog: ")):
        found = vectors(**settings)
        assert (found[0] * expected(queries)).sum(1).min() > 0.999
        assert (found[1] * expected("")).sum(1).min() > 0.999
    assert (expected("the fox: ") * expected("the dog: ")).sum(1).max() < 0.999
    assert (expected("the fox: ") * expected("")).sum(1).max() < 0.999


@pytest.mark.parametrize("save", [save_encoder, save_decoder], ids=["encoder", "decoder"])
def test_more_precise_than_bfloat16_throughout(tmp_path, save):
    texts = [" ".join(LINES[i % 5].split()[: 1 + i % 7]) for i in range(2, 60)]
    reference = str(save(tmp_path / "model"))
    found = load_teacher(parse(MiningConfig, {"teacher": reference}))(texts, "document")
    exact = encode(load_model(Path(reference), dtype="float32"), texts, role="document")
    rounded = encode(load_model(Path(reference), dtype="bfloat16"), texts, role="document")
    apart = [np.abs(vectors @ vectors.T - exact @ exact.T).mean() for vectors in (found, rounded)]
    assert 0 < apart[0] < apart[1], "not in bfloat16 at all, or throughout"
