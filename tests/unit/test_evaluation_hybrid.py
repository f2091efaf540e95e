"""Rows beside a model: BM25, reciprocal rank fusion of both, reranked; and what they cost."""

import io
from dataclasses import replace
from types import SimpleNamespace

import mteb
import numpy as np
import pytest
from made_up_articles import COUNT, run_over, write_articles
from mteb.models import HybridSearch
from own_words import own_evaluation
from run_scoring import tasks_of
from table_model import TableModel, oracle
from tiny_models import save_cross_encoder

from rayembed.config.override import override
from rayembed.config.run_evaluation import Reranker
from rayembed.errors import AssetError, ConfigError
from rayembed.evaluation.bm25 import Bm25
from rayembed.evaluation.hybrid import Baselines, Recorded, baselines_of, further_searches, fused
from rayembed.evaluation.jobs import load_data
from rayembed.evaluation.loaded_spec import loaded_spec
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import OneWorker
from rayembed.evaluation.rayembed_spec import lengths_read
from rayembed.evaluation.run_scores import run_prompts
from rayembed.evaluation.score import Store, score
from rayembed.pipeline.evaluate import evaluate as pipeline
from rayembed.pipeline.evaluate.evaluate import evaluate
from rayembed.pipeline.evaluate.report import print_evaluated
from rayembed.recipes.catalogue import get_recipe
from rayembed.results.costs import Cost, costs_yaml, read_costs, total

RETRIEVAL = ("WikiSentenceRetrieval", "WikiDescriptionRetrieval")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return run_over(write_articles(tmp_path_factory.mktemp("articles") / "articles.json"))


def spec_of(model, run, revision="1"):
    meta = model_meta("m", revision, embed_dim=model.dimensions[0], similarity_fn_name="cosine")
    return loaded_spec(model, meta, run_prompts(run), lengths_read(run.model))


