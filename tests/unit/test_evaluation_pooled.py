"""A pool of workers as a model of mteb: scores, what is embedded, what is kept."""

from types import SimpleNamespace

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_corpus import Metadata, made_up_corpus, made_up_queries, search
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from mteb.types import PromptType
from plain_scores import largest_difference, scores
from plain_spec_model import PlainSpecModel, few_experiments
from word_model import WordSpec

from rayembed.evaluation.jobs import TASK_RESULT, ScoreTask
from rayembed.evaluation.pooled.best_documents import BestDocuments, _best_first
from rayembed.evaluation.pooled.embedding_store import (
    EmbeddingStore,
    buckets_of,
    hashes_of,
    num_buckets,
)
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker, TopDocuments
from rayembed.evaluation.pooled.model import PooledModel, document_texts
from rayembed.evaluation.pooled.pool import OneWorker
from rayembed.results.scores import OF_QUERIES


def pooled(spec, store=None):
    return PooledModel(spec, OneWorker(EncodingWorker(spec, store, "cpu")))


def text_tasks():
    return [task for task in ALL_MOCK_TASK_TEST_GRID if task.metadata.modalities == ["text"]]


@pytest.mark.parametrize("task", text_tasks(), ids=lambda task: task.metadata.name)
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_scores_are_those_of_mteb(task, similarity, tmp_path):
    spec = WordSpec(similarity=similarity)
    store = EmbeddingStore(str(tmp_path))
    with few_experiments():
        plain = scores(PlainSpecModel(spec), task)
        # By workers alone, kept in files, and read from files.
        for kept in (None, store, store):
            assert largest_difference(plain, scores(pooled(spec, kept), task)) < 1e-6


def of_mteb(name):
    """A factory of one of mteb's mock tasks."""
    (task,) = (task for task in text_tasks() if task.metadata.name == name)
    return SimpleNamespace(name=name, num_texts=10, load=type(task))


@pytest.mark.parametrize("name", ["MockRetrievalTask", "MockMultilingualRetrievalTask"])
def test_retrieval_has_the_score_of_each_query_beside_mtebs_mean(name):
    outcome = ScoreTask(of_mteb(name)).run(pooled(WordSpec()))
    rows = [row for split in outcome[TASK_RESULT]["scores"].values() for row in split]
    for row in rows:
        assert np.mean(row[OF_QUERIES]) == pytest.approx(row["ndcg_at_10"], abs=1e-5)
        assert len(row[OF_QUERIES]) == 2
    reranked = ScoreTask(of_mteb("MockRerankingTask")).run(pooled(WordSpec()))
    assert OF_QUERIES not in reranked[TASK_RESULT]["scores"]["test"][0], "judged by another score"


def all_scores(spec, corpus, queries):
    """(Q, N) float64 cosines of each query with each document, and their ids."""
    embed = spec.load("cpu")
    documents = embed(
        document_texts(corpus, range(len(corpus))),
        spec.encode_spec(Metadata("MadeUp"), PromptType.document),
    )
    asked = embed(list(queries["text"]), spec.encode_spec(Metadata("MadeUp"), PromptType.query))
    documents, asked = (
        np.float64(v) / np.linalg.norm(np.float64(v), axis=1, keepdims=True)
        for v in (documents, asked)
    )
    return asked @ documents.T


def test_entries_are_ordered_by_query_score_and_document():
    numbers = np.random.default_rng(0)
    query = numbers.integers(0, 9, 5000).astype(np.int32)
    document = numbers.permutation(5000).astype(np.int64)
    score = numbers.standard_normal(5000).round(1).astype(np.float32)
    score[::7] = -0.0
    assert (score == 0).sum() > (np.signbit(score) & (score == 0)).sum(), "zeros of both signs"
    for values in (score, numbers.standard_normal(5000).astype(np.float32)):
        wanted = np.lexsort((document, -values, query))
        np.testing.assert_array_equal(_best_first(query, values, document), wanted)


@pytest.mark.parametrize("count", [40, 3000])
def test_a_search_finds_the_best_of_all_documents(count):
    spec, corpus, queries = WordSpec(), made_up_corpus(count), made_up_queries(9)
    found = search(pooled(spec), corpus, queries, 10)
    exact = all_scores(spec, corpus, queries)
    assert num_buckets(count) == (1 if count == 40 else 8)
    for row, query in enumerate(queries["id"]):
        best = np.sort(exact[row])[::-1][:10]
        kept = found[query]
        assert len(kept) == 10
        assert list(kept.values()) == pytest.approx(best, abs=1e-6)
        for document, score in kept.items():
            assert score == pytest.approx(exact[row, int(document[1:])], abs=1e-6)


