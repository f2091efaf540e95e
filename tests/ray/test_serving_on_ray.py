"""A registered model behind Ray Serve, asked by OpenAI's own client."""

import asyncio
import time

import httpx
import numpy as np
import openai
import pytest
from made_up_index import sentences, settings, write
from mlflow_uris import mlflow_at
from registered import register
from tiny_folders import save_biencoder, save_nvembed
from tiny_models import save_encoder

from rayembed.errors import PlacementError, WorkerError
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.pipeline.run import on_ray as ray_of_runs
from rayembed.registry.tracking import Tracker
from rayembed_extras.index_upgrades.named_index import REFRESH_SECONDS
from rayembed_extras.indexing.build import build_index
from rayembed_extras.serving import on_ray
from rayembed_extras.serving.app import digest
from rayembed_extras.serving.job import pin
from rayembed_extras.serving.settings import ServedModel, ServingConfig

pytestmark = pytest.mark.ray

TEXTS = ["Paris is the capital of France", "the quick brown fox", "7 wonders", "are cats larger"]
KEY = "geheim"


@pytest.fixture(scope="module")
def tracking_uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tracking_uri):
    """A model whose version is champion in the registry."""
    home = tmp_path_factory.mktemp("model")
    folder = save_nvembed(home / "model")
    tracker = Tracker.open(
        tracking_uri, "tests", "run", "0" * 12, {}, {}, folder=home / "run", total_steps=1
    )
    register(
        folder,
        "tiny",
        tracker=tracker,
        weights_fingerprint="1" * 12,
        dimensions=(32, 8),
        instruction_template="Instruct: {instruction}\nQuery: ",
        global_step=1,
        alias="champion",
    )
    return folder


@pytest.fixture(scope="module")
def free_port():
    return ray_of_runs.free_port()


