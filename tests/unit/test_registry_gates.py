import json
import math
from dataclasses import replace

import pytest
from made_results import write_result

from rayembed.config.document import write_yaml
from rayembed.errors import ArtifactError, ConfigError
from rayembed.registry.gates import (
    Comparison,
    Requirement,
    check_names,
    decide,
    parse_requirement,
    summary,
)
from rayembed.results.files import TaskFacts, find_results, read_results
from rayembed.results.scores import OTHER, TaskScore, by_category, from_json, mean, to_json

FACTS = {
    "SciFact": TaskFacts("Retrieval", "ndcg_at_10", "mteb/scifact"),
    "NFCorpus": TaskFacts("Retrieval", "ndcg_at_10", "mteb/nfcorpus"),
    "Banking77": TaskFacts("Classification", "accuracy", "mteb/banking77"),
}


def score(task, value, *, revision="r1", parts=("default",), **metrics):
    facts = FACTS[task]
    return TaskScore(
        task=task,
        category=facts.category,
        metric=facts.metric,
        value=value,
        dataset=facts.dataset,
        dataset_revision=revision,
        scores={("test", part): value for part in parts},
        model_revision="w",
        metrics=metrics,
    )


SCORES = (score("SciFact", 0.6, ndcg_at_1=0.4), score("NFCorpus", 0.3), score("Banking77", 0.8))


def holds(text, scores=SCORES):
    return decide("m/1", scores, [parse_requirement(text)], None).holds


def test_requirements_are_read():
    assert parse_requirement("SciFact>=0.6") == Requirement("SciFact", 0.6)
    assert parse_requirement(" ndcg_at_1  SciFact >= 4e-1 ") == Requirement(
        "SciFact", 0.4, "ndcg_at_1"
    )
    assert str(parse_requirement("ndcg_at_1 SciFact>=0.40")) == "ndcg_at_1 SciFact >= 0.4"


@pytest.mark.parametrize(
    "text", ["SciFact", "SciFact>0.5", ">=0.5", "SciFact>=high", "SciFact>=nan", "a b c>=1", ""]
)
def test_what_is_no_requirement_is_told(text):
    with pytest.raises(ConfigError, match="is no gate; write 'NAME>=NUMBER'"):
        parse_requirement(text)


def test_tasks_categories_the_mean_and_metrics_are_judged():
    assert holds("SciFact>=0.6")  # reached, not passed
    assert not holds("SciFact>=0.61")
    assert holds("Retrieval>=0.45")
    assert not holds("Retrieval>=0.46")
    assert holds("mean>=0.566666")
    assert not holds("mean>=0.567")
    assert holds("ndcg_at_1 SciFact>=0.4")
    assert not holds("ndcg_at_1 SciFact>=0.41")
    assert not holds("SciFact>=0", (score("SciFact", math.nan),))


def test_what_cannot_be_judged_is_told_with_the_nearest_name():
    with pytest.raises(ConfigError, match="no scores of a task or category 'SciFcat'; did you me"):
        check_names([Requirement("SciFcat", 0.5)], SCORES)
    with pytest.raises(ConfigError, match="SciFact has no metric 'ndcg_at_2'; did you mean 'ndcg"):
        check_names([Requirement("SciFact", 0.5, "ndcg_at_2")], SCORES)
    with pytest.raises(ConfigError, match="NFCorpus has no metric 'ndcg_at_1'"):
        check_names([Requirement("Retrieval", 0.5, "ndcg_at_1")], SCORES)


def compared(new, old, tolerance=0.0):
    return decide("m/2", new, [], Comparison(1, tuple(old), tolerance))


def test_a_version_must_not_be_worse_in_the_mean_nor_by_more_than_the_tolerance_in_a_task():
    old = SCORES
    better = [score("SciFact", 0.7), score("NFCorpus", 0.3), score("Banking77", 0.79)]
    assert not compared(better, old).holds  # one task is lower
    assert compared(better, old, 0.01).holds
    assert not compared(better, old, 0.009).holds
    # Within the tolerance everywhere, but lower in the mean.
    lower = [score("SciFact", 0.6), score("NFCorpus", 0.3), score("Banking77", 0.795)]
    decision = compared(lower, old, 0.1)
    assert [check.holds for check in decision.checks] == [False, True, True, True]
    assert compared(old, old).holds
    collapsed = [score("SciFact", math.nan), score("NFCorpus", 0.3), score("Banking77", 0.8)]
    assert not compared(collapsed, old, 1.0).holds
    assert compared(old, collapsed).holds


