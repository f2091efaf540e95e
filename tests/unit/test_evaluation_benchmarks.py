"""Lists of tasks, pieces of tasks, and averages over benchmarks; mteb's own as the reference."""

import datetime
import pickle
import re

import mteb
import pytest
from mteb.results import BenchmarkResults, ModelResult, TaskResult

from rayembed.config.evaluation import EvaluationRun
from rayembed.errors import ConfigError
from rayembed.evaluation import averages
from rayembed.evaluation.benchmarks import (
    ENGLISH_V1,
    MTEB_MINI,
    MtebTask,
    benchmark_names,
    benchmark_tasks,
    named_tasks,
    of_languages,
)
from rayembed.evaluation.plan import joined, pieces, task_factories


def result_of(task, score_of, *, skip=()) -> TaskResult:
    """A made-up result: a main score for each split and subset."""
    subsets = ["default"] if task.is_aggregate else task.hf_subsets
    scores = {
        split: {
            subset: {"main_score": score_of(task.metadata.name, split, subset)}
            for subset in subsets
            if subset not in skip
        }
        for split in task.eval_splits
    }
    now = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return TaskResult.from_task_results(task, scores, evaluation_time=1.0, date=now)


def tasks_of(**asked):
    """What an evaluation of these settings is over."""
    return task_factories(EvaluationRun.model_validate({"model": {"reference": "bm25"}, **asked}))


def made_up_score(name, split, subset) -> float:
    return (sum(map(ord, name + split + subset)) % 97) / 97


def test_the_benchmarks_of_mteb_and_of_the_papers_have_their_tasks():
    names = benchmark_names()
    for name in (ENGLISH_V1, "MTEB(eng, v2)", "BEIR", "NanoBEIR", "MTEB(Multilingual, v2)"):
        assert name in names
        ours = benchmark_tasks(name)
        theirs = list(mteb.get_benchmark(name).tasks)
        assert [task.name for task in ours] == [task.metadata.name for task in theirs]
        for factory, wanted in zip(ours, theirs, strict=True):
            loaded = factory.load()
            assert list(loaded.eval_splits) == list(wanted.eval_splits)
            assert set(loaded.hf_subsets) == set(wanted.hf_subsets), factory
    assert not any(name.startswith("MIEB") for name in names)
    sizes = {name: len(benchmark_tasks(name)) for name in (ENGLISH_V1, "BEIR", "NanoBEIR")}
    assert sizes == {ENGLISH_V1: 56, "BEIR": 15, "NanoBEIR": 13}


def test_english_v1_evaluates_english_test_splits_and_msmarcos_development_split():
    by_name = {task.name: task.load() for task in benchmark_tasks(ENGLISH_V1)}
    splits = {name: tuple(task.eval_splits) for name, task in by_name.items()}
    assert splits.pop("MSMARCO") == ("dev",)
    assert set(splits.values()) == {("test",)}
    subsets = {name: task.hf_subsets for name, task in by_name.items() if len(task.hf_subsets) > 1}
    assert subsets == {}
    assert by_name["STS17"].hf_subsets == ["en-en"]


def test_mteb_mini_is_causal2vecs_table_9():
    tasks = benchmark_tasks("MTEB-MINI")
    assert tuple(task.name for task in tasks) == MTEB_MINI
    counts: dict[str, int] = {}
    for task in tasks:
        kind = task.load().metadata.type
        counts[kind] = counts.get(kind, 0) + 1
    assert counts == {
        "Retrieval": 6, "Reranking": 3, "Clustering": 5, "PairClassification": 2,
        "Classification": 6, "STS": 7, "Summarization": 1,
    }  # fmt: skip
    assert MtebTask("AmazonReviewsClassification", ("en",), ("test",)) in tasks


def test_factories_travel_and_give_fresh_tasks():
    factory = pickle.loads(pickle.dumps(MtebTask("Banking77Classification")))
    first, second = factory.load(), factory.load()
    assert first is not second
    # mteb's classifier is an attribute of the class: two tasks at a time would train one object
    assert first.evaluator_model is not second.evaluator_model
    forums = MtebTask("CQADupstackRetrieval")
    shared = set(map(id, mteb.get_task("CQADupstackRetrieval").metadata.tasks))
    assert not shared & set(map(id, forums.load().metadata.tasks))


