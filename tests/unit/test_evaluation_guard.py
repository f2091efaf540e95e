"""The guard's verdict, and the interval of a gain over queries."""

from types import SimpleNamespace

import numpy as np
import pytest
from own_pairs import own_run

from rayembed.api.training import Trained
from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.override import override
from rayembed.config.own_sets import RetrievalSet
from rayembed.config.run_evaluation import GuardConfig, own_sets_of
from rayembed.config.settings import changed
from rayembed.display.tables import show
from rayembed.errors import ConfigError
from rayembed.evaluation.score import gain
from rayembed.evaluation.tables import UNTRAINED, ScoreKey
from rayembed.pipeline.evaluate.general_tasks import with_fitting_tasks
from rayembed.pipeline.evaluate.guard import Judged, choice, remove_mixtures, verdict
from rayembed.pipeline.run.folders import RunFolders
from rayembed.recipes.catalogue import get_recipe
from rayembed.recipes.sample import Wikipedia
from rayembed.results.intervals import PairedDifference

TRAINED = ScoreKey("s")
HALF = ScoreKey("s", share=0.5)
QUARTER = ScoreKey("s", share=0.25)


def Scored(scores, queries):  # stands for the class
    """Scores of a model by task, and of single queries."""
    return SimpleNamespace(scores=scores, items=queries)


def judged(guard=GuardConfig(), **own_and_general):  # noqa: B008 # settings cannot change
    """Verdict on models named by (own, general) scores."""
    keys = {"base": UNTRAINED, "trained": TRAINED, "half": HALF, "quarter": QUARTER}
    models = {
        keys[name]: Scored({"mine": own, "first": general, "second": general}, {})
        for name, (own, general) in own_and_general.items()
    }
    return verdict(models, TRAINED, ["mine", "not scored"], guard)


def test_a_gain_is_kept_that_costs_less_than_it_brings_and_less_than_three_points():
    base = (0.5, 0.6)
    assert judged(base=base, trained=(0.8, 0.6), half=(0.7, 0.6)).kept == TRAINED
    assert judged(base=base, trained=(0.551, 0.59), half=(0.53, 0.598)).kept == TRAINED
    assert judged(base=base, trained=(0.8, 0.569), half=(0.7, 0.598)).kept == HALF
    assert judged(base=base, trained=(0.51, 0.585), half=(0.505, 0.597)).kept == HALF
    assert judged(base=base, trained=(0.51, 0.585), half=(0.505, 0.594)).kept == UNTRAINED
    assert judged(base=base, trained=(0.4, 0.7), half=(0.5, 0.7)).kept == UNTRAINED
    assert judged(base=base, trained=(float("nan"), 0.7)).kept == UNTRAINED
    assert judged(base=base, trained=(0.7, float("nan"))).kept == UNTRAINED
    assert judged(base=(float("nan"), 0.6), trained=(0.7, 0.6)).kept == UNTRAINED


def test_an_explicit_budget_takes_the_place_of_the_trade():
    budget = GuardConfig(most_loss=0.003)
    base, near = (0.5, 0.6), (0.7, 0.598)
    assert judged(budget, base=base, trained=(0.8, 0.59), half=near).kept == HALF
    assert judged(budget, base=base, trained=(0.8, 0.59), half=(0.7, 0.59)).kept == UNTRAINED
    assert judged(GuardConfig(most_loss=0.1), base=base, trained=(0.51, 0.55)).kept == TRAINED


def test_rounding_decides_nothing():
    at_the_budget = {"base": (0.5, 0.503), "trained": (0.8, 0.5)}
    assert 0.503 - 0.5 > 0.003, "otherwise nothing is tested"
    assert judged(GuardConfig(most_loss=0.003), **at_the_budget).kept == TRAINED
    assert judged(base=(0.5, 0.63), trained=(0.8, 0.6)).kept == UNTRAINED, "three points whole"
    assert judged(base=(0.5, 0.61), trained=(0.51, 0.6)).kept == UNTRAINED, "no more than it costs"
    gains = [0.8, 0.4, 0.8], [0.7, 0.5, 0.8]
    trained, base = ({f"t{i}": score for i, score in enumerate(scores)} for scores in gains)
    models = {UNTRAINED: Scored(base, {}), TRAINED: Scored(trained, {})}
    assert sum(trained[task] - base[task] for task in base) > 0, "otherwise nothing is tested"
    assert verdict(models, TRAINED, list(base), GuardConfig()).kept == UNTRAINED


