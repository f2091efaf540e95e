"""The Python of docs/indexing.md runs as it stands."""

import re
import sys
import types
from pathlib import Path

import pytest
from made_up_index import documents, write
from tiny_folders import save_biencoder

PAGE = (Path(__file__).parents[2] / "docs" / "indexing.md").read_text(encoding="utf-8")


def block_with(text):
    """The block of Python with a text, in which a folder stands for the registered model."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
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
    exec(block_with("pyarrow.parquet"), names)
    assert len(names["table"]) == 20


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