def test_a_search_for_more_than_there_is_finds_everything():
    corpus, queries = made_up_corpus(40), made_up_queries(3)
    found = search(pooled(WordSpec()), corpus, queries, 1000)
    assert {query: set(of) for query, of in found.items()} == {
        query: set(corpus["id"]) for query in queries["id"]
    }


def test_copies_of_a_text_have_one_score_and_are_embedded_once(tmp_path):
    spec = WordSpec(log=str(tmp_path / "log"))
    corpus, queries = made_up_corpus(3000), made_up_queries(3)
    found = search(pooled(spec), corpus, queries, 3000)
    for of in found.values():
        assert of["d3"] != of["d7"] or corpus["title"][3] == corpus["title"][7]
        titled = {d: document_texts(corpus, [int(d[1:])])[0] for d in of}
        by_text = {}
        for document, text in titled.items():
            by_text.setdefault(text, set()).add(of[document])
        assert all(len(values) == 1 for values in by_text.values())
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == len(set(lines))


def test_ranked_documents_are_scored_and_no_others(tmp_path):
    spec = WordSpec(log=str(tmp_path / "log"))
    corpus, queries = made_up_corpus(1500), made_up_queries(4)
    drawn = np.random.default_rng(2)
    ranked = {
        query: [f"d{n}" for n in drawn.choice(1500, 30, replace=False)]
        for query in queries["id"][:3]
    }
    found = search(pooled(spec), corpus, queries, 20, ranked)
    exact = all_scores(spec, corpus, queries)
    for row, query in enumerate(queries["id"][:3]):
        of = {document: exact[row, int(document[1:])] for document in ranked[query]}
        best = sorted(of, key=of.get, reverse=True)[:20]
        assert found[query] == pytest.approx({d: of[d] for d in best}, abs=1e-6)
    assert found["q3"] == {}
    embedded = (tmp_path / "log").read_text().splitlines()
    wanted = {document for of in ranked.values() for document in of}
    assert sum(line.startswith("document") for line in embedded[: len(wanted) + 4]) <= len(wanted)


def embedded(spec):
    """Texts embedded since the last look, and forgets them."""
    from pathlib import Path

    path = Path(spec.log)
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines


def test_what_is_kept_is_not_embedded_again(tmp_path):
    spec, store = WordSpec(log=str(tmp_path / "log")), EmbeddingStore(str(tmp_path / "kept"))
    corpus, queries = made_up_corpus(3000), made_up_queries(5)
    first = search(pooled(spec, store), corpus, queries, 10)
    assert len(embedded(spec)) == len(set(document_texts(corpus, range(3000)))) + 5
    again = search(pooled(spec, store), corpus, queries, 10)
    assert embedded(spec) == []
    assert again == first
    # Nearly the same corpus, in another order: only its new documents are embedded.
    other = corpus.select(list(range(2990))[::-1])
    added = Dataset.from_dict({"id": ["n"], "title": [""], "text": ["something new"]})
    from datasets import concatenate_datasets

    search(pooled(spec, store), concatenate_datasets([other, added]), queries, 10)
    assert embedded(spec) == ["document\tsomething new"]


def test_tasks_side_by_side_share_what_they_embed(tmp_path):
    """Another task embeds the same corpus while this one is at its second unit."""
    spec, store = WordSpec(log=str(tmp_path / "log")), EmbeddingStore(str(tmp_path / "kept"))
    corpus, queries = made_up_corpus(3000), made_up_queries(5)
    others = []

    class Interrupted(OneWorker):
        def run(self, calls, queries_=None, context=None):
            for place, call in enumerate(calls):
                if isinstance(call, TopDocuments) and place == 1:
                    others.append(search(pooled(spec, store), corpus, queries, 10))
                yield from super().run([call], queries_, context)

    model = PooledModel(spec, Interrupted(EncodingWorker(spec, store, "cpu")))
    assert search(model, corpus, queries, 10) == others[0]
    documents = [line for line in embedded(spec) if line.startswith("document")]
    assert len(documents) == len(set(documents)) == len(set(document_texts(corpus, range(3000))))


