"""What docs/loading.md says: other libraries give the vectors that rayembed gives."""

import faiss
import numpy as np
import pytest
from mteb.models import SentenceTransformerEncoderWrapper
from sentence_transformers import SentenceTransformer
from tiny_models import save_decoder, save_encoder

import rayembed.models.sentence_module  # noqa: F401  # lets sentence-transformers take its class
from rayembed.config.backbone import BackboneConfig, LatentAttentionPooling
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode

QUERIES = ["are cats larger than dogs", "Paris"]
DOCUMENTS = ["the quick brown fox jumps over the lazy dog", "the capital", "of France"]
TASK = "Given a question, find its answer"
BACKBONE = BackboneConfig(path="unused", dtype="float32")


@pytest.fixture(scope="module", params=["nvembed", "biencoder"])
def saved(request, tmp_path_factory):
    """Folder of a model with one instruction of its queries, the literal prompt, its vectors."""
    place = tmp_path_factory.mktemp(request.param)
    if request.param == "nvembed":
        pooling = LatentAttentionPooling(num_latents=4, num_heads=2, mlp_ratio=2)
        config = NVEmbedConfig(backbone=BACKBONE, pooling=pooling, lora=None)
        model = build_model(config, save_decoder(place / "start", "mistral"), seed=0)
    else:
        config = BiEncoderConfig(backbone=BACKBONE, query_max_length=32, document_max_length=48)
        model = build_model(config, save_encoder(place / "start"), seed=0)
    model.default_instructions = {"query": TASK}
    model.save(place / "model")
    ours = load_model(place / "model")
    vectors = encode(ours, QUERIES, role="query"), encode(ours, DOCUMENTS, role="document")
    bare = encode(ours, QUERIES, role="query", instruction="")
    assert np.abs(bare - vectors[0]).max() > 1e-3
    return str(place / "model"), config.prompt(TASK), vectors


def equal(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5)


def test_sentence_transformers(saved):
    folder, _, (queries, documents) = saved
    model = SentenceTransformer(folder, device="cpu")
    equal(model.encode_query(QUERIES), queries)
    equal(model.encode_document(DOCUMENTS), documents)
    equal(model.encode_query(QUERIES[0]), queries[0])


def test_mteb(saved):
    folder, _, (queries, documents) = saved
    model = SentenceTransformerEncoderWrapper(SentenceTransformer(folder, device="cpu"))
    equal(model.model.encode_query(QUERIES), queries)
    equal(model.similarity(queries, documents), queries @ documents.T)


def test_faiss(saved):
    folder, _, (queries, documents) = saved
    model = SentenceTransformer(folder, device="cpu")
    index = faiss.IndexFlatIP(model.get_embedding_dimension())
    index.add(model.encode_document(DOCUMENTS))
    scores, _ = index.search(model.encode_query(QUERIES), 2)
    equal(scores, np.sort(queries @ documents.T, axis=1)[:, ::-1][:, :2])


def test_langchain(saved):
    loader = pytest.importorskip("langchain_huggingface")
    folder, _, (queries, documents) = saved
    model = loader.HuggingFaceEmbeddings(
        model_name=folder,
        model_kwargs={"device": "cpu"},
        encode_kwargs={"prompt_name": "document"},
        query_encode_kwargs={"prompt_name": "query"},
    )
    equal(model.embed_documents(DOCUMENTS), documents)
    equal(model.embed_query(QUERIES[0]), queries[0])


def test_llama_index(saved):
    loader = pytest.importorskip("llama_index.embeddings.huggingface")
    folder, prompt, (queries, documents) = saved
    model = loader.HuggingFaceEmbedding(folder, device="cpu", query_instruction=prompt)
    equal(model.get_text_embedding_batch(DOCUMENTS), documents)
    equal(model.get_query_embedding(QUERIES[0]), queries[0])
