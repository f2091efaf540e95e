"""Scores by the number of context documents and by their topic, on a tiny CDE."""

import logging
import math

import numpy as np
import pytest
from made_up_articles import wikipedia_over
from own_task_data import retrieval_data
from run_scoring import evaluate_reference
from table_model import changed
from tiny_models import save_cde_stages, save_encoder
from word_articles import TOPICS, run_over_words, write_word_articles

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, AssetError, ConfigError, DataError
from rayembed.evaluation import rayembed_spec
from rayembed.models.cde.config import CDEConfig
from rayembed.models.cde.model import CDE
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode, encode_context, random_documents
from rayembed.recipes.sample import RETRIEVAL_TASKS
from rayembed_papers.context import topics as context_topics
from rayembed_papers.context.sizes import check_sizes, scores_by_size, tasks_of
from rayembed_papers.context.topics import (
    EVERY_TOPIC,
    NO_CONTEXT,
    TopicScores,
    _contexts,
    topic_scores,
    topic_tasks,
)

J = 4
SENTENCES = RETRIEVAL_TASKS[0]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A CDE with a corpus of its own, which no analysis may take for a task's."""
    place = tmp_path_factory.mktemp("cde")
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": J,
        "output": "residual",
        "query_max_length": 62,
        "document_max_length": 62,
    }
    model = build_model(parse(CDEConfig, config), save_cde_stages(place), seed=5).eval()
    model.set_corpus(encode_context(model, ["larger dogs", "lazy foxes"]))
    model.save(place / "model")
    return place / "model"


@pytest.fixture
def run(tmp_path):
    return run_over_words(write_word_articles(tmp_path / "articles.json"), sampled=wikipedia_over)


def ndcg_by_hand(model, sample, context):
    """nDCG@10 of queries with one relevant document each."""
    documents = list(sample.documents)
    options = {"context": context, "allow_empty": True}
    queries = encode(model, list(sample.queries.values()), role="query", **options)
    vectors = encode(model, list(sample.documents.values()), role="document", **options)
    found = []
    for query, scores in zip(sample.queries, queries @ vectors.T, strict=True):
        ((relevant, _),) = sample.relevant[query].items()
        rank = 1 + int((scores > scores[documents.index(relevant)]).sum())
        found.append(1 / math.log2(rank + 1) if rank <= 10 else 0.0)
    return float(np.mean(found))


def recorded(monkeypatch, module):
    """Documents of each context that the module embeds."""
    seen = []
    embed = module.encode_context

    def encode_context(model, documents, **options):
        seen.append(list(documents))
        return embed(model, documents, **options)

    monkeypatch.setattr(module, "encode_context", encode_context)
    return seen


def test_scores_by_size_are_those_of_so_many_documents(run, folder, tmp_path, monkeypatch, caplog):
    seen = recorded(monkeypatch, rayembed_spec)
    options = {"name": "x", "results_folder": tmp_path / "results", "sizes": [0, 2, J], "draws": 2}
    with caplog.at_level(logging.INFO, logger="rayembed_papers"):
        found = scores_by_size(folder, run, **options)
    assert "no corpus is set" not in caplog.text, "none is what was asked for"
    assert "measuring with 2 context documents, random draw 2 (measurement 4 of 5)" in caplog.text
    assert [len(found[size][SENTENCES]) for size in (0, 2, J)] == [1, 2, 2]
    assert list(found[J]) == list(RETRIEVAL_TASKS)
    own = evaluate_reference(folder, run, name="y", results_folder=tmp_path / "own")
    assert {task: scores[0] for task, scores in found[J].items()} == {
        task: own[task] for task in RETRIEVAL_TASKS
    }
    without = evaluate_reference(
        folder, run, name="y", results_folder=tmp_path / "own", without_context=True
    )
    assert {task: without[task] for task in RETRIEVAL_TASKS} == {
        task: scores[0] for task, scores in found[0].items()
    }
    model = load_model(folder)
    model.set_corpus(None)
    for task in tasks_of(run, RETRIEVAL_TASKS):
        sample, name = retrieval_data(task), task.name
        documents = list(sample.documents.values())
        drawn = [random_documents(documents, J, seed=run.seed + draw) for draw in range(2)]
        assert drawn[0] != drawn[1]
        for draw, chosen in enumerate(drawn):
            assert chosen in seen
            assert chosen[:2] in seen
            context = encode_context(model, chosen[:2])
            expected = ndcg_by_hand(model, sample, context)
            assert found[2][name][draw] == pytest.approx(expected, abs=1e-4)
        assert found[0][name][0] == pytest.approx(ndcg_by_hand(model, sample, None), abs=1e-4)
    assert len({*found[0][SENTENCES], *found[2][SENTENCES], *found[J][SENTENCES]}) > 2

    monkeypatch.setattr(CDE, "forward", None)
    assert scores_by_size(folder, run, **options) == found, "read from the results, not embedded"