def of_queries(general, **queries):
    """Verdict on models named by scores of own queries; with a general score of each."""
    keys = {"base": UNTRAINED, "trained": TRAINED, "half": HALF, "quarter": QUARTER}
    models = {
        keys[name]: Scored({"mine": np.mean(own), "other": general[name]}, {"mine": [list(own)]})
        for name, own in queries.items()
    }
    return verdict(models, TRAINED, ["mine"], GuardConfig())


def test_a_gain_that_may_be_chance_keeps_the_start():
    generator = np.random.default_rng(0)
    base, general = generator.random(200), {"base": 0.5, "trained": 0.5}
    noise = generator.normal(0, 0.2, 200)
    small, large = base + noise - noise.mean() + 0.02, base + noise - noise.mean() + 0.04
    assert of_queries(general, base=base, trained=small).kept == UNTRAINED
    assert of_queries(general, base=base, trained=large).kept == TRAINED


def test_a_gain_without_scores_of_queries_counts_from_a_tenth_of_a_point():
    base = (0.5, 0.6)
    assert judged(base=base, trained=(0.5001, 0.6), half=(0.50099, 0.6)).kept == UNTRAINED
    assert judged(base=base, trained=(0.5001, 0.6), half=(0.501, 0.6)).kept == HALF
    assert judged(base=(0.7, 0.6), trained=(0.701, 0.6)).kept == TRAINED, "whatever floats do"
    pairs = [0.2] * 40
    tiny = [score + 0.0005 for score in pairs]
    general = {"base": 0.5, "trained": 0.5}
    assert of_queries(general, base=pairs, trained=tiny).kept == TRAINED, "no chance in that"


def test_what_queries_do_not_tell_from_the_best_is_kept_where_it_loses_less():
    generator = np.random.default_rng(0)
    base = generator.random(200)
    trained, noise = base + 0.1, generator.normal(0, 0.1, 200)
    near = trained + noise - noise.mean() - 0.005
    general = {"base": 0.5, "trained": 0.48, "half": 0.49}
    assert of_queries(general, base=base, trained=trained, half=near).kept == HALF
    assert of_queries(general, base=base, trained=trained, half=trained - 0.005).kept == TRAINED
    far = trained + 5 * noise - 5 * noise.mean() - 0.021
    assert of_queries(general, base=base, trained=trained, half=far).kept == TRAINED
    no_loss = general | {"trained": 0.51, "half": 0.52}
    assert of_queries(no_loss, base=base, trained=trained, half=near).kept == TRAINED


def stated(rows, told_apart, budget):
    """The rule word for word, over whole thousandths; number of the row that is kept.

    Args:
        rows: own gain, lower end of its interval, general gain of each candidate.
        told_apart: pairs (better, worse) of rows that queries tell apart.
    """
    loss = [max(0, -general) for _, _, general in rows]
    left = []
    for i, (own, low, _) in enumerate(rows):
        trade = loss[i] < own and loss[i] < 30
        if own > 0 and low > 0 and (trade if budget is None else loss[i] <= budget):
            left.append(i)
    if not left:
        return None
    best = sorted(left, key=lambda i: (-rows[i][0], i))[0]
    near = [
        i
        for i in left
        if i == best or ((best, i) not in told_apart and 10 * rows[i][0] >= 8 * rows[best][0])
    ]
    return sorted(near, key=lambda i: (loss[i], -rows[i][0], i))[0]


def test_the_choice_is_the_rule_word_for_word_on_drawn_numbers():
    generator, kept = np.random.default_rng(11), []
    shares = (None, 0.75, 0.5, 0.25)
    for _ in range(4000):
        own, width = generator.integers(-4, 13, 4), generator.integers(0, 6, 4)
        general = generator.integers(-12, 5, 4) * generator.choice([1, 5])
        rows = [(int(o), int(o - w), int(g)) for o, w, g in zip(own, width, general, strict=True)]
        told_apart = {(i, j) for i in range(4) for j in range(4) if generator.random() < 0.4}
        budget = [None, 0, 3, 8][generator.integers(4)]
        # Sums that are whole thousandths but for their rounding.
        one = [
            Judged(
                ScoreKey("s", share=share),
                PairedDifference((503 + o) / 1000 - 0.503, ((503 + low) / 1000 - 0.503, 1.0)),
                PairedDifference((607 + g) / 1000 - 0.607, None),
                {},
            )
            for share, (o, low, g) in zip(shares, rows, strict=True)
        ]
        found = choice(
            one,
            lambda better, worse, one=one, apart=told_apart: (
                (one.index(better), one.index(worse)) not in apart
            ),
            None if budget is None else budget / 1000,
        )
        kept.append(None if found is None else one.index(found))
        assert kept[-1] == stated(rows, told_apart, budget), (rows, told_apart, budget)
    assert {*kept} == {None, 0, 1, 2, 3}