@pytest.fixture(scope="module")
def served(cluster, folder, tracking_uri, free_port, tmp_path_factory):
    """The address of the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYEMBED_CACHE", str(tmp_path_factory.mktemp("cache")))
        model = ServedModel(name="tiny", model="models:/tiny@champion", dtype="float32")
        asked = ServingConfig(models=(model,), port=free_port, tracking_uri=tracking_uri)
        config = pin(asked)
        assert [one.model for one in config.models] == ["models:/tiny/1"]
        on_ray.start(config, key_digests=frozenset([digest(KEY)]))
        yield f"http://127.0.0.1:{free_port}"
        on_ray.stop()


def vectors(answer):
    return np.array([item.embedding for item in answer.data], dtype=np.float32)


def test_openai_client_gets_the_vectors_of_the_folder(served, folder, tracking_uri):
    model = load_model(folder)
    with openai.OpenAI(base_url=f"{served}/v1", api_key=KEY, max_retries=0) as client:
        ask = client.embeddings.create
        documents = ask(model="tiny", input=TEXTS)  # the client asks for base64 by itself
        np.testing.assert_allclose(
            vectors(documents), encode(model, TEXTS, role="document"), atol=1e-5
        )
        assert documents.usage.prompt_tokens > len(TEXTS)
        told = {"role": "query", "instruction": "find a city"}
        queries = ask(model="tiny", input=TEXTS, extra_body=told, encoding_format="float")
        wanted = encode(model, TEXTS, role="query", instruction="find a city")
        np.testing.assert_allclose(vectors(queries), wanted, atol=1e-5)
        assert np.abs(vectors(queries) - vectors(documents)).max() > 1e-3
        np.testing.assert_allclose(
            vectors(queries), from_pyfunc(tracking_uri, {"input": TEXTS, **told}), atol=1e-5
        )
        one = ask(model="tiny", input=TEXTS[0])
        np.testing.assert_allclose(vectors(one), vectors(documents)[:1], atol=1e-5)
        assert [m.id for m in client.models.list()] == ["tiny"]
        with pytest.raises(openai.BadRequestError, match=r"allowed for this model: \[32\]"):
            ask(model="tiny", input="x", dimensions=5)
        with pytest.raises(openai.NotFoundError, match="no model 'other'"):
            ask(model="other", input="x")
    with (
        openai.OpenAI(base_url=f"{served}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.embeddings.create(model="tiny", input="x")


def test_langchains_client_gets_the_vectors_of_both_roles(served, folder):
    """As docs/serving.md writes it: texts, not token numbers, and a client for each role."""
    from langchain_openai import OpenAIEmbeddings

    asked = {"check_embedding_ctx_length": False, "base_url": f"{served}/v1", "api_key": KEY}
    model = load_model(folder)
    documents = OpenAIEmbeddings(model="tiny:document", **asked).embed_documents(TEXTS)
    np.testing.assert_allclose(documents, encode(model, TEXTS, role="document"), atol=1e-5)
    query = OpenAIEmbeddings(model="tiny:query", **asked).embed_query(TEXTS[0])
    np.testing.assert_allclose(query, encode(model, TEXTS[0], role="query"), atol=1e-5)


def from_pyfunc(tracking_uri, request):
    import mlflow

    with mlflow_at(tracking_uri):
        answer = mlflow.pyfunc.load_model("models:/tiny@champion").predict(request)
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)


def test_concurrent_requests_share_forward_passes(served, folder):
    """120 requests beside a large one take few calls of the encoder more, and get their own
    vectors.
    """
    texts = [f"{TEXTS[i % 4]} {i}" for i in range(120)]
    # Nobody waits for others to come: requests gather while the encoder is busy with this.
    large = [f"{i} {'the quick brown fox ' * 25}" for i in range(500)]

    def counts():
        lines = httpx.get(f"{served}/metrics", timeout=60).text.splitlines()
        pairs = [line.split() for line in lines if not line.startswith("#")]
        return {
            name.removeprefix("rayembed_").partition("_total")[0]: int(value)
            for name, value in pairs
        }

    async def ask_all():
        client = openai.AsyncOpenAI(base_url=f"{served}/v1", api_key=KEY, max_retries=0)
        async with client:
            first = asyncio.create_task(client.embeddings.create(model="tiny", input=large))
            while (await asyncio.to_thread(counts))["requests"] == before["requests"]:
                if first.done():
                    first.result()  # raises why it was refused
                await asyncio.sleep(0.02)
            ask = [client.embeddings.create(model="tiny", input=text) for text in texts]
            answers = await asyncio.gather(*ask)
            await first
            return answers

    before = counts()
    answers = asyncio.run(ask_all())
    after = counts()
    assert after["requests"] - before["requests"] == 121
    assert after["texts"] - before["texts"] == 620
    # Alone the large one takes at most 500 batches of one text (2,048 tokens hold 4 or more).
    assert after["batches"] - before["batches"] < 500 / 4 + 60
    found = np.concatenate([vectors(answer) for answer in answers])
    np.testing.assert_allclose(found, encode(load_model(folder), texts, role="document"), atol=1e-5)


def test_several_models_of_one_server(served, folder, free_port, tmp_path):
    """Each in copies of its own, chosen by name."""
    other = save_biencoder(tmp_path / "model")
    models = (
        ServedModel(name="tiny", model=str(folder), dtype="float32", token_arrays="model"),
        ServedModel(name="org/other", model=str(other), dtype="float32", cpus_per_replica=0.1),
    )
    config = pin(ServingConfig(models=models, port=free_port, limits={"texts": 500}))
    on_ray.start(config, key_digests=frozenset([digest(KEY)]))
    with openai.OpenAI(base_url=f"{served}/v1", api_key=KEY, max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny", "org/other"]
        for name, path in (("tiny", folder), ("org/other", other)):
            found = vectors(client.embeddings.create(model=f"{name}:query", input=TEXTS))
            wanted = encode(load_model(path), TEXTS, role="query")
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        numbers = client.embeddings.create(model="tiny", input=[[5, 6, 7]])
        assert len(numbers.data) == 1
        with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length"):
            client.embeddings.create(model="org/other", input=[[5, 6, 7]])
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny', 'org/other'"):
            client.embeddings.create(model="third", input="x")
        with pytest.raises(openai.APIStatusError, match="501 texts in one request"):
            client.embeddings.create(model="tiny", input=["x"] * 501)
        asked = {"model": "org/other", "query": TEXTS[0], "texts": TEXTS}
        headers = {"Authorization": f"Bearer {KEY}"}
        ranked = httpx.post(f"{served}/rerank", json=asked, headers=headers, timeout=60)
        assert sorted(one["index"] for one in ranked.json()) == [0, 1, 2, 3]
        assert httpx.post(f"{served}/rerank", json=asked, timeout=60).status_code == 401
        health = httpx.get(f"{served}/health", timeout=60)
        assert (health.status_code, health.json()) == (200, {"status": "ready"})
        told = httpx.get(f"{served}/metrics", timeout=60).text
        assert 'rayembed_texts_total{model="tiny"} 5\n' in told
        assert 'rayembed_texts_total{model="org/other"} 9\n' in told


def test_a_copy_searches_the_index_of_its_model(served, free_port, tmp_path):
    """In LanceDB, and says so when the index is gone."""
    pytest.importorskip("lancedb")
    folder = save_encoder(tmp_path / "model")
    write(tmp_path / "documents.jsonl", sentences(60))
    outputs = tmp_path / "outputs"
    build_index(settings(outputs, folder, tmp_path / "documents.jsonl", store__kind="lance"))
    model = ServedModel(name="m", model=str(folder), index="docs", dtype="float32")
    config = pin(ServingConfig(models=(model,), port=free_port, storage_path=str(outputs)))
    on_ray.start(config, key_digests=frozenset())
    with httpx.Client(base_url=served, timeout=60) as client:
        text = sentences(60)[7]["text"]
        for mode in ("dense", "hybrid"):
            answer = client.post("/search", json={"query": text, "k": 3, "mode": mode})
            assert answer.status_code == 200, answer.text
            hits = answer.json()["data"][0]["results"]
            assert (hits[0]["id"], len(hits)) == ("d7", 3)
            assert answer.headers["X-Index"] == "docs; table=docs_1"
        (outputs / "indexes" / "docs" / "index.json").unlink()
        time.sleep(REFRESH_SECONDS)
        gone = client.post("/search", json={"query": text})
        assert gone.status_code == 503
        assert "there is no index 'docs'" in gone.json()["error"]["message"]


def test_what_cannot_be_served_is_told(served, free_port, tmp_path):
    model = ServedModel(name="none", model=str(tmp_path))
    big = model.model_copy(update={"cpus_per_replica": 5000.0})
    with pytest.raises(PlacementError, match="that a copy of the model needs"):
        on_ray.start(ServingConfig(models=(big,), port=free_port), key_digests=frozenset())
    with pytest.raises(PlacementError, match=f"cannot listen on 127.0.0.1:{free_port}"):
        on_ray._check_port("127.0.0.1", free_port)
    # Last: it takes the place of the served model.
    with pytest.raises(WorkerError, match=r"could not be loaded: the model .* has neither"):
        on_ray.start(ServingConfig(models=(model,), port=free_port), key_digests=frozenset())
