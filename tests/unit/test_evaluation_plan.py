"""What an evaluation has to do, and what its scores are over."""

import io

import mteb
import pytest
from made_results import write_result

from rayembed.config.evaluation import EvaluationRun
from rayembed.errors import ConfigError
from rayembed.evaluation.benchmarks import ENGLISH_V1, MtebTask
from rayembed.evaluation.bm25 import Bm25, bm25_meta
from rayembed.evaluation.plan import find_results, retrieval_only, task_factories
from rayembed.evaluation.score import ModelScores
from rayembed.pipeline.evaluate.evaluate import EvaluationResult, evaluate
from rayembed.pipeline.evaluate.job import run_evaluation_job
from rayembed.pipeline.evaluate.report import benchmark_averages, print_evaluated
from rayembed.results.writer import open_results

META = bm25_meta("bm25", Bm25.revision)
COUNTERFACTUAL = "AmazonCounterfactualClassification"


def asked(**values):
    return EvaluationRun.model_validate({"model": {"reference": "bm25"}, **values})


def result(folder, task, scores):
    return mteb.TaskResult.from_disk(write_result(folder, "x/y", "r", task, scores))


def kept(folder, task):
    return mteb.TaskResult.from_disk(folder / f"{task}.json")


def test_a_score_is_over_the_subsets_that_are_asked_and_not_all_in_the_file(tmp_path):
    scores = {("test", "en"): 0.9, ("test", "de"): 0.1, ("validation", "en"): 0.2}
    name = str(META.name).replace("/", "__")
    write_result(tmp_path, name, META.revision, COUNTERFACTUAL, scores)
    with open_results(tmp_path, META) as writer:
        (one,) = find_results([MtebTask(COUNTERFACTUAL, ("en",), ("test",))], writer)
        (two,) = find_results([MtebTask(COUNTERFACTUAL, ("en", "de"), ("test",))], writer)
    assert one.score == pytest.approx(0.9)
    assert two.score == pytest.approx(0.5)


def test_a_benchmark_counts_its_own_subsets_where_another_one_asked_for_more(tmp_path):
    run = asked(benchmarks=[ENGLISH_V1], tasks=[COUNTERFACTUAL])
    factories = task_factories(run)
    name = str(META.name).replace("/", "__")
    for factory in factories:
        task = factory.load()
        members = task.metadata.tasks if task.is_aggregate else [task]
        for member in members:
            places = {
                (split, subset): 0.9 if subset in {"en", "en-en", "default"} else 0.1
                for split in member.eval_splits
                for subset in member.hf_subsets
            }
            write_result(tmp_path, name, META.revision, member.metadata.name, places)
    with open_results(tmp_path, META) as writer:
        scorings = find_results(factories, writer)
    evaluated = EvaluationResult(run, ModelScores(META, str(tmp_path), tmp_path, scorings))
    assert evaluated.scored.scores[COUNTERFACTUAL] < 0.6
    assert benchmark_averages(evaluated)[ENGLISH_V1]["Classification"] == pytest.approx(0.9)


def test_miracl_is_reported_by_language_with_the_means_of_the_papers(tmp_path):
    run = asked(
        benchmarks=["MIRACL", "MIRACL-HardNegatives"],
        tasks=["STS12"],
    )
    whole, hard, sts = task_factories(run)
    languages = whole.load().hf_subsets
    scores = {("dev", language): i / 18 for i, language in enumerate(languages)}
    name = str(META.name).replace("/", "__")
    write_result(tmp_path, name, META.revision, whole.name, scores)
    some = {("dev", "de"): 0.25, ("dev", "yo"): 0.75}
    write_result(tmp_path, name, META.revision, hard.name, some)
    with open_results(tmp_path, META) as writer:
        scorings = find_results([whole, hard, sts], writer)
    evaluated = EvaluationResult(run, ModelScores(META, str(tmp_path), tmp_path, scorings))
    found = benchmark_averages(evaluated)
    mean = sum(scores.values()) / 18
    others = [score for (_, language), score in scores.items() if language not in {"de", "yo"}]
    assert found == {
        "MIRACL": {
            **{language: scores["dev", language] for language in languages},
            "Mean (18)": pytest.approx(mean),
            "Mean (16)": pytest.approx(sum(others) / 16),
        },
        "MIRACL-HardNegatives": {"de": 0.25, "yo": 0.75},  # as far as it is scored
    }
    assert mean != pytest.approx(sum(others) / 16)
    out = io.StringIO()
    print_evaluated(evaluated, out, tracking_uri="sqlite:///x")
    table = out.getvalue().partition("Averages of MIRACL\n")[2].splitlines()
    assert table[0].split() == ["Language", "Average"]
    assert ["Mean", "(18)", f"{mean:.4f}"] in [line.split() for line in table]


