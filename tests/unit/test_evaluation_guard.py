"""The guard's verdict, and the interval of a gain over queries."""

import numpy as np
import pytest

from rayembed.config.guard import GuardConfig, own_sets_of
from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.evaluation.guard import Gain, Judged, Scored, Verdict, gain, verdict
from rayembed.evaluation.tables import UNTRAINED, ScoreKey
from rayembed.pipeline.estimate import estimate
from rayembed.pipeline.requirements import export_bytes, model_size
from rayembed.recipes.catalogue import get_recipe
from rayembed.tables import show

TRAINED = ScoreKey("s")
HALF = ScoreKey("s", share=0.5)
QUARTER = ScoreKey("s", share=0.25)


def judged(**own_and_general):
    """Verdict on models named by (own, general) scores."""
    keys = {"base": UNTRAINED, "trained": TRAINED, "half": HALF, "quarter": QUARTER}
    models = {
        keys[name]: Scored({"mine": own, "first": general, "second": general}, {})
        for name, (own, general) in own_and_general.items()
    }
    return verdict(models, TRAINED, ["mine", "not scored"], GuardConfig())


def test_the_highest_gain_is_kept_that_loses_little_on_the_mean_of_general_tasks():
    base, near = (0.5, 0.6), (0.7, 0.598)
    assert judged(base=base, trained=(0.8, 0.6), half=near).kept == TRAINED
    assert judged(base=base, trained=(0.8, 0.59), half=near).kept == HALF
    assert judged(base=base, trained=(0.8, 0.59), half=near, quarter=(0.71, 0.6)).kept == QUARTER
    assert judged(base=base, trained=(0.8, 0.59), half=(0.7, 0.59)).kept == UNTRAINED
    assert judged(base=base, trained=(0.4, 0.7), half=(0.5, 0.7)).kept == UNTRAINED
    assert judged(base=base, trained=(float("nan"), 0.7)).kept == UNTRAINED


def test_the_verdict_says_what_is_kept_and_why():
    kept = judged(base=(0.5, 0.6), trained=(0.8, 0.59), half=(0.7, 0.598))
    told = "the mixture with 50% of the trained model is kept: own data +0.200"
    assert kept.summary.startswith(told)
    assert "general tasks -0.002" in kept.summary
    lines = show(kept.table(["s"]), "markdown").splitlines()
    assert [line.rstrip("| ").endswith("kept") for line in lines[-2:]] == [False, True]
    none = judged(base=(0.5, 0.6), trained=(0.4, 0.6))
    assert none.summary.startswith("training gives no better model than its base: own data -0.100")


def in_general(*gains):
    """Verdict on a trained model with such gains on general tasks `t0`, `t1`, …"""
    base = {"mine": 0.5, **{f"t{i}": 0.5 for i in range(len(gains))}}
    trained = {"mine": 0.8, **{f"t{i}": 0.5 + apart for i, apart in enumerate(gains)}}
    models = {UNTRAINED: Scored(base, {}), TRAINED: Scored(trained, {})}
    return verdict(models, TRAINED, ["mine"], GuardConfig())


def test_tasks_that_lose_within_a_rising_mean_are_named_and_the_model_is_kept():
    found = in_general(0.073, -0.0064, -0.0344, -0.0029)
    assert found.kept == TRAINED
    told = "general tasks +0.007; but t2 -0.034, t1 -0.006"
    assert found.summary.endswith(told)
    assert told.removeprefix("general tasks ") in show(found.table(["s"]), "markdown")


def test_tasks_that_lose_no_more_than_stated_are_not_named():
    found = in_general(0.0732, -0.0025, 0.0)
    assert found.summary.endswith("general tasks +0.024")
    assert "but" not in show(found.table(["s"]), "markdown")


def test_of_many_tasks_that_lose_the_worst_are_named_and_the_others_counted():
    found = in_general(0.5, *(-i / 100 for i in range(1, 6)))
    assert found.summary.endswith("; but t5 -0.050, t4 -0.040, t3 -0.030, 2 more")
    assert "t3 -0.030, t2 -0.020, t1 -0.010 |" in show(found.table(["s"]), "markdown")
    none = in_general(-0.01, -0.02)
    assert none.kept == UNTRAINED
    assert "general tasks -0.015; of these t1 -0.020, t0 -0.010; nor does" in none.summary


def test_a_gain_over_queries_has_the_interval_of_its_standard_error():
    generator = np.random.default_rng(3)
    base = generator.random(400).round(2)
    model = base + generator.normal(0.05, 0.2, 400).round(2)
    scored = [Scored({"t": x.mean(), "u": x.mean()}, {"t": [x], "u": [x]}) for x in (model, base)]
    found = gain(*scored, ["t"])
    error = (model - base).std() / 20
    assert found.mean == pytest.approx((model - base).mean())
    for side, end in zip((-1.96, 1.96), found.interval, strict=True):
        assert end == pytest.approx(found.mean + side * error, abs=0.25 * error)
    assert found.is_sure
    # Two tasks, each with draws of its own: the interval is narrower by the root of two.
    both = gain(*scored, ["t", "u"]).interval
    width = found.interval[1] - found.interval[0]
    assert both[1] - both[0] == pytest.approx(width / 2**0.5, rel=0.15)
    nothing = gain(scored[1], scored[1], ["t"])
    assert nothing.interval == (0.0, 0.0)
    assert not nothing.is_sure