def test_only_what_was_measured_on_the_same_is_compared():
    old = [score("SciFact", 0.9, revision="r0"), score("NFCorpus", 0.2)]
    decision = compared(SCORES, old)
    assert decision.holds  # SciFact's 0.9 was another data set
    assert [check.gate for check in decision.checks] == [
        "mean, against version 1",
        "NFCorpus, against version 1",
    ]
    assert decision.checks[0].figure == pytest.approx(0.3)
    assert "1 of other data revisions" in decision.checks[0].note
    assert "1 scored for this version alone" in decision.checks[0].note
    fewer = compared([score("SciFact", 0.9, parts=("de",))], [score("SciFact", 0.1)])
    assert not fewer.holds
    assert "nothing was measured on the same data" in fewer.checks[0].note


def test_decisions_are_kept_with_their_figures():
    decision = decide("m/2", SCORES, [Requirement("SciFact", 0.61)], Comparison(1, SCORES, 0.0))
    kept = json.loads(decision.to_json())
    assert kept["holds"] is False
    assert kept["gates"][0] == {
        "gate": "SciFact >= 0.61",
        "figure": 0.6,
        "limit": 0.61,
        "holds": False,
        "note": "",
    }
    assert "| SciFact >= 0.61 | 0.6000 | 0.6100 | **no** |" in decision.to_markdown()
    nothing = decide("m/2", [score("SciFact", math.nan)], [Requirement("SciFact", 0.5)], None)
    assert json.loads(nothing.to_json())["gates"][0]["figure"] is None


def test_means_and_summary():
    means = {name: mean(scores) for name, scores in by_category(SCORES).items()}
    assert means == {"Classification": 0.8, "Retrieval": pytest.approx(0.45)}
    assert mean(SCORES) == pytest.approx(1.7 / 3)
    assert summary(SCORES) == {
        "SciFact": 0.6,
        "NFCorpus": 0.3,
        "Banking77": 0.8,
        "category/Classification": 0.8,
        "category/Retrieval": pytest.approx(0.45),
        "mean": pytest.approx(1.7 / 3),
    }
    assert summary([]) == {}


def test_own_and_general_tasks_have_a_mean_each():
    mine = replace(SCORES[0], task="Tickets", value=0.2, dataset="own/Tickets")
    sample = replace(SCORES[0], task="WikiSTS", value=0.7, dataset="sample/WikiSTS")
    scores = (*SCORES, sample, mine)
    figures = summary(scores)
    assert "mean" not in figures
    assert (figures["mean/own"], figures["mean/general"]) == (0.2, pytest.approx(2.4 / 4))
    gates = [parse_requirement(f"mean/{kind}>=0.5") for kind in ("own", "general")]
    assert [check.holds for check in decide("m/1", scores, gates, None).checks] == [False, True]
    with pytest.raises(ConfigError, match="cannot be judged"):
        decide("m/1", SCORES, gates, None)


def test_scores_survive_their_file():
    scores = (*SCORES, score("SciFact", math.nan, parts=("b", "a")))
    again = from_json(to_json(scores))
    assert repr(sorted(again, key=repr)) == repr(sorted(scores, key=repr))
    for broken in ("", "[1]", '[{"task": "a", "scores": []}]'):
        with pytest.raises(ArtifactError, match="no JSON that rayembed wrote"):
            from_json(broken)


def write(folder, task, entries, revision="r1"):
    folder.mkdir(parents=True, exist_ok=True)
    value = {
        "dataset_revision": revision,
        "task_name": task,
        "mteb_version": "2.26.24",
        "scores": entries,
        "evaluation_time": 1.0,
        "kg_co2_emissions": None,
    }
    (folder / f"{task}.json").write_text(json.dumps(value))


def entry(main, subset="default", **metrics):
    return {"main_score": main, "hf_subset": subset, "languages": ["eng-Latn"], **metrics}