def test_what_is_scored_already_stays_when_other_subsets_are_scored(tmp_path):
    with open_results(tmp_path / "out", META) as writer:
        writer.save(result(tmp_path, "MIRACLRetrieval", {("dev", "ar"): 0.1}))
        writer.save(result(tmp_path, "MIRACLRetrieval", {("dev", "de"): 0.2}))
        writer.save(result(tmp_path, "MIRACLRetrieval", {("dev", "ar"): 0.3}))
        (row,) = kept(writer.place, "MIRACLRetrieval").scores.values()
        assert [(s["hf_subset"], s["main_score"]) for s in row] == [("ar", 0.3), ("de", 0.2)]
        other = result(tmp_path, "MIRACLRetrieval", {("dev", "bn"): 0.4})
        other.dataset_revision = "another"
        writer.save(other)
        (row,) = kept(writer.place, "MIRACLRetrieval").scores.values()
        assert [s["hf_subset"] for s in row] == ["bn"], "of other data"


def test_the_pieces_of_a_task_are_one_file_with_the_time_of_each_once(tmp_path):
    factory = MtebTask("MIRACLRetrieval", ("ar", "bn", "de"))
    with open_results(tmp_path / "out", META) as writer:
        (scoring,) = find_results([factory], writer)
        for job, score in zip(scoring.missing()[:2], (0.1, 0.2), strict=True):
            (subset,) = job.task.subsets
            scoring.take(job.task, result(tmp_path, factory.name, {("dev", subset): score}), writer)
        assert scoring.score is None
        (scoring,) = find_results([factory], writer)  # begun again
        (job,) = scoring.missing()
        assert job.task.subsets == ("de",)
        scoring.take(job.task, result(tmp_path, factory.name, {("dev", "de"): 0.6}), writer)
        assert scoring.score == pytest.approx(0.3)
        assert kept(writer.place, factory.name).evaluation_time == pytest.approx(3.0)


def test_a_member_of_an_aggregate_may_be_asked_for_as_well(tmp_path, monkeypatch):
    aggregate = "CQADupstackRetrieval"
    members = [t.metadata.name for t in MtebTask(aggregate).load().metadata.tasks]
    ran = []

    def fake(job, model):
        ran.append(job.name)
        found = result(tmp_path, job.name, {("test", "default"): 0.5})
        return {"task_result": found.to_dict(), "cost": {}}

    monkeypatch.setattr("rayembed.evaluation.jobs.ScoreTask.run", fake)
    run = asked(tasks=[aggregate, members[0]], placement={"storage_path": str(tmp_path / "out")})
    evaluated = evaluate(run)
    assert evaluated.failed == []
    assert evaluated.scored.scores == {aggregate: 0.5, members[0]: 0.5}
    assert sorted(ran) == sorted(members), "each once"


def test_bm25_says_what_it_does_not_take(tmp_path, capsys):
    place = f"placement.storage_path={tmp_path}"
    asked = ["--model", "bm25", "--tasks", "STS12", "--set", place]
    assert run_evaluation_job(asked, about=None) == 2
    assert "bm25 scores retrieval tasks only, not STS12" in (capsys.readouterr().err)


def test_what_is_scored_may_come_from_set_alone():
    asked = ["--model", "bm25", "--set", "tasks=[NFCorpus]"]
    asked += [
        "--set",
        "own_sets=[{name: shop, path: /data/shop}]",
        "--set",
        "own_sets.shop.split=dev",
    ]
    run, _ = run_evaluation_job.resolve(asked)
    assert run.tasks == ("NFCorpus",)
    assert [(own.name, own.split) for own in run.own_sets] == [("shop", "dev")]
    with pytest.raises(ConfigError, match="nothing to score the model on"):
        run_evaluation_job.resolve(["--model", "bm25"])


def test_bm25_takes_the_aggregates_of_retrieval():
    assert retrieval_only([MtebTask("CQADupstackRetrieval"), MtebTask("STS12")]) == [
        MtebTask("CQADupstackRetrieval")
    ]
