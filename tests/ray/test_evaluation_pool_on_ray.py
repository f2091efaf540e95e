"""An evaluation over workers on Ray: the scores of plain mteb, whatever happens to the workers."""

import os
import sys
from dataclasses import dataclass

import pytest
import ray
from mteb.mocks import ALL_MOCK_TASK_TEST_GRID
from plain_scores import largest_difference, scores
from plain_spec_model import PlainSpecModel
from tiny_models import save_cross_encoder
from word_model import WordSpec

from rayembed.config.run_evaluation import Reranker
from rayembed.config.types import Rescoring, StoredVectors
from rayembed.errors import ArtifactError, PlacementError, WorkerError
from rayembed.evaluation.hybrid import baselines_of
from rayembed.evaluation.jobs import COST, FURTHER, TASK_RESULT, ScoreTask
from rayembed.evaluation.pooled.embedding_store import EmbeddingStore
from rayembed.evaluation.pooled.here import run_here
from rayembed.evaluation.pooled.on_ray import run_jobs
from rayembed.evaluation.pooled.pool import Workers

pytestmark = pytest.mark.ray
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class MockTask:
    """One of mteb's own mock tasks."""

    name: str
    num_texts: int = 10

    def load(self):
        return next(type(t)() for t in ALL_MOCK_TASK_TEST_GRID if t.metadata.name == self.name)


def text_tasks():
    return [task for task in ALL_MOCK_TASK_TEST_GRID if task.metadata.modalities == ["text"]]


def one_of_each_type():
    return list({task.metadata.type: task for task in reversed(text_tasks())}.values())


def evaluate(spec, store, workers, names):
    jobs = [ScoreTask(MockTask(name)) for name in names]
    done = {found.job.name: found for found in run_jobs(jobs, spec, store, workers)}
    assert done.keys() == set(names)
    return done


@pytest.mark.parametrize("number", [1, 2])
def test_any_number_of_workers_gives_the_scores_of_mteb(cluster, tmp_path, number):
    spec, store = WordSpec(), EmbeddingStore(str(tmp_path))
    tasks = {task.metadata.name: task for task in text_tasks()}
    done = evaluate(spec, store, Workers(number=number, tasks_at_once=2), tasks)
    for name, task in tasks.items():
        assert done[name].error is None, done[name].error
        found = done[name].outcome[TASK_RESULT]["scores"]
        assert largest_difference(scores(PlainSpecModel(spec), task), found) < 1e-6, name


def test_rows_beside_a_model_are_those_of_this_process(cluster, tmp_path):
    reranker = Reranker(model=str(save_cross_encoder(tmp_path / "r")), top_k=1, dtype="float32")
    names = ["MockRetrievalTask", "MockMultilingualRetrievalTask"]
    baselines = baselines_of(names, reranker)
    jobs = [ScoreTask(MockTask(name), baselines) for name in names]
    workers = Workers(number=2, tasks_at_once=2)
    there = {found.job.name: found for found in run_jobs(jobs, WordSpec(), None, workers)}
    here = {found.job.name: found for found in run_here(jobs, WordSpec(), None)}
    for name in names:
        assert there[name].error is None, there[name].error
        rows, expected = there[name].outcome[FURTHER], here[name].outcome[FURTHER]
        assert list(rows) == ["bm25", "hybrid", "reranked", "hybrid-reranked"]
        for row, outcome in rows.items():
            found, wanted = (one[TASK_RESULT]["scores"] for one in (outcome, expected[row]))
            assert largest_difference(found, wanted) < 1e-6, (name, row)
        cost = there[name].outcome[COST]
        assert cost["documents"] == here[name].outcome[COST]["documents"] > 0
        assert cost["bytes_per_document"] == here[name].outcome[COST]["bytes_per_document"]