def test_mtebs_files_are_read(tmp_path):
    folder = tmp_path / "results" / "rayembed__m" / "abcabcabcabc-1"
    write(folder, "SciFact", {"test": [entry(0.6, ndcg_at_1=0.4, name="x", ok=True)]})
    parts = [entry(0.5, "de", f1=0.2), entry(0.7, "en", f1=0.4, only=1)]
    write(folder, "Banking77", {"test": parts, "dev": [entry(0.9, "en", f1=0.6)]})
    write(folder, "Unheard", {"test": [entry(0.1)]})
    (folder / "model_meta.json").write_text("{}")
    (folder / "run_settings.jsonl").write_text("{}\n")
    found = {s.task: s for s in read_results(folder, FACTS.get)}
    assert set(found) == {"SciFact", "Banking77", "Unheard"}
    assert found["SciFact"].value == 0.6
    assert found["SciFact"].metrics == {"ndcg_at_1": 0.4}
    assert found["SciFact"].measured_on == ("SciFact", "r1", ("test/default",))
    assert found["Banking77"].value == pytest.approx(0.7)
    assert found["Banking77"].metrics == {"f1": pytest.approx(0.4)}
    assert found["Banking77"].parts == ("dev/en", "test/de", "test/en")
    assert found["Banking77"].category == "Classification"
    assert found["Banking77"].model_revision == "abcabcabcabc-1"
    assert found["Unheard"].category == "Other"
    (folder / "SciFact.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"SciFact\.json' is no result file of mteb"):
        read_results(folder, FACTS.get)
    with pytest.raises(ArtifactError, match="no scores in"):
        read_results(tmp_path, FACTS.get)


def test_scores_of_the_weights_are_found_and_none_of_others(tmp_path):
    mine = tmp_path / "results" / "rayembed__m" / "abcabcabcabc-1"
    other = tmp_path / "results" / "org__other" / "5ec0de"
    write(mine, "SciFact", {"test": [entry(0.6)]})
    write(other, "SciFact", {"test": [entry(0.7)]})
    # What a folder of object storage leaves beside what it copied.
    for folder in (tmp_path, mine):
        (folder / ".kept.json").write_text("{}")
    assert find_results(tmp_path, "abcabcabcabc") == mine
    assert {score.task for score in read_results(mine, FACTS.get)} == {"SciFact"}
    assert find_results(tmp_path / "results", "abcabcabcabc") == mine
    assert find_results(mine, "abcabcabcabc") == mine
    with pytest.raises(ArtifactError, match=r"no scores of the weights 000.*results/org__other"):
        find_results(tmp_path, "0" * 12)
    write(mine.with_name("abcabcabcabc-2"), "SciFact", {"test": [entry(0.6)]})
    with pytest.raises(ArtifactError, match=r"has 2 sets of scores of the weights abcabcabcabc"):
        find_results(tmp_path, "abcabcabcabc")
    with pytest.raises(ArtifactError, match="there is no results folder"):
        find_results(tmp_path / "nothing", "abcabcabcabc")


MINE = "abcabcabcabc"


@pytest.mark.parametrize(
    ("name", "revision", "weights"),
    [
        ("b3eb7073c522-aaaaaaaa", None, "b3eb7073c522"),
        ("first256-b3eb7073c522-aaaaaaaa", None, "b3eb7073c522"),
        ("renamed", "b3eb7073c522-aaaaaaaa", "b3eb7073c522"),
        (f"{MINE}-aaaaaaaa", "b3eb7073c522-aaaaaaaa", "b3eb7073c522"),
    ],
)
def test_scores_of_other_weights_are_refused_even_on_the_users_word(
    tmp_path, name, revision, weights
):
    folder = results_folder(tmp_path / name, revision)
    for trusted in (False, True):
        with pytest.raises(
            ArtifactError, match=f"were measured with the weights {weights}, .* {MINE}"
        ):
            find_results(folder, MINE, trusted=trusted)
    # The control: of this model, by either place where the revision stands.
    for own, stated in ((f"{MINE}-aaaaaaaa", None), ("moved", f"{MINE}-aaaaaaaa")):
        found = results_folder(tmp_path / own, stated)
        assert find_results(found, MINE) == found


@pytest.mark.parametrize(
    ("name", "revision"),
    [
        ("5ec0de" * 6 + "aaaa", None),
        ("5ec0de" * 6 + "aaaa-12345678", None),
        ("1_0", "1"),
        (f"first256-{MINE}-aaaaaaaa", None),
    ],
)
def test_scores_that_do_not_name_the_weights_are_taken_on_the_users_word_alone(
    tmp_path, caplog, name, revision
):
    folder = results_folder(tmp_path / name, revision)
    with pytest.raises(ArtifactError, match=rf"weights \({MINE}\).* --trust-results") as told:
        find_results(folder, MINE)
    assert repr(name) in str(told.value)
    assert find_results(folder, MINE, trusted=True) == folder
    assert "--trust-results: the scores in" in caplog.text


def results_folder(folder, revision):
    write(folder, "SciFact", {"test": [entry(0.7)]})
    (folder / "model_meta.json").write_text(json.dumps({"name": "a/b", "revision": revision}))
    return folder


def taken(task, value, **how):
    return replace(score(task, value), measured_with=how)


def test_scores_that_were_taken_otherwise_are_not_compared():
    """A champion scored in another number type, width or with another prompt is no measure."""
    how = {"dtype": "float32", "dimensions": "384", "prompt of query": "find: "}
    old = Comparison(3, (taken("SciFact", 0.5, **how), taken("NFCorpus", 0.2, **how)), 0.0)
    same = (taken("SciFact", 0.6, **how), taken("NFCorpus", 0.3, **how))
    assert decide("m/4", same, [], old).holds
    for name, value, told in (
        ("dtype", "bfloat16", "dtype"),
        ("dimensions", "256", "dimensions"),
        ("prompt of query", "search: ", "prompts"),
    ):
        other = (taken("SciFact", 0.6, **{**how, name: value}), same[1])
        decision = decide("m/4", other, [], old)
        assert not decision.holds
        (check,) = decision.checks
        assert check.gate == f"same {told}, against version 3"
        assert f"{value!r} here, {how[name]!r} there (1 tasks, first SciFact)" in check.note
        assert check.note.endswith(f"--differing {told}")
        assert decide("m/4", other, [], replace(old, differing=(told,))).holds


def test_a_mean_over_scores_of_unlike_software_holds_no_gate():
    old, new = taken("SciFact", 0.6, software="a"), taken("NFCorpus", 0.4, software="b")
    (mean_of_both,) = decide("m/4", (old, new), [parse_requirement("mean>=0.3")], None).checks
    assert not mean_of_both.holds
    assert "software of several versions" in mean_of_both.note
    assert decide("m/4", (old, new), [parse_requirement("SciFact>=0.3")], None).holds
    again = replace(old, measured_with=new.measured_with)
    assert decide("m/4", (again, new), [parse_requirement("mean>=0.3")], None).holds


def test_scores_of_which_nothing_is_recorded_are_compared_with_such_alone():
    silent = (score("SciFact", 0.6),)
    told = (taken("SciFact", 0.6, dtype="float32"),)
    assert decide("m/4", silent, [], Comparison(3, silent, 0.0)).holds
    for one, other in ((silent, told), (told, silent)):
        (check,) = decide("m/4", one, [], Comparison(3, other, 0.0)).checks
        assert not check.holds
        assert "'not recorded'" in check.note


def test_how_scores_were_taken_is_read_from_beside_them_and_kept(tmp_path):
    write_result(tmp_path, "x/y", "r", "SciFact", {("test", "default"): 0.5})
    (folder,) = (tmp_path / "results").glob("*/*")
    (before,) = read_results(folder, FACTS.get)
    assert before.measured_with == {}
    facts = {"type": "Retrieval", "metric": "ndcg_at_10", "dataset": "mteb/any"}
    record = {
        "conditions": {"dtype": "float32"},
        "prompts": [
            {"task": "SciFact", "side": "query", "prompt": "find: ", **facts},
            {"task": "NFCorpus", "side": "query", "prompt": "other: ", **facts},
        ],
    }
    (folder / "prompts.yaml").write_text(write_yaml(record))
    (found,) = read_results(folder, FACTS.get)
    assert found.measured_with == {"dtype": "float32", "prompt of query": "find: "}
    assert from_json(to_json([found])) == (found,)


def test_what_stands_beside_results_comes_before_the_known_tasks(tmp_path):
    write_result(tmp_path, "x/y", "r", "SciFact", {("test", "default"): 0.5})
    write_result(tmp_path, "x/y", "r", "support", {("test", "default"): 0.6})
    (folder,) = (tmp_path / "results").glob("*/*")
    before = {found.task: found.category for found in read_results(folder, FACTS.get)}
    assert before == {"SciFact": "Retrieval", "support": OTHER}
    facts = {"type": "STS", "metric": "cosine_spearman", "dataset": "own/support"}
    rows = [{"task": task, **facts, "side": "text", "prompt": ""} for task in before]
    (folder / "prompts.yaml").write_text(write_yaml({"conditions": {}, "prompts": rows}))
    measured = read_results(folder, FACTS.get)
    assert {(s.category, s.metric, s.dataset) for s in measured} == {tuple(facts.values())}
    assert holds("STS>=0.55", measured)
    assert not holds("STS>=0.56", measured)
