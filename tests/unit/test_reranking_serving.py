"""Ranking routes of the server with a reranker: scores of sentence-transformers, refusals."""

import asyncio
import json

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder
from tiny_scorers import PAIRS, QUERY, save_scorer

from rayembed.errors import ConfigError
from rayembed.models.loading.load import load_model
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.job import pin
from rayembed_extras.serving.pair_service import PairService
from rayembed_extras.serving.service import ServiceError
from rayembed_extras.serving.settings import Limits, ServedModel, ServingConfig

DOCUMENTS = [document for _, document in PAIRS]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The service, and the scores of sentence-transformers before a sigmoid."""
    folder = save_scorer(tmp_path_factory.mktemp("served") / "scorer")
    theirs = CrossEncoder(str(folder), device="cpu")
    pairs = [(QUERY, document) for document in DOCUMENTS]
    expected = theirs.predict(pairs, activation_fn=torch.nn.Identity())
    return PairService("judge", load_model(folder, dtype="float32")), expected


def answered(service, path, body):
    return json.loads(asyncio.run(service.answer(path, body)).content)


def test_documents_are_ranked_by_the_rerankers_scores(served):
    service, expected = served
    body = {"query": QUERY, "texts": DOCUMENTS}
    best = np.argsort(-expected, kind="stable").tolist()
    raw = answered(service, "/rerank", {**body, "raw_scores": True})
    assert [one["index"] for one in raw] == best
    np.testing.assert_allclose([one["score"] for one in raw], expected[best], atol=1e-5)
    found = answered(service, "/rerank", body)
    relevance = 1 / (1 + np.exp(-expected[best].astype(np.float64)))
    np.testing.assert_allclose([one["score"] for one in found], relevance, atol=1e-6)
    cohere = {"model": "judge", "query": QUERY, "documents": DOCUMENTS, "top_n": 2}
    results = answered(service, "/v1/rerank", cohere)["results"]
    assert [one["index"] for one in results] == best[:2]
    assert [one["relevance_score"] for one in results] == [one["score"] for one in found[:2]]


def test_a_pair_that_is_cut_is_refused_when_asked(served):
    service, _ = served
    body = {"query": QUERY, "texts": DOCUMENTS, "truncate": False}
    with pytest.raises(ServiceError, match=r"texts\[2\] is too long|texts\[3\] is too long"):
        asyncio.run(service.answer("/rerank", body))


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/embeddings", {"model": "judge", "input": "x"}), ("/embed", {"inputs": "x"})],
)
def test_vectors_are_refused(path, body, served):
    with pytest.raises(ServiceError, match="is a reranker, which gives no vectors"):
        asyncio.run(served[0].answer(path, body))


def test_a_replica_loads_a_reranker_and_settings_of_vectors_are_refused(served, tmp_path):
    folder = str(save_scorer(tmp_path / "scorer"))
    given = ServedModel(name="judge", model=folder, use_gpu=False)
    config = ServingConfig(models=(given,), storage_path=str(tmp_path))
    assert pin(config).models == (given,)
    service = on_ray.load(given, Limits(), None)
    body = {"query": QUERY, "texts": DOCUMENTS}
    found = [one["index"] for one in answered(service, "/rerank", body)]
    assert found == np.argsort(-served[1], kind="stable").tolist()
    with_arrays = given.model_copy(update={"token_arrays": "model"})
    with pytest.raises(ConfigError, match=r"models.judge.token_arrays has no effect"):
        pin(config.model_copy(update={"models": (with_arrays,)}))
