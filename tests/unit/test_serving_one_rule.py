"""A served model gives the vectors that evaluation takes, in every number type."""

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny_models import save_decoder
from word_articles import WORDS

import rayembed
from rayembed.config.evaluation import ModelUnderTest
from rayembed.config.settings import parse
from rayembed.evaluation.model_spec import EncodeSpec
from rayembed.evaluation.run_scores import make_spec
from rayembed.machine import hardware
from rayembed.models.loading.build import build_model
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.settings import Limits, ServedModel

EMULATED, WITH_UNITS = 1 / 30, 2.4


@pytest.mark.parametrize(
    ("dtype", "speed"),
    [("float32", WITH_UNITS), ("bfloat16", WITH_UNITS), ("bfloat16", EMULATED)],
)
def test_vectors_are_the_same_where_a_model_is_loaded_served_and_scored(
    monkeypatch, tmp_path, dtype, speed
):
    monkeypatch.setattr(hardware, "bfloat16_speed", lambda: speed)
    lengths = {"query_max_length": 250, "document_max_length": 250}
    given = {"path": "given", "dtype": dtype}
    settings = {"backbone": given, "pooling": {"kind": "mean"}, "lora": None, **lengths}
    config = parse(NVEmbedConfig, settings)
    parts = save_decoder(tmp_path / "llm", "mistral", sliding_window=None)
    build_model(config, parts, seed=3).eval().save(tmp_path / "model")
    folder = str(tmp_path / "model")

    def by_server(**settings):
        served = ServedModel(name="tiny", model=folder, **settings)
        app = make_app({"tiny": on_ray.load(served, Limits(), None)}, Limits())
        answer = TestClient(app).post("/v1/embeddings", json={"input": WORDS, "role": "document"})
        return np.array([item["embedding"] for item in answer.json()["data"]])

    scored = make_spec(ModelUnderTest(reference=folder)).load("cpu")(
        WORDS, EncodeSpec("document", "")
    )
    loaded = rayembed.load(folder).encode_document(WORDS)
    assert np.array_equal(loaded, scored)
    np.testing.assert_allclose(by_server(), scored, atol=1e-6)
    # Control: in the other type they are others.
    computed = "float32" if speed == EMULATED else dtype
    (other,) = {"float32", "bfloat16"} - {computed}
    assert np.abs(by_server(dtype=other) - scored).max() > 1e-4