def test_the_verdict_shows_the_trade_and_what_is_kept():
    kept = judged(base=(0.5, 0.6), trained=(0.8, 0.56), half=(0.7, 0.598))
    assert kept.summary == "trained: own +30.0, general -4.0; 50 %: +20.0, -0.2 ← kept"
    lines = show(kept.table(["s"]), "markdown").splitlines()
    assert [line.rstrip("| ").endswith("kept") for line in lines[-2:]] == [False, True]
    none = judged(base=(0.5, 0.6), trained=(0.4, 0.6))
    assert none.summary.startswith("trained: own -10.0, general +0.0; start ← kept: no candidate")


def test_without_general_tasks_the_own_gain_decides():
    models = {
        UNTRAINED: Scored({"mine": 0.5}, {}),
        TRAINED: Scored({"mine": 0.6}, {}),
        HALF: Scored({"mine": 0.62}, {}),
    }
    found = verdict(models, TRAINED, ["mine"], GuardConfig())
    assert (found.kept, found.summary) == (HALF, "trained: own +10.0; 50 %: +12.0 ← kept")
    assert "| none |" in show(found.table(["s"]), "markdown")
    run = override(
        get_recipe("biencoder"),
        ["data.datasets.pairs.source.path=x.jsonl", "evaluation.benchmarks=[]"],
    )
    assert run.evaluation.guard is not None


@pytest.mark.parametrize(
    ("take", "kept", "mixed"), [(0.5, HALF, (0.5,)), (1.0, TRAINED, ()), (0.25, QUARTER, (0.25,))]
)
def test_the_share_that_is_taken_is_kept_whatever_the_scores_say(take, kept, mixed):
    guard = GuardConfig(take=take)
    base = {"base": (0.5, 0.6), "trained": (0.4, 0.5), "half": (0.8, 0.6), "quarter": (0.4, 0.6)}
    assert judged(guard, **base).kept == kept
    assert guard.mixed == mixed


def test_no_share_can_be_taken_of_a_run_without_a_guard():
    run = override(get_recipe("biencoder"), ["evaluation.guard=null"])
    with pytest.raises(ConfigError, match=r"evaluation\.guard=null, so it kept the trained model"):
        Trained(SimpleNamespace(run=run)).take(0.5)
    with pytest.raises(ConfigError, match=r"evaluation\.guard\.take"):
        Trained(SimpleNamespace(run=get_recipe("biencoder"))).take(1.5)


def in_general(*gains):
    """Verdict on a trained model with such gains on general tasks `t0`, `t1`, …"""
    base = {"mine": 0.5, **{f"t{i}": 0.5 for i in range(len(gains))}}
    trained = {"mine": 0.8, **{f"t{i}": 0.5 + apart for i, apart in enumerate(gains)}}
    models = {UNTRAINED: Scored(base, {}), TRAINED: Scored(trained, {})}
    return verdict(models, TRAINED, ["mine"], GuardConfig())


def test_tasks_that_lose_within_a_rising_mean_are_named_and_the_model_is_kept():
    found = in_general(0.073, -0.0064, -0.0344, -0.0029)
    assert found.kept == TRAINED
    assert found.summary.endswith("general +0.7 ← kept (trained loses most on t2 -3.4, t1 -0.6)")
    told = "+0.007, no interval; but t2 -0.034, t1 -0.006"
    assert told in show(found.table(["s"]), "markdown")


def test_tasks_that_lose_little_are_not_named():
    found = in_general(0.0732, -0.003, 0.0)
    assert found.summary.endswith("general +2.3 ← kept")
    assert "but" not in show(found.table(["s"]), "markdown")


def test_of_many_tasks_that_lose_the_worst_are_named_and_the_others_counted():
    found = in_general(0.5, *(-i / 100 for i in range(1, 6)))
    assert found.summary.endswith("(trained loses most on t5 -5.0, t4 -4.0, t3 -3.0, 2 more)")
    assert "t3 -0.030, t2 -0.020, t1 -0.010 |" in show(found.table(["s"]), "markdown")
    none = in_general(-0.04, -0.05)
    assert none.kept == UNTRAINED
    assert "-0.045, no interval; of these t1 -0.050, t0 -0.040" in show(
        none.table(["s"]), "markdown"
    )


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
    # Two tasks, each with draws of its own: the interval is narrower by the root of two.
    both = gain(*scored, ["t", "u"]).interval
    width = found.interval[1] - found.interval[0]
    assert both[1] - both[0] == pytest.approx(width / 2**0.5, rel=0.15)
    nothing = gain(scored[1], scored[1], ["t"])
    assert nothing.interval == (0.0, 0.0)


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
    assert str(both).endswith(", items of 1 of 2 tasks)")
    assert "queries" not in str(alone)


