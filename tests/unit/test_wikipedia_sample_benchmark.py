"""The benchmark `wikipedia` of an evaluation: the tasks that a training run scores."""

from importlib.metadata import EntryPoint

import pytest
from made_up_articles import HELD_OUT, run_over, wikipedia_over, write_articles
from run_scoring import tasks_of

from rayembed.config import named_benchmarks
from rayembed.config.evaluation import EvaluationRun
from rayembed.config.named_benchmarks import with_own_sets
from rayembed.config.own_sets import RetrievalSet
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.evaluation.plan import task_factories
from rayembed.recipes.catalogue import get_recipe
from rayembed.recipes.sample import TASK_NAMES, ScoreSizes


def asked(*benchmarks, **settings):
    """The evaluation that `evaluate_model --benchmark` takes."""
    values = {"model": {"reference": "bm25"}, "benchmarks": benchmarks, **settings}
    return with_own_sets(parse(EvaluationRun, values))


def test_the_defaults_are_those_of_the_quickstart():
    run, sizes = get_recipe("nvembed-quickstart"), ScoreSizes()
    assert (sizes.documents, sizes.queries, sizes.max_length) == (500, 200, 48)
    assert (sizes.held_out, sizes.seed) == (1000, 0)
    assert asked("wikipedia").own_sets == run.evaluation.own_sets


def test_the_name_and_its_tasks_stand_beside_others():
    own = {"name": "mine", "path": "somewhere"}
    found = asked("NanoBEIR", "wikipedia", own_sets=[own], tasks=["SciFact"])
    assert (found.benchmarks, found.tasks) == (("NanoBEIR",), ("SciFact",))
    assert [one.name for one in found.own_sets] == [*TASK_NAMES, "mine"]
    one = asked(tasks=["WikiRelatednessSTS"])
    assert ([own.name for own in one.own_sets], one.tasks) == (["WikiRelatednessSTS"], ())
    plain = asked("NanoBEIR")
    assert with_own_sets(plain) is plain
    with pytest.raises(ConfigError, match="no setting 'document'; did you mean 'documents'"):
        asked("wikipedia?document=3")


def test_a_name_that_is_nearly_one_of_them_is_told_with_it():
    with pytest.raises(ConfigError, match="did you mean 'wikipedia'"):
        task_factories(asked("Wikipedia?documents=300"))


class Tickets:
    """A benchmark of another package."""

    name = "tickets"
    tasks = ("Answers",)
    prefix = "sample://tickets/"
    licence = "mit"

    def own_sets(self, sizes, tasks=None):
        return (RetrievalSet(name="Answers", path=f"sample://tickets/{sizes.get('year', '2026')}"),)

    def in_language(self, own, language):
        return own

    def num_tokens(self, own):
        return 7.0


TICKETS = Tickets()


def test_another_package_brings_a_benchmark(monkeypatch):
    point = EntryPoint("tickets", f"{__name__}:TICKETS", "rayembed.benchmarks")
    monkeypatch.setattr(named_benchmarks, "entry_points", lambda group: [point])
    named_benchmarks.named_benchmarks.cache_clear()
    found = asked("tickets?year=2025").own_sets
    assert [own.path for own in found] == ["sample://tickets/2025"]
    assert named_benchmarks.tokens_of_sets(found) == 7.0
    assert named_benchmarks.benchmark_of(found[0].path).licence == "mit"
    monkeypatch.undo()
    named_benchmarks.named_benchmarks.cache_clear()
    assert asked("tickets").benchmarks == ("tickets",)


def revisions(tasks):
    return {task.metadata.name: task.metadata.dataset["revision"] for task in tasks}


@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_settings_give_the_data_of_a_training_run(tmp_path, seed):
    path = write_articles(tmp_path / "articles.json")
    run = run_over(path, seed=seed, sampled=wikipedia_over)
    given = {
        "source": str(path),
        "held_out": HELD_OUT,
        "documents": 100,
        "queries": 100,
        "max_length": 64,
        "seed": seed,
    }
    expected = revisions(tasks_of(run))
    assert len(expected) == 6

    def found(**changes):
        told = "&".join(f"{name}={value}" for name, value in {**given, **changes}.items())
        return revisions(factory.load() for factory in task_factories(asked(f"wikipedia?{told}")))

    assert found() == expected
    # Controls: other settings are other data, of all tasks or of those that they concern.
    other = found(seed=2)
    assert all(other[name] != revision for name, revision in expected.items())
    for changes in ({"documents": 110}, {"max_length": 16}):
        assert found(**changes)["WikiSentenceRetrieval"] != expected["WikiSentenceRetrieval"]
