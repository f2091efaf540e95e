"""Scores and best documents of single queries beside mteb's scores."""

import mteb
import numpy as np
import pytest
from beir_set import write_beir
from word_model import WordSpec

from rayembed.config.own_sets import RetrievalSet
from rayembed.evaluation.jobs import TASK_RESULT, ScoreTask
from rayembed.evaluation.own_set import OwnTask
from rayembed.evaluation.query_results import query_results
from rayembed.results.scores import OF_QUERIES
from rayembed.results.writer import open_results


def gain_of(best, judged):
    """nDCG@10 of a ranking with graded judgements, by its definition."""
    discount = 1 / np.log2(np.arange(2, 12))
    gains, ideal = np.zeros(10), np.zeros(10)
    gains[: len(best)] = [judged.get(document, 0) for document in best]
    grades = sorted(judged.values(), reverse=True)[:10]
    ideal[: len(grades)] = grades
    return float(gains @ discount / (ideal @ discount))


class Ranked:
    """A search with given scores; many documents of a query share one."""

    mteb_model_meta = WordSpec().meta

    def __init__(self, found):
        self._found = found

    def index(self, corpus, **_options):
        del corpus

    def search(self, queries, **_options):
        return {query: dict(self._found[query]) for query in queries["id"]}


@pytest.fixture
def graded(tmp_path):
    """A task whose ids hold spaces and percent signs, its grades, and scores with many ties."""
    random = np.random.default_rng(0)
    documents = [f"d {n}%20" for n in range(30)]
    queries = [f"q {n}" for n in range(20)]
    judged = {
        query: {d: int(random.integers(1 if n == i else 0, 3)) for i, d in enumerate(documents)}
        for n, query in enumerate(queries)
    }
    found = {
        query: {
            # Some of these differ as float64 alone, which trec_eval does not read.
            d: 1 + 4e-8 * int(random.integers(0, 6))
            for d in random.permutation(documents)[: 3 if n == 5 else 25].tolist()
        }
        for n, query in enumerate(queries)
    }
    texts = ({d: f"text of {d}" for d in documents}, {q: f"what is {q}" for q in queries})
    folder = write_beir(tmp_path / "set", *texts, judged)
    return OwnTask(RetrievalSet(name="graded", path=str(folder))), judged, found


def test_the_best_documents_of_each_query_give_its_score(graded, tmp_path):
    task, judged, found = graded
    outcome = ScoreTask(task).run(Ranked(found))[TASK_RESULT]
    with open_results(tmp_path, WordSpec().meta) as writer:
        read = writer.save(mteb.TaskResult.from_dict(outcome))
    results = query_results(read.scores["test"][0])
    assert list(results) == sorted(judged)
    assert len(results["q 5"].best) == 3
    for query, result in results.items():
        assert result.score == pytest.approx(gain_of(result.best, judged[query]), abs=1e-5)
    last = results["q 5"].best[2]
    assert results["q 5"].rank_of(last) == 3
    assert results["q 5"].rank_of("no such document") is None


def test_scores_without_kept_rankings_have_no_results():
    assert query_results({OF_QUERIES: [0.5]}) == {}