def test_tasks_begin_at_different_units():
    class Noted(OneWorker):
        def run(self, calls, queries=None, context=None):
            for call in calls:
                if isinstance(call, TopDocuments):
                    order.append(call.unit.bucket.number)
                yield from super().run([call], queries, context)

    orders = {}
    for name in ("FEVER", "ClimateFEVER", "HotpotQA"):
        orders[name] = order = []
        model = PooledModel(WordSpec(), Noted(EncodingWorker(WordSpec(), None, "cpu")))
        search(model, made_up_corpus(3000), made_up_queries(2), 5, name=name)
    assert len({tuple(order) for order in orders.values()}) == 3
    assert {tuple(sorted(order)) for order in orders.values()} == {tuple(range(8))}


def test_a_broken_file_is_made_again(tmp_path, caplog):
    spec, store = WordSpec(log=str(tmp_path / "log")), EmbeddingStore(str(tmp_path / "kept"))
    corpus, queries = made_up_corpus(600), made_up_queries(2)
    first = search(pooled(spec, store), corpus, queries, 5)
    embedded(spec)
    files = sorted((tmp_path / "kept").rglob("*.npz"), key=lambda path: path.stat().st_size)
    files[-1].write_bytes(files[-1].read_bytes()[:-100])
    assert search(pooled(spec, store), corpus, queries, 5) == first
    assert "cannot read the stored embeddings" in caplog.text
    assert 0 < len(embedded(spec)) < 600


def test_half_precision_gives_the_same_from_the_model_and_from_files(tmp_path):
    spec = WordSpec()
    store = EmbeddingStore(str(tmp_path), precision="float16")
    corpus, queries = made_up_corpus(600), made_up_queries(4)
    first = search(pooled(spec, store), corpus, queries, 10)
    assert search(pooled(spec, store), corpus, queries, 10) == first
    assert search(pooled(spec), corpus, queries, 10) != first
    # What was kept in half precision does not get into scores that were asked for in full.
    full = EmbeddingStore(str(tmp_path), precision="float32")
    assert search(pooled(spec, full), corpus, queries, 10) == search(
        pooled(spec), corpus, queries, 10
    )


def test_vectors_that_are_not_finite_are_refused():
    class Broken(WordSpec):
        def load(self, device):
            return lambda texts, encode_spec: np.full((len(texts), 4), np.nan, np.float32)

    from rayembed.errors import DataError

    with pytest.raises(DataError, match="NaN or infinity for 3 of 3 texts"):
        search(pooled(Broken()), made_up_corpus(40), made_up_queries(3), 5)


def test_documents_are_read_as_mteb_reads_them():
    from mteb._create_dataloaders import create_dataloader

    corpus = made_up_corpus(60)
    loader = create_dataloader(
        corpus, task_metadata=Metadata("MadeUp"), prompt_type=PromptType.document, batch_size=7
    )
    assert document_texts(corpus, range(60)) == [t for batch in loader for t in batch["text"]]
    untitled = corpus.remove_columns("title")
    assert document_texts(untitled, np.array([4, 2])) == [
        untitled["text"][4].strip(),
        untitled["text"][2].strip(),
    ]


@pytest.mark.parametrize("count", [1, 511, 513, 131_072, 131_073, 10**6, 10**7, 10**8])
def test_buckets_are_neither_many_nor_large(count):
    of = num_buckets(count)
    assert of & (of - 1) == 0
    assert count / of <= 8192
    assert of == 1 or count / of > 128


def test_buckets_share_texts_evenly():
    hashes = hashes_of([f"text {n}" for n in range(20_000)])
    numbers = buckets_of(hashes, 64)
    counts = np.bincount(numbers, minlength=64)
    assert len(counts) == 64
    assert counts.min() > 200
    assert counts.max() < 430
    assert set(buckets_of(hashes[:9], 1)) == {0}
    # A corpus with twice the buckets splits each in two.
    assert np.array_equal(buckets_of(hashes, 128) // 2, numbers)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 50), st.integers(-4, 4)),
        unique_by=lambda entry: entry[:2],
    ),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_the_best_are_the_same_however_they_come(entries, k, pieces):
    best = BestDocuments(4, k)
    for piece in range(pieces):
        some = [entry for entry in entries if entry[1] % pieces == piece]
        if best.lowest is not None:
            some = [entry for entry in some if entry[2] >= best.lowest[entry[0]]]
        columns = list(zip(*some, strict=True)) or [(), (), ()]
        best.add(*(np.array(c, t) for c, t in zip(columns, ("i4", "i8", "f4"), strict=True)))
    expected = []
    for query in range(4):
        of = sorted((-score, document) for q, document, score in entries if q == query)
        expected += [(query, document, -score) for score, document in of[:k]]
    assert list(zip(*(c.tolist() for c in best.results()), strict=True)) == expected
