"""The benchmark `wikipedia` of an evaluation: the tasks that a training run's suite has."""

import pytest
from made_up_articles import HELD_OUT, run_over, write_articles

from rayembed.assets.samples import WIKIPEDIA_EN
from rayembed.config.evaluation_run import WikipediaTasks
from rayembed.evaluation.evaluate import suite_tasks, wikipedia_source
from rayembed.evaluation.wikipedia_factory import wikipedia_factories
from rayembed.recipes.catalogue import get_recipe


def test_the_defaults_are_those_of_the_quickstart():
    run, tasks = get_recipe("nvembed-quickstart"), WikipediaTasks()
    suite = run.evaluation
    assert (suite.num_documents, suite.num_queries, suite.max_length) == (500, 200, 48)
    assert (run.data.held_out.num_titles, run.seed) == (1000, 0)
    assert wikipedia_source(run) == WIKIPEDIA_EN
    assert tasks == WikipediaTasks(
        source=None,  # the same sample
        num_titles=run.data.held_out.num_titles,
        num_documents=suite.num_documents,
        num_queries=suite.num_queries,
        max_length=suite.max_length,
        seed=run.seed,
    )


def revisions(tasks):
    return {task.metadata.name: task.metadata.dataset["revision"] for task in tasks}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_settings_give_the_data_of_a_training_runs_suite(tmp_path, seed):
    path = write_articles(tmp_path / "articles.json")
    run = run_over(path).model_copy(update={"seed": seed})
    suite = run.evaluation
    settings = WikipediaTasks(
        source=str(path),
        num_titles=HELD_OUT,
        num_documents=suite.num_documents,
        num_queries=suite.num_queries,
        max_length=suite.max_length,
        seed=seed,
    )
    expected = revisions(suite_tasks(run))
    assert len(expected) == 6

    def found(**changes):
        changed = settings.model_copy(update=changes)
        return revisions(factory.load() for factory in wikipedia_factories(changed))

    assert found() == expected
    # Controls: other settings are other data, of all tasks or of those that they concern.
    other = found(seed=2)
    assert all(other[name] != revision for name, revision in expected.items())
    for changes in ({"num_documents": 90}, {"max_length": 16}):
        assert found(**changes)["WikiSentenceRetrieval"] != expected["WikiSentenceRetrieval"]
