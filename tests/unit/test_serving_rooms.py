"""A server does as other rooms do: its devices, number types, room in memory, instructions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from made_up_articles import run_over
from small_device import SAYS
from tiny_models import save_encoder
from toy_model import ToyModel

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.machine.device import nodes_gpus
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.training.checkpoints.export import export
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.on_ray import with_devices
from rayembed_extras.serving.service import EmbeddingService
from rayembed_extras.serving.settings import Limits, ServedModel, ServingConfig

TEXTS = ["own3 place", "the sentence number 2"]
MANY = [f"{'a text of ' * (i % 7)}number {i}" for i in range(40)]
FITS = 130
"""Padded tokens that memory has room for; the longest text has 70."""


@pytest.mark.parametrize(
    ("gpus_there", "asked", "expected"),
    [
        (0, ["auto", "auto"], [False, False]),
        (1, ["auto"], [True]),
        (1, ["auto", "auto"], [False, False]),  # one of them would wait for ever
        (2, ["auto", "auto"], [True, True]),
        (1, [True, "auto"], [True, False]),
        (1, [False, "auto"], [False, True]),
    ],
)
def test_served_models_have_gpus_where_all_copies_have_one(gpus_there, asked, expected):
    models = [ServedModel(name=str(i), model="m", use_gpu=use) for i, use in enumerate(asked)]
    seen = nodes_gpus([{"CPU": 8.0, "GPU": float(gpus_there)}])
    settled = with_devices(ServingConfig(models=tuple(models)), seen)
    assert [model.use_gpu for model in settled.models] == expected


@pytest.mark.parametrize(
    ("gpus_there", "most", "expected"), [(1, 4, False), (4, 4, True), (1, 1, True)]
)
def test_copies_that_may_still_be_started_need_a_gpu_too(gpus_there, most, expected):
    model = ServedModel(name="m", model="m", autoscaling={"max_replicas": most})
    seen = nodes_gpus([{"CPU": 8.0, "GPU": float(gpus_there)}])
    (settled,) = with_devices(ServingConfig(models=(model,)), seen).models
    assert settled.use_gpu is expected


def test_a_server_on_a_gpu_rounds_products_by_name_alone(monkeypatch, tmp_path):
    folder, seen = save_encoder(tmp_path / "plain"), []
    monkeypatch.setattr(torch, "set_float32_matmul_precision", seen.append)
    loaded = SimpleNamespace(config=SimpleNamespace(embeds=True))
    monkeypatch.setattr(
        on_ray, "load_model", lambda _, *, dtype, device: seen.append(dtype) or loaded
    )
    monkeypatch.setattr(on_ray, "EmbeddingService", lambda *_, **__: None)
    for use_gpu, dtype in ((True, "tf32"), (False, "tf32"), (True, "float32")):
        model = {"model": str(folder), "name": "m", "use_gpu": use_gpu, "dtype": dtype}
        on_ray.load(parse(ServedModel, model), Limits(), None)
    assert seen == ["float32", "high", "float32", "float32"]


def test_a_server_goes_on():
    model = ToyModel().eval()
    expected = encode(model, MANY, role="query")
    forward, tried = model.forward, []

    def with_little_room(batch, *given):
        tried.append(batch["input_ids"].numel())
        if tried[-1] > FITS:
            raise torch.OutOfMemoryError(SAYS)
        return forward(batch, *given)

    model.forward = with_little_room
    service = EmbeddingService("toy", model, tokens_per_batch=10_000)
    found = service._embed_together(model.tokenizer(MANY, "query"))
    np.testing.assert_allclose(np.stack(found), expected, atol=1e-6)
    assert max(tried) > FITS


def test_a_server_uses_the_instruction_that_the_model_learnt(tmp_path):
    run = override(
        run_over(tmp_path / "none.json"),
        [
            f"model.backbone={{path: {save_encoder(tmp_path / 'base')}, dtype: float32}}",
            "model.query_max_length=32",
            "model.document_max_length=32",
            "model.query_prefix=q ",
            "data.datasets.wiki.query_instruction=Find it",
        ],
    )
    export(run, None, str(tmp_path / "model"))
    model = load_model(tmp_path / "model")
    told = encode(model, TEXTS, role="query", instruction="Find it")
    bare = encode(model, TEXTS, role="query", instruction="")
    assert np.abs(told - bare).max() > 1e-3
    service = EmbeddingService("tiny", model, source="x")
    with TestClient(make_app({"tiny": service}, service.limits)) as client:

        def served(**body):
            answer = client.post("/v1/embeddings", json={"input": TEXTS, "role": "query", **body})
            return np.array([item["embedding"] for item in answer.json()["data"]])

        np.testing.assert_allclose(served(), told, atol=1e-6)
        np.testing.assert_allclose(served(instruction=""), bare, atol=1e-6)
