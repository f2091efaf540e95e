"""all-MiniLM-L6-v2: our tokens, pooling and encoding against sentence-transformers' own."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from rayembed.assets.resolver import resolve_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.recipes.sample import MINILM

TEXTS = [
    "",
    "Paris",
    "Zürich is the largest city in Switzerland; 東京 is that of Japan 🙂",
    "  white space\n\tand [SEP] special tokens [MASK] in the text  ",
    "a text of more than 256 tokens " * 40,
    *(f"document number {i} about " + "cats and dogs " * (i % 17) for i in range(40)),
]

pytestmark = pytest.mark.assets


@pytest.fixture(scope="module")
def folder():
    return resolve_model(MINILM)


def test_same_vectors_as_sentence_transformers(folder):
    reference = SentenceTransformer(str(folder), device="cpu")
    model = load_model(folder)
    assert model.config.query_max_length == reference.max_seq_length == 256
    found = encode(model, TEXTS, role="document", tokens_per_batch=2048, allow_empty=True)
    expected = reference.encode(TEXTS)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # fp32, unit vectors
    ours = model.tokenizer(TEXTS[1:], "query")
    for text, tokens in zip(TEXTS[1:], ours, strict=True):
        theirs = reference.preprocess([text])["input_ids"][0]
        assert tokens["input_ids"].tolist() == theirs.tolist()


def test_bfloat16_stays_near(folder):
    exact, rounded = load_model(folder), load_model(folder, dtype="bfloat16")
    one, two = (encode(m, TEXTS[1:], role="document") for m in (exact, rounded))
    assert (one * two).sum(axis=1).min() > 0.998  # 8 bits through six layers


def test_saved_again_it_is_still_the_same(folder, tmp_path):
    model = load_model(folder)
    model.save(tmp_path / "model")
    again = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    found = encode(model, TEXTS[1:], role="query")
    np.testing.assert_allclose(again.encode_query(TEXTS[1:]), found, atol=1e-5)
