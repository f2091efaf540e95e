"""Outcomes of single items beside mteb's scores: the scores are made of them."""

import mteb
import numpy as np
import pytest
from mteb_hub import mteb_hub
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score
from word_model import WordSpec

from rayembed.evaluation.benchmarks import MtebTask
from rayembed.evaluation.jobs import TASK_RESULT, ScoreTask
from rayembed.evaluation.pooled.encoding_worker import EncodingWorker
from rayembed.evaluation.pooled.model import PooledModel
from rayembed.evaluation.pooled.pool import OneWorker
from rayembed.results.items import LABELS_OF_ITEMS, OF_ITEMS, ScoredPairs, item_scores
from rayembed.results.writer import open_results

WITH_ITEMS = (
    "Banking77Classification",
    "STSBenchmark",
    "SprintDuplicateQuestions",
    "AskUbuntuDupQuestions",
)
WITHOUT = ("TwentyNewsgroupsClustering.v2", "SummEvalSummarization.v2", "FiQA2018")

pytestmark = pytest.mark.filterwarnings("ignore:The used Evaluator is deprecated")


@pytest.fixture(scope="module")
def entries(tmp_path_factory):
    """Task → the entry of its result, as it is read back, and its loaded data."""
    found, folder = {}, tmp_path_factory.mktemp("hub")
    tasks = [MtebTask(name) for name in (*WITH_ITEMS, *WITHOUT)]
    spec = WordSpec()
    with mteb_hub([task.load() for task in tasks], folder):
        for task in tasks:
            model = PooledModel(spec, OneWorker(EncodingWorker(spec, None, "cpu")))
            outcome = ScoreTask(task).run(model)[TASK_RESULT]
            with open_results(folder / "results", spec.meta) as writer:
                read = writer.save(mteb.TaskResult.from_dict(outcome))
            data = task.load()
            data.load_data()
            found[task.name] = read.scores["test"][0], data
    return found


def test_a_classification_holds_how_often_each_text_was_right(entries):
    entry, task = entries["Banking77Classification"]
    outcomes = item_scores(entry)
    assert len(outcomes) == len(task.dataset["test"])
    assert outcomes.mean() == pytest.approx(entry["main_score"], abs=1e-5)
    assert set(np.round(outcomes * task.n_experiments, 4) % 1) == {0.0}


def stored(entry, name):
    return np.array(entry[name].split(), dtype=float)


def check(pairs, entry):
    """ScoredPairs make up the main score."""
    assert isinstance(pairs, ScoredPairs)
    found = pairs.score(np.ones(len(pairs)))
    assert found == pytest.approx(entry["main_score"], abs=1e-5)


def test_pairs_hold_their_similarity(entries):
    entry, task = entries["STSBenchmark"]
    similarities = stored(entry, OF_ITEMS)
    expected = spearmanr(similarities, task.dataset["test"]["score"])[0]
    assert expected == pytest.approx(entry["main_score"], abs=1e-5)
    check(item_scores(entry), entry)
    entry, task = entries["SprintDuplicateQuestions"]
    labels = np.ravel(task.dataset["test"]["labels"])
    expected = average_precision_score(labels, stored(entry, OF_ITEMS))
    assert expected == pytest.approx(entry["main_score"], abs=1e-5)
    np.testing.assert_array_equal(stored(entry, LABELS_OF_ITEMS), labels)
    check(item_scores(entry), entry)
    others = {entry[f"{name}_ap"] for name in ("cosine", "dot", "euclidean", "manhattan")}
    assert len(others) > 1, "else any of them would do"


def test_a_reranking_holds_the_average_precision_of_each_query(entries):
    entry, _ = entries["AskUbuntuDupQuestions"]
    assert item_scores(entry).mean() == pytest.approx(entry["main_score"], abs=1e-5)


@pytest.mark.parametrize("name", WITHOUT)
def test_scores_that_are_not_made_of_items_hold_none(entries, name):
    entry, _ = entries[name]
    assert OF_ITEMS not in entry
    assert (item_scores(entry) is not None) == (name == "FiQA2018"), "which has its queries"


def test_items_that_make_another_score_are_not_taken(entries):
    entry, _ = entries["Banking77Classification"]
    assert item_scores({**entry, "main_score": entry["main_score"] + 0.01}) is None
    entry, _ = entries["STSBenchmark"]
    assert item_scores({**entry, "main_score": entry["main_score"] + 0.01}) is None
    assert item_scores({**entry, "main_score": None}) is None


@pytest.mark.parametrize("measure", ["recall_at_10", "ndcg_at_5", "map_at_100", "precision_at_3"])
def test_other_scores_of_queries_are_stored_too(entries, measure, monkeypatch, tmp_path):
    metadata = MtebTask("FiQA2018").load().metadata
    patched = metadata.model_copy(update={"main_score": measure})
    with mteb_hub([MtebTask("FiQA2018").load()], tmp_path):
        spec = WordSpec()
        model = PooledModel(spec, OneWorker(EncodingWorker(spec, None, "cpu")))
        job = ScoreTask(MtebTask("FiQA2018"))
        load = MtebTask.load

        def loaded(factory):
            task = load(factory)
            task.metadata = patched
            return task

        monkeypatch.setattr(MtebTask, "load", loaded)
        (entry,) = job.run(model)[TASK_RESULT]["scores"]["test"]
    assert entry["main_score"] == entry[measure] > 0
    assert item_scores(entry).mean() == pytest.approx(entry[measure], abs=1e-5)


def test_a_task_that_computes_scores_of_its_own_is_left_alone(entries):
    task = MtebTask("Banking77Classification").load()
    task.is_cross_validation = True
    assert "_calculate_scores" not in vars(task), "each task is made with mteb's own functions"