def test_without_scores_of_queries_there_is_no_interval():
    model, base = Scored({"t": 0.6}, {}), Scored({"t": 0.5}, {"t": [[0.5]]})
    assert str(gain(model, base, ["t"])) == "+0.100, no interval"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["evaluation.before_training=false"], "before_training=true"),
        (
            ["data.datasets.pairs.held_out=null"],
            "no data set has a held-out part; set evaluation.guard=null",
        ),
        (["evaluation.guard.own_sets=[mine]"], "own_sets lacks"),
        (["evaluation.guard.shares=[1.0]"], "shares"),
        (["evaluation.guard.method=soup"], "'linear', 'slerp', 'ties' or 'dare'"),
        (["evaluation.guard.density=0.5"], "density=0.5 has no effect"),
        (["evaluation.guard.last_checkpoints=3"], "keeps 2 checkpoints; set placement"),
        (["evaluation.guard.last_checkpoints=1"], "greater than or equal to 2"),
        (["evaluation.guard.most_loss=-1"], "most_loss"),
        (["evaluation.guard.take=0"], "take"),
        (["evaluation.guard.take=1.5"], "take"),
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
    whole = override(run, [f"data.datasets.{dataset.name}.held_out=null", "evaluation.guard=null"])
    assert (whole.held_out_datasets, whole.evaluation.num_mixtures) == ([], 0)
    hub = with_named_benchmarks(override(run, ["evaluation.benchmarks=[NanoBEIR]"]))
    assert (hub.evaluation.benchmarks, hub.evaluation.own_sets) == (("NanoBEIR",), ())


def test_judged_sets_of_the_user_are_own_data_unless_named_otherwise():
    mine = [RetrievalSet(name="mine", path="judged"), RetrievalSet(name="other", path="elsewhere")]
    sets = (*Wikipedia().scores(), *mine)
    run = get_recipe("biencoder")
    run = changed(run, evaluation=changed(run.evaluation, benchmarks=(), own_sets=sets))

    def own(*changes):
        evaluation = override(run, list(changes)).evaluation
        return own_sets_of(evaluation.guard, evaluation)

    assert len(run.evaluation.own_sets) == 8, "the sample's six are general"
    assert own() == ("mine", "other")
    assert own("evaluation.guard.own_sets=[mine]") == ("mine",)
    assert own("evaluation.guard.own_sets=[]") == ()
    assert own("data.datasets.pairs.held_out=null") == ("mine", "other")


def test_a_guard_without_general_tasks_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    run = own_run(tmp_path, "evaluation.guard={}")
    assert with_fitting_tasks(run, []) is run
    assert caplog.messages == [
        "evaluation.guard has no general tasks, so it judges models by your own data alone"
    ]
    caplog.clear()
    with_fitting_tasks(override(run, ["evaluation.benchmarks=[NanoBEIR]"]), [])
    assert caplog.messages == []


def test_mixtures_that_were_never_kept_go_whichever_call_made_them(tmp_path):
    run = own_run(tmp_path, "evaluation.guard={take: 0.5}")
    folders = RunFolders(StoredFolder(str(tmp_path / "run"), tmp_path / "run"))
    stage = run.stages[0].name
    names = ["untrained", stage, *(f"{stage}-merged-{share}" for share in (0.25, 0.5, 0.75))]
    for name in [*names, "other-merged-0.5"]:
        (tmp_path / "run" / "models" / name / "more").mkdir(parents=True)
        (tmp_path / "run" / "models" / name / "more" / "weights").write_text("")
    (tmp_path / "run" / "models" / f"{stage}-merged-0.75" / "README.md").write_text("a card")
    remove_mixtures(run, folders, ScoreKey(stage, share=0.5))
    left = {path.name for path in (tmp_path / "run" / "models").iterdir()}
    assert left == {*names, "other-merged-0.5"} - {f"{stage}-merged-0.25"}
    remove_mixtures(override(run, ["evaluation.guard.take=1"]), folders, ScoreKey(stage))
    left = {path.name for path in (tmp_path / "run" / "models").iterdir()}
    assert left == {"untrained", stage, f"{stage}-merged-0.75", "other-merged-0.5"}
