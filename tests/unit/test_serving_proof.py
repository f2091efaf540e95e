"""The server compares itself with the model's proof at its start."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tiny_folders import save_biencoder

from rayembed.models.loading.load import load_model
from rayembed.proof.proof import read_proof
from rayembed.proof.write import write_proof
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.app import make_app
from rayembed_extras.serving.service import EmbeddingService
from rayembed_extras.serving.settings import Limits, ServedModel


@pytest.fixture
def folder(tmp_path):
    folder = save_biencoder(tmp_path / "model")
    write_proof(folder)
    return folder


def client_of(service):
    return TestClient(make_app({service.name: service}, Limits()))


def gauges(client):
    lines = client.get("/metrics").text.splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if "proof" in line[:20]}


def test_a_server_with_the_proofs_vectors_is_ready(folder):
    service = on_ray.load(ServedModel(name="m", model=str(folder), use_gpu=False), Limits(), None)
    client = client_of(service)
    assert client.get("/health").json() == {"status": "ready"}
    found = gauges(client)
    assert found['rayembed_proof_same{model="m"}'] == 1
    assert found['rayembed_proof_cosine{model="m"}'] > 0.99999


def test_a_server_with_other_vectors_is_not_ready_and_says_why(folder, caplog):
    """Its own prompts and lengths are checked, by the way of a request."""
    for change in (
        lambda tokenizer: tokenizer.prefixes.update(query="what "),
        lambda tokenizer: tokenizer.max_lengths.update(document=12),
    ):
        model = load_model(folder)
        change(model.tokenizer)
        with caplog.at_level(logging.ERROR):
            service = EmbeddingService("m", model, folder=folder)
        answer = client_of(service).get("/health")
        assert answer.status_code == 503
        said = answer.json()
        assert said["status"] == "other vectors"
        assert "stored reference vectors (proof/) have other vectors" in said["models"]["m"]
        assert "m is not ready: " in caplog.text
        found = gauges(client_of(service))
        assert found['rayembed_proof_same{model="m"}'] == 0
        assert found['rayembed_proof_cosine{model="m"}'] < 0.9999
        request = {"input": ["Paris"], "model": "m"}
        assert client_of(service).post("/v1/embeddings", json=request).status_code == 200


def test_a_cpu_embeds_no_very_long_text_at_the_start(folder, monkeypatch):
    """Which would take a model of 8,192 tokens a minute."""
    proof = read_proof(folder)
    turned = proof.vectors.copy()
    longest = next(i for i, text in enumerate(proof.texts) if text.about == "mixed case")
    turned[longest] = np.roll(turned[longest], 1)
    replace(proof, vectors=turned).write(folder)
    limit = len(proof.texts[longest].text)
    for most, status in ((limit, 503), (limit - 1, 200)):
        monkeypatch.setattr("rayembed_extras.serving.service._LONGEST_ON_CPU", most)
        service = EmbeddingService("m", load_model(folder), folder=folder)
        assert client_of(service).get("/health").status_code == status


def test_another_version_of_torch_is_named_beside_other_vectors(folder):
    proof = read_proof(folder)
    made_by = {**proof.made_by, "torch": "1.0"}
    replace(proof, made_by=made_by, vectors=np.roll(proof.vectors, 1, axis=1)).write(folder)
    service = EmbeddingService("m", load_model(folder), folder=folder)
    said = client_of(service).get("/health").json()["models"]["m"]
    assert "computed with torch 1.0 (here " in said


def test_a_folder_that_was_changed_behind_its_proof_is_not_ready(folder):
    path = folder / "rayembed.json"
    values = json.loads(path.read_text())
    values["model"]["document_max_length"] = 12
    path.write_text(json.dumps(values))
    service = EmbeddingService("m", load_model(folder), folder=folder)
    client = client_of(service)
    assert client.get("/health").status_code == 503
    assert "settings were changed" in client.get("/health").json()["models"]["m"]
    assert gauges(client) == {'rayembed_proof_same{model="m"}': 0}


def test_a_folder_without_a_proof_serves_with_a_warning(tmp_path, caplog):
    folder = save_biencoder(tmp_path / "model")
    service = EmbeddingService("m", load_model(folder), folder=folder)
    assert "m has no stored reference vectors (proof/)" in caplog.text
    assert client_of(service).get("/health").json() == {"status": "ready"}
    assert gauges(client_of(service)) == {}


def test_a_proof_of_an_earlier_format_is_served_with_a_warning(folder, caplog):
    path = folder / "proof" / "proof.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    service = EmbeddingService("m", load_model(folder), folder=folder)
    assert "have the earlier format 1" in caplog.text
    assert client_of(service).get("/health").json() == {"status": "ready"}


def test_the_tolerance_is_that_of_the_number_type(folder):
    """Vectors that bfloat16 may give are refused of float32."""
    proof = read_proof(folder)
    allowed = {"float32": 0.9999, "bfloat16": 0.99, "int8": 0.9}
    turned = proof.vectors + 0.05 * np.roll(proof.vectors, 1, axis=1)
    turned /= np.linalg.norm(turned, axis=1, keepdims=True)
    replace(proof, vectors=turned, tolerance=allowed).write(folder)
    for dtype, same in (("float32", False), ("bfloat16", True)):
        service = EmbeddingService("m", load_model(folder, dtype=dtype), folder=folder)
        assert (client_of(service).get("/health").status_code == 200) == same
