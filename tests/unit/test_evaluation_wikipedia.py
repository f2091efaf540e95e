"""The benchmark `wikipedia` of an evaluation: the tasks that a training run scores."""

import pytest
from made_up_articles import HELD_OUT, run_over, write_articles
from run_scoring import tasks_of

from rayembed.assets.samples import WIKIPEDIA_EN
from rayembed.config.scores import WikipediaTasks
from rayembed.evaluation.wikipedia_factory import wikipedia_factories
from rayembed.recipes.catalogue import get_recipe


def test_the_defaults_are_those_of_the_quickstart():
    run, tasks = get_recipe("nvembed-quickstart"), WikipediaTasks()
    assert (tasks.num_documents, tasks.num_queries, tasks.max_length) == (500, 200, 48)
    assert (run.data.held_out.num_titles, run.seed) == (1000, 0)
    assert run.evaluation.wikipedia == tasks
    # And what a run fills in is what an evaluation takes where nothing is said.
    filled = tasks.model_copy(update={"source": WIKIPEDIA_EN, "num_titles": 1000, "seed": 0})
    assert run.wikipedia == filled
    told, found = (
        revisions(factory.load() for factory in wikipedia_factories(one)) for one in (filled, tasks)
    )
    assert told == found


def revisions(tasks):
    return {task.metadata.name: task.metadata.dataset["revision"] for task in tasks}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_settings_give_the_data_of_a_training_run(tmp_path, seed):
    path = write_articles(tmp_path / "articles.json")
    run = run_over(path).model_copy(update={"seed": seed})
    sizes = run.evaluation.wikipedia
    settings = WikipediaTasks(
        source=str(path),
        num_titles=HELD_OUT,
        num_documents=sizes.num_documents,
        num_queries=sizes.num_queries,
        max_length=sizes.max_length,
        seed=seed,
    )
    expected = revisions(tasks_of(run))
    assert len(expected) == 6

    def found(**changes):
        changed = settings.model_copy(update=changes)
        return revisions(factory.load() for factory in wikipedia_factories(changed))

    assert found() == expected
    # Controls: other settings are other data, of all tasks or of those that they concern.
    other = found(seed=2)
    assert all(other[name] != revision for name, revision in expected.items())
    for changes in ({"num_documents": 110}, {"max_length": 16}):
        assert found(**changes)["WikiSentenceRetrieval"] != expected["WikiSentenceRetrieval"]