def test_tasks_without_scores_of_queries_stay_as_they_are_in_all_draws():
    generator = np.random.default_rng(3)
    base = generator.random(400)
    model = base + generator.normal(0.05, 0.2, 400)
    with_rest = [
        Scored({"t": x.mean(), "rest": rest}, {"t": [x]}) for x, rest in ((model, 0.9), (base, 0.7))
    ]
    alone, both = gain(*with_rest, ["t"]), gain(*with_rest, ["t", "rest"])
    assert both.mean == pytest.approx((alone.mean + 0.2) / 2)
    assert both.interval == pytest.approx([(end + 0.2) / 2 for end in alone.interval])
    assert str(both).endswith(", queries of 1 of 2 tasks)")
    assert "queries" not in str(alone)


def test_without_scores_of_queries_there_is_no_interval():
    model, base = Scored({"t": 0.6}, {}), Scored({"t": 0.5}, {"t": [[0.5]]})
    assert str(gain(model, base, ["t"])) == "+0.100"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["evaluation.before_training=false"], "before_training=true"),
        (["data.datasets.pairs.held_out=null"], "held out; set evaluation.guard=null too"),
        (["evaluation.benchmarks=[]"], "needs general tasks"),
        (["evaluation.guard.own_sets=[mine]"], "own_sets lacks"),
        (["evaluation.guard.shares=[1.0]"], "shares"),
        (["evaluation.guard.method=soup"], "'linear' or 'slerp'"),
        (["evaluation.guard.most_loss=-1"], "most_loss"),
    ],
)
def test_what_the_guard_cannot_do_is_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        override(get_recipe("biencoder"), ["data.datasets.pairs.source.path=x.jsonl", *changes])


@pytest.mark.parametrize("recipe", ["biencoder", "biencoder-corpus"])
def test_runs_on_own_data_are_guarded_and_one_setting_takes_it_away(recipe):
    run = get_recipe(recipe)
    (dataset,) = run.data.datasets
    assert run.evaluation.guard == GuardConfig()
    assert [own.kind for own in with_named_benchmarks(run).evaluation.own_sets].count("sts") == 1
    whole = override(run, [f"data.datasets.{dataset.name}.held_out=null", "evaluation.guard=null"])
    assert (whole.held_out_datasets, whole.evaluation.num_mixtures) == ([], 0)
    hub = with_named_benchmarks(override(run, ["evaluation.benchmarks=[NanoBEIR]"]))
    assert (hub.evaluation.benchmarks, hub.evaluation.own_sets) == (("NanoBEIR",), ())


def test_only_a_gain_with_an_interval_may_be_told_to_be_chance():
    found = (Judged(TRAINED, Gain(0.3, None), Gain(0.1, None), {}),)
    assert "chance" not in Verdict(found, TRAINED, 0.003).summary
    small = (Judged(TRAINED, Gain(0.3, (-0.1, 0.5)), Gain(0.1, None), {}),)
    assert "chance" in Verdict(small, TRAINED, 0.003).summary


def test_an_own_set_with_the_name_of_a_task_is_refused():
    mine = "evaluation.own_sets=[{name: WikiSentenceRetrieval, path: judged}]"
    with pytest.raises(ConfigError, match="'WikiSentenceRetrieval' is the name of a task"):
        with_named_benchmarks(override(get_recipe("biencoder"), [mine]))


def test_judged_sets_of_the_user_are_own_data_unless_named_otherwise():
    mine = "evaluation.own_sets=[{name: mine, path: judged}, {name: other, path: elsewhere}]"
    run = with_named_benchmarks(override(get_recipe("biencoder"), [mine]))

    def own(*changes):
        evaluation = override(run, list(changes)).evaluation
        return own_sets_of(evaluation.guard, evaluation)

    assert len(run.evaluation.own_sets) == 8, "the sample's six are general"
    assert own() == ("mine", "other")
    assert own("evaluation.guard.own_sets=[mine]") == ("mine",)
    assert own("evaluation.guard.own_sets=[]") == ()
    assert own("data.datasets.pairs.held_out=null") == ("mine", "other")


def test_a_run_without_a_guard_keeps_its_fingerprint():
    plain = get_recipe("biencoder-quickstart")
    assert "guard" not in plain.to_yaml()
    assert override(plain, ["evaluation.guard=null"]).fingerprint == plain.fingerprint


def test_mixtures_count_in_what_a_run_needs():
    plain = override(get_recipe("biencoder-quickstart"), [])
    own = plain.evaluation.own_sets[0].name
    guarded = override(plain, [f"evaluation.guard={{own_sets: [{own}], shares: [0.3, 0.6]}}"])
    assert guarded.evaluation.num_mixtures == 2
    size = model_size(plain.model)
    each = export_bytes(plain, size) / (len(plain.stages) + 1)
    assert export_bytes(guarded, size) == export_bytes(plain, size) + 2 * each
    assert estimate(guarded).seconds > estimate(plain).seconds