def noisy():
    """A model that does not tell six articles from each other, which their words do."""
    return TableModel(oracle().table.detach().numpy()[np.arange(COUNT) // 6])


def scores_with_rows(model, run, folder, rows=True, store=None, **options):
    baselines = Baselines(tuple(f.name for f in task_factories(run.scores))) if rows else None
    return score(
        spec_of(model, run),
        task_factories(run.scores),
        run_here,
        Store(str(folder), store),
        baselines=baselines,
        **options,
    )


def test_fusing_is_the_formula_of_the_paper():
    generator = np.random.default_rng(4)
    for _ in range(20):
        documents = [f"d{i}" for i in range(40)]
        model = dict(zip(documents, generator.permutation(40).astype(float), strict=True))
        words = {
            d: float(s) for d, s in zip(documents, generator.permutation(40) - 15, strict=True)
        }
        rank = {d: 1 + sum(s > model[d] for s in model.values()) for d in documents}
        of_words = {d: 1 + sum(s > words[d] for s in words.values()) for d in documents}
        expected = {
            d: 1 / (60 + rank[d]) + (1 / (60 + of_words[d]) if words[d] > 0 else 0)
            for d in documents
        }
        found = fused([model, words], 40)
        assert found == {d: pytest.approx(expected[d], rel=1e-12) for d in documents}
        order = sorted(documents, key=lambda d: (expected[d], d), reverse=True)
        assert list(fused([model, words], 10)) == order[:10]
    assert fused([{}, {"a": 2.0}], 5) == {"a": 1 / 61}
    assert fused([{"a": 0.1, "b": -0.2}, {}], 5) == {"a": 1 / 61, "b": 1 / 62}


def test_a_hybrid_row_is_mtebs_hybrid_search_and_embeds_nothing_again(run, tmp_path):
    model = noisy()
    scored = scores_with_rows(model, run, tmp_path)
    alone = noisy()
    scores_with_rows(alone, run, tmp_path / "alone", rows=False)
    assert sorted(model.tokenizer.seen) == sorted(alone.tokenizer.seen), "a text more was embedded"
    assert set(scored.further) == {"bm25", "hybrid"}
    pooled = PooledModel(
        spec_of(noisy(), run), OneWorker(EncodingWorker(spec_of(noisy(), run), None, "cpu"))
    )
    for task in tasks_of(run):
        name = task.metadata.name
        if name not in RETRIEVAL:
            assert all(name not in row.scores for row in scored.further.values())
            continue
        load_data(task)
        for row, search in (("hybrid", HybridSearch([pooled, Bm25()])), ("bm25", Bm25())):
            found = mteb.evaluate(search, task, cache=None, overwrite_strategy="always")
            expected = found.task_results[0].get_score()
            assert scored.further[row].scores[name] == pytest.approx(expected, abs=1e-5), row
            assert len(scored.further[row].items[name][0]) == len(scored.items[name][0])
        assert scored.further["hybrid"].scores[name] != scored.scores[name], "nothing was fused"


def test_the_models_own_scores_stay_as_they_are_without_rows(run, tmp_path):
    alone = scores_with_rows(noisy(), run, tmp_path / "alone", rows=False)
    both = scores_with_rows(noisy(), run, tmp_path / "both")
    assert both.scores == alone.scores
    assert both.meta == alone.meta
    assert alone.further == {}


def test_missing_rows_are_added_from_stored_vectors(run, tmp_path):
    store = str(tmp_path / "vectors")
    first = scores_with_rows(noisy(), run, tmp_path, rows=False, store=store)
    again = noisy()
    second = scores_with_rows(again, run, tmp_path, store=store)
    assert second.scores == first.scores
    assert set(second.further["hybrid"].scores) == set(RETRIEVAL)
    assert again.tokenizer.seen == [], "embedded although the vectors are stored"
    third = scores_with_rows(noisy(), run, tmp_path)
    assert third.further["hybrid"].scores == second.further["hybrid"].scores
    assert all(task.seconds == 0 for task in third.further["hybrid"].tasks)


def test_rows_are_stored_as_models_of_their_own(run, tmp_path):
    scored = scores_with_rows(noisy(), run, tmp_path)
    hybrid = scored.further["hybrid"]
    assert hybrid.meta.name == f"{scored.meta.name}-hybrid"
    assert not hybrid.meta.revision.startswith(scored.meta.revision), "it would pass for the model"
    assert hybrid.meta.revision.endswith(scored.meta.revision)
    assert (hybrid.local / "WikiSentenceRetrieval.json").is_file()
    assert scored.further["bm25"].meta.name == "rayembed/BM25"
    other = replace(spec_of(noisy(), run, "2"), meta=model_meta("other", "2"))
    metas = {
        Baselines().meta("hybrid", spec.meta).revision for spec in (other, spec_of(noisy(), run))
    }
    assert len(metas) == 2


def test_a_failed_task_says_so_once(run, tmp_path, monkeypatch):
    def broken(*_given, **_more):
        raise ValueError("no index today")

    monkeypatch.setattr(Bm25, "index", broken)
    scored = scores_with_rows(noisy(), run, tmp_path)
    assert sorted(name for name, _ in scored.failed) == sorted(RETRIEVAL)
    assert all("no index today" in str(error) for _, error in scored.failed)


def test_costs_are_measured_stored_and_priced(run, tmp_path):
    scored = scores_with_rows(noisy(), run, tmp_path, price_per_hour=3.6)
    model, words, hybrid = (
        found.costs for found in (scored, scored.further["bm25"], scored.further["hybrid"])
    )
    assert set(model) == set(RETRIEVAL), "of other tasks no corpus is searched"
    width = noisy().dimensions[0]
    for task in RETRIEVAL:
        data = next(t for t in tasks_of(run) if t.metadata.name == task)
        load_data(data)
        corpus = data.dataset["default"]["test"]["corpus"]
        assert model[task].bytes_per_document == 4 * width
        assert 0 < model[task].documents <= len(corpus)
        assert words[task].documents == len(corpus)
        assert hybrid[task].bytes_per_document == pytest.approx(
            4 * width + words[task].bytes_per_document
        )
        slower = 1 / model[task].documents_per_second + 1 / words[task].documents_per_second
        assert 1 / hybrid[task].documents_per_second == pytest.approx(slower)
    assert read_costs((scored.local / "costs.yaml").read_text()) == model
    dearer = scores_with_rows(noisy(), run, tmp_path, price_per_hour=7.2)
    assert dearer.costs[RETRIEVAL[0]].price_of_a_million == pytest.approx(
        2 * model[RETRIEVAL[0]].price_of_a_million
    )
    assert scores_with_rows(noisy(), run, tmp_path).costs == dearer.costs, "the price stays"


def test_what_a_million_documents_cost():
    cost = Cost(documents=500, seconds=5.0, bytes_per_document=64, price_per_hour=3.6)
    assert cost.documents_per_second == 100
    assert cost.price_of_a_million == pytest.approx(10.0), "10,000 s at a thousandth each"
    assert Cost(price_per_hour=3.6).price_of_a_million is None
    assert total({"a": cost, "b": cost}).documents_per_second == 100
    assert read_costs(costs_yaml({"a": cost})) == {"a": cost}
    assert read_costs("") == {}


def test_a_cross_encoder_orders_the_best_documents_of_both(run, tmp_path):
    folder = save_cross_encoder(tmp_path / "reranker")
    baselines = baselines_of(RETRIEVAL, Reranker(model=str(folder), top_k=5, dtype="float32"))
    pooled = PooledModel(
        spec_of(noisy(), run), OneWorker(EncodingWorker(spec_of(noisy(), run), None, "cpu"))
    )
    recorded = Recorded(pooled)
    task = next(t for t in tasks_of(run) if t.metadata.name == RETRIEVAL[0])
    load_data(task)
    data = task.dataset["default"]["test"]
    where = {"task_metadata": task.metadata, "hf_split": "test", "hf_subset": "default"}

    def found(search):
        search.index(data["corpus"], **where, encode_kwargs={})
        return search.search(data["queries"], **where, top_k=20, encode_kwargs={})

    of_model = found(recorded)
    rows = {name: found(search) for name, search in further_searches(recorded, baselines)}
    assert list(rows) == ["bm25", "hybrid", "reranked", "hybrid-reranked"]
    for first, row in ((of_model, "reranked"), (rows["hybrid"], "hybrid-reranked")):
        moved = 0
        for query, documents in first.items():
            before = sorted(documents, key=lambda d: (documents[d], d), reverse=True)
            after = sorted(rows[row][query], key=lambda d: (rows[row][query][d], d), reverse=True)
            assert set(after[:5]) == set(before[:5])
            assert after[5:] == before[5:], "what is not scored stays behind in its order"
            moved += after[:5] != before[:5]
        assert moved, "nothing was put in another order"


def test_a_reranker_without_a_trained_head_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(AssetError, match="cross-encoder"):
        baselines_of(RETRIEVAL, Reranker(model=str(tmp_path)))


def test_an_evaluation_prints_the_rows_below_each_task(tmp_path):
    evaluated = evaluate(own_evaluation(tmp_path))
    printed = io.StringIO()
    print_evaluated(evaluated, printed, tracking_uri="sqlite:///m.db")
    lines = [line.strip() for line in printed.getvalue().splitlines()]
    (words,) = [line for line in lines if line.startswith("BM25")]
    (both,) = [line for line in lines if line.startswith("hybrid with BM25")]
    assert "1.0000" in words, "each word stands in one document"
    assert "(95 %:" in both
    for head in ("Less the model", "Documents/s", "Bytes/document", "Price of 1M"):
        assert head in printed.getvalue()


def test_rows_are_for_own_sets_unless_asked_for_all_or_none(tmp_path, monkeypatch):
    names = []

    def note(*_given, baselines, **_more):
        names.append(baselines and baselines.tasks)
        return SimpleNamespace(failed=[])

    monkeypatch.setattr(pipeline, "score", note)
    for choice in ("own_sets", "all", "none"):
        evaluate(own_evaluation(tmp_path, tasks=["NFCorpus"], baselines=choice))
    assert names == [("own",), ("own", "NFCorpus"), None]
    for settings in ({"baselines": "none"}, {"model": {"reference": "bm25"}}):
        with pytest.raises(ConfigError, match="reranker reorders the documents that the model"):
            own_evaluation(tmp_path, reranker={"model": "hf://org/reranker"}, **settings)
    with pytest.raises(ConfigError, match=r"baselines=own_sets, .* own_sets is empty"):
        own_evaluation(
            tmp_path, reranker={"model": "hf://org/reranker"}, own_sets=[], tasks=["NFCorpus"]
        )
    with pytest.raises(ConfigError, match="baselines lacks bm25"):
        override(
            get_recipe("biencoder"),
            ["evaluation.baselines=[]", "evaluation.reranker.model=hf://org/reranker"],
        )
