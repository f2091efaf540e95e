"""CDE under evaluation: the context comes from each task's corpus, or as the settings say."""

import logging

import numpy as np
import pytest
from datasets import Dataset
from mteb.types import PromptType
from plain_spec_model import check_with_mock_tasks
from tiny_models import save_cde_stages

from rayembed.config.evaluation import ModelUnderTest, Prompts
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError
from rayembed.evaluation import rayembed_spec
from rayembed.evaluation.loaded_spec import loaded_spec
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.model import PooledModel, document_texts
from rayembed.evaluation.pooled.pool import OneWorker
from rayembed.evaluation.prompts import ModelPrompts, unsaved_prompts
from rayembed.evaluation.rayembed_spec import lengths_read
from rayembed.evaluation.run_scores import make_spec
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import corpus_context, encode, encode_context

DOCUMENTS = [
    "dogs live in ancient places",
    "paris is the capital of france",
    "7 foxes and cats",
    "the wonders of the world",
    "where do cats live",
    "a brown dog jumps",
    "passages that answer a question",
]
QUERIES = ["where do dogs live", "capital of france"]


class Metadata:
    """What the model reads of a task."""

    modalities = ("text",)
    prompt = None

    def __init__(self, name="MadeUp", kind="Retrieval"):
        self.name, self.type = name, kind

    def get_modalities(self, prompt_type):
        return ["text"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model without a corpus, and one with a corpus of other documents."""
    folder = tmp_path_factory.mktemp("cde")
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": 4,
        "output": "residual",
        "query_max_length": 48,
        "document_max_length": 48,
    }
    model = build_model(parse(CDEConfig, config), save_cde_stages(folder), seed=5).eval()
    model.save(folder / "plain")
    model.set_corpus(encode_context(model, ["larger dogs", "lazy foxes"]))
    model.save(folder / "with-corpus")
    return folder


def spec_of(folder, **settings):
    return make_spec(parse(ModelUnderTest, {"reference": str(folder), **settings}))


def pooled(spec, store=None):
    return PooledModel(spec, OneWorker(EncodingWorker(spec, store, "cpu")))


def corpus(texts=DOCUMENTS):
    return Dataset.from_dict({"id": [f"d{i}" for i in range(len(texts))], "text": list(texts)})


def search(model, texts=DOCUMENTS, task="MadeUp"):
    model.index(corpus(texts))
    queries = Dataset.from_dict({"id": ["q0", "q1"], "text": QUERIES})
    found = model.search(
        queries, task_metadata=Metadata(task), hf_split="test", hf_subset="default", top_k=3
    )
    return {query: dict(sorted(scores.items())) for query, scores in found.items()}


def by_hand(model, context, texts=DOCUMENTS):
    """Scores of all documents, with the prefixes of section 10.7."""
    queries = encode(model, QUERIES, role="query", context=context)
    documents = encode(model, texts, role="document", context=context)
    return queries @ documents.T


def assert_best(found, scores):
    for row, query in enumerate(("q0", "q1")):
        assert len(found[query]) == 3
        for name, score in found[query].items():
            assert score == pytest.approx(scores[row, int(name[1:])], abs=1e-5)
        assert min(found[query].values()) >= np.sort(scores[row])[-3] - 1e-5


def noted(monkeypatch):
    """All texts that go through a model from now on, those of contexts aside."""
    texts = []

    def encode_and_note(model, some, **options):
        texts.extend(some)
        return encode(model, some, **options)

    monkeypatch.setattr(rayembed_spec, "encode", encode_and_note)
    return texts


def test_the_context_is_drawn_from_the_corpus_that_is_searched(folders, tmp_path, monkeypatch):
    spec = spec_of(folders / "plain")
    model = load_model(folders / "plain")
    context = corpus_context(model, document_texts(corpus(), range(len(DOCUMENTS))))
    expected = by_hand(model, context)
    assert np.abs(expected - by_hand(model, None)).max() > 1e-3
    store = EmbeddingStore(str(tmp_path))
    for kept in (None, store, store):
        assert_best(search(pooled(spec, kept)), expected)
    # Another corpus is another context, also for documents that both have.
    other = [*DOCUMENTS[:3], *(f"{text} and paris" for text in DOCUMENTS[3:])]
    one, embedded = pooled(spec, store), noted(monkeypatch)
    search(one)
    assert embedded == [], "the first corpus is kept"
    assert_best(search(one, other, "Other"), by_hand(model, corpus_context(model, other), other))
    assert sorted(embedded) == sorted([*QUERIES, *other])


def test_texts_of_tasks_without_a_corpus_have_the_context_of_the_first_ones(folders):
    model = load_model(folders / "plain")
    one = pooled(spec_of(folders / "plain", prompts={"table": "cde"}))
    metadata = Metadata("Topics", "Clustering")
    context = corpus_context(model, DOCUMENTS)
    for texts in (DOCUMENTS, QUERIES):
        found = one.encode(
            [{"text": texts}], task_metadata=metadata, hf_split="test", hf_subset="default"
        )
        # A text of a symmetric task is a query, with the prefix of its kind of task.
        expected = encode(model, texts, role="query", instruction="clustering: ", context=context)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_the_model_passes_mtebs_own_check_in_the_context_of_each_task(folders):
    one = pooled(spec_of(folders / "plain"))
    ran = check_with_mock_tasks(one)
    assert len(ran) >= 15
    assert len(one._contexts) >= 15
    names = {name for name, _ in one._contexts.values()}
    assert "" not in names, "every task has texts for a context"


def test_baselines_take_no_context_of_the_task(folders, caplog):
    model = load_model(folders / "with-corpus")
    with_saved = by_hand(model, None)
    assert_best(search(pooled(spec_of(folders / "with-corpus", context="random"))), with_saved)
    model.set_corpus(None)
    null = by_hand(model, None)
    assert "no corpus is set" in caplog.text
    caplog.clear()
    assert np.abs(null - with_saved).max() > 1e-3
    with caplog.at_level(logging.WARNING, logger="rayembed"):
        for folder in ("plain", "with-corpus"):
            assert_best(search(pooled(spec_of(folders / folder, context="none"))), null)
    assert not caplog.records, "none is what was asked for"
    with pytest.raises(ArtifactError, match="has no corpus saved"):
        spec_of(folders / "plain", context="random").load("cpu")


def test_what_decides_vectors_is_in_names_and_ways(folders):
    plain = folders / "plain"
    specs = [spec_of(plain), spec_of(plain, context="none"), spec_of(plain, context_seed=1)]
    assert len({spec.fingerprint for spec in specs}) == 3
    assert len({spec.meta.revision for spec in specs}) == 3
    encode_spec = specs[0].encode_spec(Metadata(), PromptType.document)
    assert (encode_spec.instruction, encode_spec.context) == ("search_document: ", "")
    assert specs[0].encode_spec(Metadata(), PromptType.query).instruction == "search_query: "


def test_a_loaded_model_is_scored_in_the_context_of_the_corpus(folders):
    model = load_model(folders / "plain")
    meta = model_meta("tiny", "r1")
    told = Prompts(instructions={"MadeUp": "classification: "})
    prompts = ModelPrompts(told, unsaved_prompts(model.config, {}))
    spec = loaded_spec(model, meta, prompts, lengths_read(model.config), seed=3)
    found = search(PooledModel(spec, OneWorker(EncodingWorker(spec, None, "cpu"))))
    context = corpus_context(model, DOCUMENTS, seed=3)
    queries = encode(model, QUERIES, role="query", instruction="classification: ", context=context)
    documents = encode(model, DOCUMENTS, role="document", context=context)
    assert_best(found, queries @ documents.T)