def test_sizes_that_cannot_be_are_refused(run, folder, tmp_path):
    options = {"name": "x", "results_folder": tmp_path, "draws": 1}
    with pytest.raises(
        ConfigError, match=r"5 context documents .*, but the model takes at most 4 "
    ):
        scores_by_size(folder, run, sizes=[0, 5], **options)
    with pytest.raises(ConfigError, match=r"99 .* the task WikiSentence\w+ has only 60"):
        check_sizes([1, 99], 512, tasks_of(run, RETRIEVAL_TASKS))
    with pytest.raises(ConfigError, match="did you mean 'WikiSentenceRetrieval'"):
        scores_by_size(folder, run, sizes=[1], tasks=["WikiSentenceRetrievl"], **options)
    nothing = run.model_copy(
        update={"evaluation": run.evaluation.model_copy(update={"own_sets": ()})}
    )
    with pytest.raises(ConfigError, match="no retrieval set"):
        scores_by_size(folder, nothing, sizes=[1], **options)


@pytest.mark.parametrize("analyse", ["sizes", "topics"])
def test_other_models_and_folders_are_refused(run, tmp_path, analyse):
    def measure(reference):
        options = {"name": "x", "results_folder": tmp_path / "results", "draws": 1}
        if analyse == "sizes":
            return scores_by_size(reference, run, sizes=[1], **options)
        return topic_scores(reference, run, task=SENTENCES, **options)

    save_encoder(tmp_path / "encoder")
    with pytest.raises(ArtifactError, match="of kind 'biencoder', which has no context"):
        measure(tmp_path / "encoder")
    (tmp_path / "empty").mkdir()
    with pytest.raises(AssetError, match="neither config"):
        measure(tmp_path / "empty")
    with pytest.raises(AssetError):
        measure(tmp_path / "nothing")
    assert not (tmp_path / "results").exists()


def test_each_topic_is_scored_in_the_context_of_each(run, folder, tmp_path, monkeypatch):
    seen = recorded(monkeypatch, context_topics)
    options = {"name": "x", "results_folder": tmp_path, "task": SENTENCES, "draws": 1}
    found = topic_scores(folder, run, **options)
    assert found.topics == TOPICS
    assert found.contexts == (*TOPICS, EVERY_TOPIC, NO_CONTEXT)
    for scores in found.scores.values():
        counts = {context: len(values) for context, values in scores.items()}
        assert counts == dict.fromkeys(found.contexts, 1)
    samples = {topic: retrieval_data(task) for topic, task in topic_tasks(run, SENTENCES).items()}
    documents = {topic: list(sample.documents.values()) for topic, sample in samples.items()}
    assert all(len(texts) > 20 for texts in documents.values())
    assert not set(documents["Arts"]) & set(documents["Places"])
    every = [text for texts in documents.values() for text in texts]
    drawn = [random_documents(texts, J, seed=run.seed) for texts in (*documents.values(), every)]
    assert seen == drawn
    model = load_model(folder)
    for context, label in ((encode_context(model, drawn[2]), "Places"), (None, NO_CONTEXT)):
        if context is None:
            model.set_corpus(None)
        for topic, sample in samples.items():
            expected = ndcg_by_hand(model, sample, context)
            assert found.scores[topic][label][0] == pytest.approx(expected, abs=1e-4)
    scores = [score for by in found.scores.values() for values in by.values() for score in values]
    assert len(set(scores)) > 3

    monkeypatch.setattr(CDE, "forward", None)
    assert topic_scores(folder, run, **options) == found, "read from the results, not embedded"


def test_each_topic_is_drawn_by_other_seeds_and_no_context_once(run):
    tasks = topic_tasks(run, SENTENCES)
    drawn = list(_contexts(tasks, J, run.seed, draws=2))
    assert [label for label, _ in drawn] == [*(*TOPICS, EVERY_TOPIC) * 2, NO_CONTEXT]
    for first, second in zip(drawn[:4], drawn[4:8], strict=True):
        assert first[1].documents != second[1].documents
        assert len(first[1].documents) == len(second[1].documents) == J
    documents = list(retrieval_data(tasks["Places"]).documents.values())
    assert drawn[6][1].documents == random_documents(documents, J, seed=run.seed + 1)
    assert drawn[-1][1].documents == []


def test_topics_of_the_sample_are_tasks_of_their_own(run):
    tasks = topic_tasks(run, SENTENCES)
    names = [task.name for task in tasks.values()]
    assert names == [f"{SENTENCES}-{part}" for part in ("Arts", "LifeScience", "Places")]
    assert {task.name for task in tasks_of(run, RETRIEVAL_TASKS)} == set(RETRIEVAL_TASKS)
    with pytest.raises(ConfigError, match="no retrieval task 'WikiTopicClustering'"):
        topic_tasks(run, "WikiTopicClustering")
    smaller = changed(run, held_out=45, documents=30, queries=20)
    with pytest.raises(DataError, match=r"have [01] topics with at least 20 articles"):
        topic_tasks(smaller, SENTENCES)


def test_squares_within_a_point_of_their_row_are_near():
    found = TopicScores(
        SENTENCES,
        {
            "A": {"A": (0.8, 0.9), "B": (0.845,), EVERY_TOPIC: (0.841,), NO_CONTEXT: (0.7,)},
            "B": {"A": (0.5,), "B": (0.4,), EVERY_TOPIC: (0.45,), NO_CONTEXT: (0.3,)},
        },
    )
    assert [found.near_best("A", context) for context in found.contexts] == [True] * 3 + [False]
    assert [found.near_best("B", context) for context in found.contexts] == [True] + [False] * 3
    assert found.mean_of_own == pytest.approx((0.85 + 0.4) / 2)
    assert found.mean_of_others == pytest.approx((0.845 + 0.5) / 2)
    assert found.mean_of(NO_CONTEXT) == pytest.approx(0.5)
