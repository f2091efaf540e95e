"""The index of mteb's names says what mteb says, and what is asked for is checked by it."""

import pytest
from mteb_index import made_of_mteb

from rayembed.config.own_sets import Scores
from rayembed.errors import ConfigError
from rayembed.evaluation.benchmarks import benchmark_tasks, named_tasks
from rayembed.evaluation.mteb_names import check_names, mteb_names


def test_the_index_is_that_of_the_pinned_mteb():
    index = mteb_names()
    assert index is not None, "another mteb is installed than the index is of"
    assert index == made_of_mteb(), "python tests/support/mteb_index.py writes it anew"


def test_the_index_takes_what_mteb_takes():
    index = mteb_names()
    assert index is not None
    for name in (*index.benchmarks[::7], *index.aliases[::7]):
        assert benchmark_tasks(name)
        check_names("", Scores(benchmarks=(name,)))
    for name in index.tasks[::200]:
        assert named_tasks([name])
        check_names("", Scores(tasks=(name,)))
    for check in (benchmark_tasks, lambda name: check_names("", Scores(benchmarks=(name,)))):
        for name in [*index.other_benchmarks][::9]:
            with pytest.raises(ConfigError, match="only benchmarks over texts"):
                check(name)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (
            Scores(tasks=("SciFactt",)),
            "evaluation.tasks: mteb has no task 'SciFactt'; did you mean",
        ),
        (Scores(tasks=("zzz",)), "mteb.get_tasks() lists all"),
        (Scores(benchmarks=("MTEB(eng v1)",)), "did you mean 'MTEB(eng, v1)'?"),
        (Scores(benchmarks=("wikipedai",)), "did you mean 'wikipedia'?"),
        (Scores(tasks=("VisualSTS17Eng",)), "has inputs of type image, but only tasks over texts"),
    ],
)
def test_a_wrong_name_is_refused_with_the_nearest(scores, message):
    with pytest.raises(ConfigError) as told:
        check_names("evaluation", scores, ["wikipedia"])
    assert message in str(told.value)


def test_names_of_another_mteb_are_left_to_it(monkeypatch):
    monkeypatch.setattr("rayembed.evaluation.mteb_names.version", lambda _: "2.99.0")
    mteb_names.cache_clear()
    try:
        check_names("evaluation", Scores(tasks=("OfTomorrow",)))
    finally:
        mteb_names.cache_clear()