def test_sizes_are_told_without_any_data():
    sizes = {task.name: task.num_texts for task in benchmark_tasks(ENGLISH_V1)}
    assert sizes["SciFact"] == 5183 + 300
    assert max(sizes, key=lambda name: sizes[name]) == "MSMARCO"
    # 2.4 million queries, most of them the same
    assert sizes["MindSmallReranking"] == 5277 + 37162
    # 3080 test texts and at most 8 examples of 77 classes in each of 10 experiments
    assert sizes["Banking77Classification"] == 3080 + 8 * 77 * 10
    forums = sum(MtebTask(p.name).num_texts for p in pieces(MtebTask("CQADupstackRetrieval")))
    assert sizes["CQADupstackRetrieval"] == forums > 400_000
    swahili = MtebTask("MIRACLRetrieval", ("sw",)).num_texts
    assert 0 < 100 * swahili < MtebTask("MIRACLRetrieval").num_texts
    # clustering embeds a sample of its documents
    assert MtebTask("ArXivHierarchicalClusteringP2P").num_texts <= 2048


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"benchmarks": ["MTEB(eng,v1)"]},
            "no benchmark 'MTEB(eng,v1)'; did you mean 'MTEB(eng, v1",
        ),
        ({"benchmarks": ["MIEB(eng)"]}, "has tasks with inputs of type image"),
        ({"tasks": ["SciFacts"]}, "mteb has no task 'SciFacts'; did you mean 'SciFact'?"),
        ({"tasks": ["qqq qqq"]}, "mteb has no task 'qqq qqq'; mteb.get_tasks() lists all"),
        ({"tasks": ["CIFAR10"]}, "has inputs of type image"),
        ({"benchmarks": ["MIRACL"], "languages": ["arr"]}, "'arr'; did you mean 'ar'?"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(asked, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        tasks_of(**asked)


def test_a_subset_that_a_task_lacks_is_refused():
    with pytest.raises(ConfigError, match="no subset 'enn'; did you mean 'en'"):
        MtebTask("STS22", ("enn",)).load()


def test_a_task_that_is_named_twice_is_one():
    assert named_tasks(["SciFact", "SciFact"]) == (MtebTask("SciFact"),)


def test_languages_choose_subsets_as_mteb_does():
    tasks = benchmark_tasks("MTEB(Multilingual, v2)")
    ours = {task.name: set(task.load().hf_subsets) for task in of_languages(tasks, ["swa", "ben"])}
    theirs = {}
    for factory in tasks:
        try:
            task = factory.load()
            kept = set(mteb.get_task(factory.name, languages=["swa", "ben"]).hf_subsets)
        except ValueError:
            continue
        if kept & set(task.hf_subsets):
            theirs[factory.name] = kept & set(task.hf_subsets)
    assert ours == theirs
    assert len(ours) > 5
    (miracl,) = tasks_of(benchmarks=["MIRACL"], languages=["ar", "swa-Latn"])
    assert miracl == MtebTask("MIRACLRetrieval", ("ar", "sw"))


def test_only_retrieval_and_aggregates_are_taken_apart():
    assert len(pieces(MtebTask("CQADupstackRetrieval"))) == 12
    assert pieces(MtebTask("MIRACLRetrieval", ("ar", "bn"))) == (
        MtebTask("MIRACLRetrieval", ("ar",)),
        MtebTask("MIRACLRetrieval", ("bn",)),
    )
    for name in ("Tatoeba", "MassiveIntentClassification", "SciFact", "STS22"):
        assert pieces(MtebTask(name)) == (MtebTask(name),)


def test_joined_results_have_the_order_of_the_whole_task():
    factory = MtebTask("MIRACLRetrieval", ("ar", "bn", "de"))
    parts = [result_of(piece.load(), made_up_score) for piece in pieces(factory)]
    whole = result_of(factory.load(), made_up_score)
    assert joined(factory, parts[::-1]).scores == whole.scores
    changed = parts[1].model_copy(update={"dataset_revision": "other"})
    with pytest.raises(ValueError, match="revision"):
        joined(factory, [parts[0], changed, parts[2]])


def test_english_v1_has_the_seven_categories_of_the_papers():
    found = averages._categories(ENGLISH_V1)
    assert {category: len(names) for category, names in found.items()} == {
        "Retrieval": 15, "Reranking": 4, "Clustering": 11, "PairClassification": 3,
        "Classification": 12, "STS": 10, "Summarization": 1,
    }  # fmt: skip
    assert tuple(found) == averages.CATEGORIES


@pytest.mark.parametrize("name", [ENGLISH_V1, "MTEB(eng, v2)", "MTEB(Multilingual, v2)", "BEIR"])
def test_averages_are_those_of_mtebs_own_table(name):
    factories = benchmark_tasks(name)
    results = [result_of(factory.load(), made_up_score) for factory in factories]
    model = ModelResult(model_name="made/up", model_revision="1", task_results=results)
    theirs = mteb.get_benchmark(name).get_score(BenchmarkResults(model_results=[model]))["made/up"]
    scores = {
        factory.name: averages.main_score(factory, result)
        for factory, result in zip(factories, results, strict=True)
    }
    ours = averages.averages(name, scores)
    assert {key.replace(" (", "("): value for key, value in ours.items()} == pytest.approx(
        {key: value for key, value in theirs.items() if key != "Rank"}, abs=1e-12
    )


def test_what_lies_outside_a_task_does_not_count():
    factory = MtebTask("AmazonReviewsClassification", ("en",), ("test",))
    everything = result_of(MtebTask(factory.name).load(), made_up_score)
    assert averages.main_score(factory, everything) == made_up_score(factory.name, "test", "en")


def test_only_complete_categories_have_an_average():
    names = averages._categories(ENGLISH_V1)
    scores = {name: 0.5 for task in names.values() for name in task}
    whole = averages.averages(ENGLISH_V1, scores)
    assert list(whole) == [*names, "Mean (Task)", "Mean (TaskType)"]
    del scores["STS12"]
    assert list(averages.averages(ENGLISH_V1, scores)) == [n for n in names if n != "STS"]
    missing = averages.averages(ENGLISH_V1, {**scores, "STS12": float("nan"), "Other": 1.0})
    assert "STS" not in missing


def test_forums_stand_for_their_task():
    names = averages._categories(ENGLISH_V1)["Retrieval"]
    scores = {name: 0.4 for name in names if name != "CQADupstackRetrieval"}
    assert averages.averages(ENGLISH_V1, scores) == {}
    forums = [piece.name for piece in pieces(MtebTask("CQADupstackRetrieval"))]
    scores |= {name: number / 12 for number, name in enumerate(forums)}
    found = averages.averages(ENGLISH_V1, scores)
    assert found["Retrieval"] == pytest.approx((14 * 0.4 + 5.5 / 12) / 15)


def test_miracl_is_averaged_by_language():
    # Nomic Embed v2's row of its Table 5, and the two averages that stand before it
    row = [76.7, 73.6, 56.6, 54.7, 56.3, 59.2, 77.1, 55.8, 60.5, 54.2, 67.0, 65.9, 65.2, 66.3,
           82.6, 78.3, 78.3, 59.5]  # fmt: skip
    by_language = dict(zip(averages.MIRACL_LANGUAGES, row, strict=True))
    assert list(by_language) == MtebTask("MIRACLRetrieval").load().hf_subsets
    found = averages.miracl_averages(by_language)
    assert found["Mean (18)"] == pytest.approx(66.0, abs=0.05)
    assert found["Mean (16)"] == pytest.approx(65.8, abs=0.05)
    del by_language["yo"]
    assert list(averages.miracl_averages(by_language)) == ["Mean (16)"]
