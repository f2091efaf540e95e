"""The Python of docs/indexing.md and docs/stores.md runs as it stands."""

import re
import sys
import types
from pathlib import Path

import pytest
from made_up_index import documents, write
from tiny_folders import save_biencoder

import rayembed

DOCS = Path(__file__).parents[2] / "docs"
PAGES = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("indexing.md", "stores.md"))


def block_with(text):
    """The block of Python with a text, in which a folder stands for the registered model."""
    blocks = re.findall(r"```python\n(.*?)```", PAGES, flags=re.DOTALL)
    (found,) = (block for block in blocks if text in block)
    return found.replace("models:/support@champion", "tiny")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_biencoder(tmp_path / "tiny")
    write(tmp_path / "articles.jsonl", documents(20))
    return tmp_path


def test_an_index_is_built_searched_and_read(folder):
    names = {}
    exec(block_with("rayembed.index("), names)
    assert names["made"].counts["new"] == 20
    assert len(names["hits"].ids[0]) == 10
    exec(block_with('pq.read_table(f"{folder}/articles_1")'), names)
    assert len(names["table"]) == 20


@pytest.mark.parametrize(
    ("kind", "text"), [("lance", "lancedb.connect"), ("faiss", "faiss.read_index(")]
)
def test_files_of_a_store_are_read_without_rayembed(kind, text, folder):
    pytest.importorskip({"lance": "lancedb"}.get(kind, kind))
    made = rayembed.index("articles.jsonl", "tiny", "articles", store=kind)
    names = {"query_vector": rayembed.load("tiny").encode_query("dogs")}
    exec(block_with(text), names)
    rows = names["table"].count_rows() if kind == "lance" else names["index"].ntotal
    assert rows == made.record.rows == 20


def test_qdrants_client_finds_points(folder, monkeypatch):
    client = pytest.importorskip("qdrant_client").QdrantClient
    rayembed.index("articles.jsonl", "tiny", "articles", store="qdrant", to="points")
    opened = client(path="points")
    monkeypatch.setattr("qdrant_client.QdrantClient", lambda **_: opened)
    monkeypatch.setenv("QDRANT_API_KEY", "none")
    names = {"vector": rayembed.load("tiny").encode_query("dogs")}
    exec(block_with("query_points"), names)
    assert names["point"].payload["text"]
    opened.close()


def test_a_model_is_langchains_embeddings(folder, monkeypatch):
    try:
        import langchain_core.embeddings  # noqa: F401
    except ImportError:
        made = types.ModuleType("langchain_core.embeddings")
        made.Embeddings = object
        monkeypatch.setitem(sys.modules, "langchain_core", types.ModuleType("langchain_core"))
        monkeypatch.setitem(sys.modules, "langchain_core.embeddings", made)
    names = {}
    exec(block_with("langchain_core.embeddings"), names)
    model = names["Model"]("tiny")
    assert len(model.embed_query("dogs")) == len(model.embed_documents(["dogs"])[0]) == 32
    assert model.embed_query("dogs") != model.embed_documents(["dogs"])[0]