def test_workers_search_small_vectors_as_this_process_does(cluster, tmp_path):
    rescore = Rescoring(candidates=2)
    spec = WordSpec(stored=StoredVectors(precision="binary", rescore=rescore))
    kinds = ("Retrieval", "Reranking", "STS")
    names = [t.metadata.name for t in one_of_each_type() if t.metadata.type in kinds]
    assert len(names) == len(kinds)
    done = evaluate(spec, EmbeddingStore(str(tmp_path)), Workers(number=2), names)
    jobs = [ScoreTask(MockTask(name)) for name in names]
    here = {found.job.name: found for found in run_here(jobs, spec, None)}
    plain = {found.job.name: found for found in run_here(jobs, WordSpec(), None)}
    apart = []
    for name in names:
        of_workers, of_one, of_float = (
            found[name].outcome[TASK_RESULT]["scores"] for found in (done, here, plain)
        )
        assert largest_difference(of_one, of_workers) < 1e-6, name
        apart.append(largest_difference(of_one, of_float))
    assert max(apart) > 1e-2, "the control"


def test_workers_that_are_killed_change_nothing(cluster, tmp_path):
    # Each death costs the imports of another worker, so that not every type of task has one.
    types = ("Retrieval", "STS", "Clustering", "Classification")
    tasks = {task.metadata.name: task for task in one_of_each_type() if task.metadata.type in types}
    assert len(tasks) == len(types)
    spec = WordSpec(log=str(tmp_path / "log"), deadly=True)
    store = EmbeddingStore(str(tmp_path / "kept"))
    done = evaluate(spec, store, Workers(number=2, tries=20), tasks)
    died = [path.name for path in tmp_path.iterdir() if ".died." in path.name]
    assert (
        len(died) == len(tasks) + 1
    )  # the encode spec of each task's queries, and that of documents
    for name, task in tasks.items():
        assert done[name].error is None, done[name].error
        found = done[name].outcome[TASK_RESULT]["scores"]
        assert largest_difference(scores(PlainSpecModel(WordSpec()), task), found) < 1e-6, name
    # Begun again after all, it reads what is kept.
    (tmp_path / "log").unlink()
    again = evaluate(
        spec, store, Workers(number=1), [n for n in tasks if "Retrieval" in n or "STS" in n]
    )
    assert not (tmp_path / "log").exists()
    for name, found in again.items():
        kept, made = (one.outcome[TASK_RESULT]["scores"] for one in (found, done[name]))
        assert largest_difference(made, kept) == 0.0


class Deadly(WordSpec):
    """Every worker dies over every text."""

    def load(self, device):
        return lambda texts, encode_spec: os._exit(1)


class Missing(WordSpec):
    """A model that is not there."""

    def load(self, device):
        raise ArtifactError("no weights in 'here'")


@dataclass(frozen=True)
class Broken:
    """A job of mteb that fails."""

    name: str = "Broken"
    num_texts: int = 5

    def run(self, model):
        raise KeyError("column 'label'")


def test_what_fails_is_told_and_stops_nothing_else(cluster):
    jobs = [Broken(), ScoreTask(MockTask("MockSTSTask"))]
    done = {found.job.name: found for found in run_jobs(jobs, WordSpec(), None, Workers())}
    assert done["MockSTSTask"].error is None
    assert "Broken: KeyError: \"column 'label'\"" in str(done["Broken"].error)
    lost = evaluate(Deadly(), None, Workers(tries=2), ["MockSTSTask"])["MockSTSTask"]
    assert isinstance(lost.error, WorkerError)
    assert "2 workers died over the same texts" in str(lost.error)


def test_models_and_clusters_that_will_not_do_are_refused_before_any_task(cluster):
    with pytest.raises(ArtifactError, match="no weights in 'here'"):
        list(run_jobs([Broken()], Missing(), None, Workers()))
    with pytest.raises(
        PlacementError, match=r"workers=9 need 1 CPUs each on one node, .* only 4 workers fit"
    ):
        list(run_jobs([Broken()], WordSpec(), None, Workers(number=9)))
    with pytest.raises(PlacementError, match=r"need 1 CPUs and 1 GPUs each"):
        list(run_jobs([Broken()], WordSpec(), None, Workers(gpu=True)))
    assert list(run_jobs([], Missing(), None, Workers())) == []
