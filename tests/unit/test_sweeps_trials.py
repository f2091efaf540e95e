"""Which trials a sweep has, what it refuses before anything starts, which data are prepared."""

import threading

import pytest
from tiny_job import make_run

from rayembed.config.override import override
from rayembed.config.placement import Placement
from rayembed.config.settings import parse
from rayembed.errors import (
    ConfigError,
    DataError,
    DivergenceError,
    PlacementError,
    StorageError,
    StorageFullError,
)
from rayembed.recipes.catalogue import get_recipe
from rayembed_extras.sweeps.concurrency import trials_at_once, with_cores_of_their_own
from rayembed_extras.sweeps.on_ray import run_events
from rayembed_extras.sweeps.settings import Sweep, check_metric, deciding, metric_source
from rayembed_extras.sweeps.trial_store import Event, TrialRecord
from rayembed_extras.sweeps.trials import (
    check_sweep,
    data_folders,
    data_runs,
    known_trials,
    runs_of_data,
)

RATE = "stages.retrieval.optimizer.learning_rate"
STEPS = "stages.retrieval.steps"
SEVEN = {"batch": {"num_negatives": 2, "in_batch_negatives": False, "global_pairs": 4}}


def make_sweep(folder, space=None, *, changes=(), runs=None, **settings) -> Sweep:
    run = override(make_run(folder), changes)
    return parse(
        Sweep,
        {
            "name": "s",
            "runs": runs or {"": run.model_dump(mode="json")},
            "space": {RATE: "grid(0.1, 0.01)"} if space is None else space,
            **settings,
        },
    )


def test_trials_have_names_by_what_they_are(tmp_path):
    sweep = make_sweep(tmp_path, {RATE: "grid(0.1, 0.01)", "seed": "grid(0, 1)"})
    trials = known_trials(sweep)
    assert [trial.values for trial in trials] == [
        {RATE: rate, "seed": seed} for rate in ("0.1", "0.01") for seed in ("0", "1")
    ]
    assert len({trial.key for trial in trials}) == 4
    assert trials[1].run.stages[0].optimizer.learning_rate == 0.1
    assert trials[1].run.seed == 1
    assert trials[0].key.startswith("s-")
    again = known_trials(make_sweep(tmp_path, {RATE: "grid(0.01, 0.1)", "seed": "grid(0, 1)"}))
    assert {trial.key for trial in again} == {trial.key for trial in trials}
    other = known_trials(make_sweep(tmp_path, changes=["seed=7"]))
    assert not {trial.key for trial in other} & {trial.key for trial in trials}


def test_a_sweep_needs_ray(tmp_path):
    with pytest.raises(ConfigError, match=r"placement\.runtime=local runs in one process"):
        check_sweep(make_sweep(tmp_path, changes=["placement.runtime=local"]))


def test_a_trial_scores_no_baselines_and_is_the_same_training(tmp_path):
    sweep = make_sweep(tmp_path, {RATE: "grid(0.01)"})
    (trial,) = known_trials(sweep)
    assert trial.run.evaluation.baselines == ()
    assert not trial.run.evaluation.before_training
    assert trial.run.fingerprint == sweep.base.fingerprint


def test_more_draws_belong_to_the_same_sweep_and_other_settings_do_not(tmp_path):
    def drawn(number, **more):
        space = {RATE: "loguniform(1e-4, 1e-1)"}
        return make_sweep(tmp_path, space, search={"kind": "random", "trials": number}, **more)

    assert drawn(3).fingerprint == drawn(9).fingerprint
    keys = [trial.key for trial in known_trials(drawn(9))]
    assert [trial.key for trial in known_trials(drawn(3))] == keys[:3]
    assert drawn(3, scheduler={"kind": "asha"}).fingerprint != drawn(3).fingerprint


def test_runs_that_are_scored_otherwise_are_another_sweep(tmp_path):
    """Their training is the same, and their scores must not be compared with the former ones."""

    def scored(*changes):
        run = get_recipe("biencoder-quickstart")
        return Sweep(name="s", runs={"": override(run, changes)}, space={"seed": ("0", "1")})

    whole = scored()
    sentences = "WikiSentenceRetrieval"
    for change in ("documents=900", "queries=50", "max_length=64"):
        path = f"sample://wikipedia/{sentences}?{change}"
        other = scored(f"evaluation.own_sets.{sentences}.path={path}")
        assert other.base.fingerprint == whole.base.fingerprint
        assert other.fingerprint != whole.fingerprint, change
    for change in ("baselines=[bm25]", "before_training=false"):
        assert scored(f"evaluation.{change}").fingerprint == whole.fingerprint, change


def test_a_task_that_only_some_runs_score_may_be_weighed_where_they_do(tmp_path):
    def weighed(recipe):
        metric = {"of": "evaluation", "weights": {"WikiCrossLingualRetrieval": 1.0}}
        return Sweep(name="s", runs={"": get_recipe(recipe)}, space={"seed": ("0",)}, metric=metric)

    check_metric(weighed("nomic-quickstart"))
    with pytest.raises(ConfigError, match="WikiCrossLingualRetrieval"):
        check_metric(weighed("biencoder-quickstart"))


@pytest.mark.parametrize(
    ("space", "settings", "message"),
    [
        ({RATE: "grid(0.1, -1)"}, {}, "greater than 0"),
        ({"stages.retrieval.stepz": "grid(1)"}, {}, "did you mean 'steps'"),
        # Each end is allowed by itself: 8 pairs of 60 rows, warm-up below the steps.
        (
            {STEPS: "grid(4, 40)", "stages.retrieval.optimizer.warmup_steps": "grid(0, 9)"},
            {},
            "must be below the 4 training steps",
        ),
        (
            {RATE: "grid(0.1)"},
            {"metric": {"weights": {"WikiSentence": 1}}},
            "did you mean 'WikiSentenceRetrieval'",
        ),
        (
            {RATE: "grid(0.1)"},
            {"metric": {"of": "evaluation"}, "scheduler": {"kind": "asha"}},
            "known only after training",
        ),
        (
            {RATE: "grid(0.1)"},
            {"scheduler": {"kind": "asha", "grace_steps": 99}},
            "exceeds the 6 steps",
        ),
        ({RATE: "uniform(1, 2)"}, {}, "infinitely many values"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_before_anything_starts(
    tmp_path, space, settings, message
):
    with pytest.raises(ConfigError, match=message):
        check_sweep(make_sweep(tmp_path, space, **settings))


def test_optuna_is_tried_out_at_the_corners_of_its_space(tmp_path):
    space = {STEPS: "choice(4, 8)", "stages.retrieval.optimizer.warmup_steps": "integers(0, 6)"}
    sweep = make_sweep(tmp_path, space, search={"kind": "optuna"})
    assert known_trials(sweep) == []
    with pytest.raises(ConfigError, match=r"warmup_steps=6\n.*must be below the 4 training steps"):
        check_sweep(sweep)
    with pytest.raises(ConfigError, match="fixes all values"):
        make_sweep(tmp_path, {RATE: "grid(1, 2)"}, search={"kind": "optuna"})


def test_a_metric_is_never_the_training_loss(tmp_path):
    nothing = ["evaluation.validation=null", "evaluation.own_sets=[]"]
    with pytest.raises(ConfigError, match="no score to compare trials by"):
        check_sweep(make_sweep(tmp_path, changes=nothing))
    only_after = make_sweep(tmp_path, changes=nothing[:1])
    assert metric_source(only_after) == "evaluation"
    scores = {
        "WikiSentenceRetrieval": 0.2,
        "WikiDescriptionRetrieval": 0.6,
        "WikiTopicClustering": 1,
    }
    assert deciding(only_after, scores) == pytest.approx(0.4)
    weighed = make_sweep(
        tmp_path, metric={"weights": {"WikiSentenceRetrieval": 3, "WikiDescriptionRetrieval": 1}}
    )
    assert metric_source(weighed) == "validation"
    assert deciding(weighed, scores) == pytest.approx(0.3)
    assert deciding(make_sweep(tmp_path), {"score": 0.7, "x": 0.1}) == 0.7


def test_only_steps_that_a_setting_touches_are_other_ones(tmp_path):
    run = make_run(tmp_path)

    def kinds_that_differ(*changes):
        other = override(run, changes)
        return [
            (a.kind, a.name)
            for a, b in zip(data_folders(run), data_folders(other), strict=True)
            if a != b
        ]

    assert kinds_that_differ(f"{RATE}=0.5", "model.lora.rank=8") == []
    assert kinds_that_differ("stages.blend.batch.num_negatives=1") == [("plan", "blend")]
    assert kinds_that_differ("data.datasets.topics.num_samples=50") == [
        ("records", "topics"),
        ("plan", "blend"),
    ]
    # Classes draw their examples; pairs are the same rows for every seed.
    own = [("plan", "retrieval"), ("plan", "blend")]
    assert kinds_that_differ("seed=3") == [("records", "topics"), *own]
    negatives = "stages.retrieval.batch.num_negatives=2"
    mined = override(run, ["data.datasets.sentences.mining={teacher: t}", negatives])
    policy = "stages.retrieval.batch.policy"
    for setting, differ in (
        ("mining.sampling=best", []),
        ("mining.sampling=uniform", ["mined"]),
        ("mining.search.kind=ivf", ["mined"]),
        ("num_samples=50", ["records", "mined"]),
        ("sample_share=0.5", ["records", "mined"]),
        ("clusters={teacher: t, batch_pairs: 8}", ["clustered"]),
    ):
        taken = f"{policy}={'clustered' if 'clusters' in setting else 'blended'}"
        run = override(mined, [f"data.datasets.sentences.{setting}", taken])
        found = [kind for kind, name in kinds_that_differ("seed=3") if name == "sentences"]
        assert found == differ, setting


def test_mining_settings_leave_the_records_alone(tmp_path):
    mined = override(
        make_run(tmp_path),
        ["data.datasets.sentences.mining={teacher: t}", "stages.retrieval.batch.num_negatives=2"],
    )
    other = override(mined, ["data.datasets.sentences.mining.rule.max_relative_score=0.9"])
    differ = [
        a.kind for a, b in zip(data_folders(mined), data_folders(other), strict=True) if a != b
    ]
    assert differ == ["mined", "plan"]


def test_teachers_of_a_stage_and_what_its_loss_reads_make_another_plan(tmp_path):
    learnt = ["stages.retrieval.loss.kind=similarity_distillation"]
    learnt.append("stages.retrieval.teachers=[{teacher: a}]")
    space = {
        "stages.retrieval.teachers": "grid([{teacher: a}], [{teacher: b}])",
        RATE: "grid(1, 2)",
    }
    runs = [trial.run for trial in known_trials(make_sweep(tmp_path, space, changes=learnt))]
    assert [run.stages[0].teachers[0].teacher for run in runs_of_data(runs)] == ["a", "b"]
    mined = override(
        make_run(tmp_path),
        ["data.datasets.sentences.mining={teacher: t}", "stages.retrieval.batch.num_negatives=2"],
    )
    scored = override(mined, ["stages.retrieval.loss.kind=margin_mse"])
    pairs = zip(data_folders(mined), data_folders(scored), strict=True)
    assert [(a.kind, a.name) for a, b in pairs if a != b] == [("plan", "retrieval")]


def test_each_different_data_is_prepared_once(tmp_path):
    space = {RATE: "grid(0.1, 0.2, 0.3)", "stages.blend.batch.num_negatives": "grid(1, 2)"}
    runs = [trial.run for trial in known_trials(make_sweep(tmp_path, space))]
    assert len(runs) == 6
    assert [run.stages[1].batch.num_negatives for run in runs_of_data(runs)] == [1, 2]


def test_a_search_that_chooses_later_has_its_data_prepared_before(tmp_path):
    space = {RATE: "loguniform(0.1, 0.3)", "stages.blend.batch.num_negatives": "choice(1, 2)"}
    sweep = make_sweep(tmp_path, space, search={"kind": "optuna"})
    assert [run.stages[1].batch.num_negatives for run in data_runs(sweep, [])] == [1, 2]
    endless = {"stages.blend.batch.num_negatives": "integers(1, 2)"}
    with pytest.raises(ConfigError, match="prepared before the first trial"):
        data_runs(make_sweep(tmp_path, endless, search={"kind": "optuna"}), [])


@pytest.mark.parametrize(
    ("workers", "cpus", "validates", "free", "expected"),
    [
        (2, 1.0, False, [4], 2),
        (2, 1.0, False, [4, 4], 4),
        (2, 1.0, False, [1, 1, 1, 1], 2),
        (2, 0.5, True, [2], 1),
        (2, 0.3, False, [1.8], 3),
        (2, 1.0, True, [2], 1),  # validation waits until the workers are done
        (2, 3.0, False, [4, 4, 4], 1),
    ],
)
def test_trials_at_once_are_those_that_fit_with_all_they_need(
    workers, cpus, validates, free, expected
):
    placement = Placement(workers=workers, cpus_per_worker=cpus)
    nodes = [{"CPU": float(number)} for number in free]
    assert trials_at_once(placement, nodes, validates=validates) == expected


def test_an_elastic_trial_counts_at_its_largest_and_alone_at_its_smallest():
    elastic = Placement(workers=4, min_workers=2)
    for free, expected in (([8], 2), ([7], 1), ([2, 1], 1), ([4, 3, 1], 2)):
        nodes = [{"CPU": float(number)} for number in free]
        assert trials_at_once(elastic, nodes, validates=False) == expected, free
    with pytest.raises(PlacementError, match=r"min_workers=2 .* lower placement\.min_workers"):
        trials_at_once(elastic, [{"CPU": 1.0}], validates=True)


def test_a_trial_that_does_not_fit_is_refused():
    with pytest.raises(PlacementError, match=r"workers=2 .* have \[\{'CPU': 1.0\}\] free"):
        trials_at_once(Placement(workers=2), [{"CPU": 1.0}], validates=False)
    gpus = Placement(workers=1, use_gpu=True)
    assert trials_at_once(gpus, [{"CPU": 8.0, "GPU": 3.0}], validates=False) == 3


def test_trials_side_by_side_have_no_more_threads_than_cpus_of_their_own():
    placement = Placement(cpus_per_worker=1.0, threads_per_worker=2)
    run = get_recipe("biencoder-quickstart").model_copy(update={"placement": placement})
    one = Sweep(name="s", runs={"": run}, space={"seed": ("0", "1")})
    assert with_cores_of_their_own(one, at_once=1) == one
    several = with_cores_of_their_own(one, at_once=2)
    assert several.base.placement.threads_per_worker == 1
    assert several.fingerprint == one.fingerprint
    roomy = one.model_copy(
        update={
            "runs": {
                "": run.model_copy(
                    update={"placement": placement.model_copy(update={"cpus_per_worker": 4.0})}
                )
            }
        }
    )
    assert with_cores_of_their_own(roomy, at_once=2) == roomy


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (StorageError("the storage does not answer"), True),
        (StorageFullError("there is no room"), False),
        (DataError("no rows"), False),
        (DivergenceError("five steps in a row were dropped"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(tmp_path, monkeypatch, error, again):
    def execute(*_arguments):
        raise error

    monkeypatch.setattr("rayembed_extras.sweeps.trial.run_trial", execute)
    events = run_events(make_sweep(tmp_path), TrialRecord("a", "", {RATE: "0.1"}), {})
    if again:
        with pytest.raises(StorageError):  # Ray Tune starts the trial again
            next(events)
    else:
        (event,) = events
        assert event.kind == "problem"
        assert str(error) in event.problem


def test_a_process_that_is_told_to_end_does_not_wait_for_its_training(tmp_path, monkeypatch):
    """Ray ends it when Ray Tune has stopped the trial; CPUs and GPUs are others' then."""
    ended = threading.Event()

    def execute(_sweep, _trial, _tags, tell):
        tell(Event("score", 2, 0.5))
        ended.wait(60)

    given = TrialRecord("a", "", {RATE: "0.1"})
    monkeypatch.setattr("rayembed_extras.sweeps.trial.run_trial", execute)
    events = run_events(make_sweep(tmp_path), given, {})
    assert next(events).score == 0.5
    (trains,) = (one for one in threading.enumerate() if one.name == "trial")
    assert trains.daemon  # Python waits for others before it ends
    ended.set()
    assert not list(events)


@pytest.mark.parametrize("optuna", [True, False])
def test_values_that_the_settings_refuse_are_tried_once(tmp_path, optuna):
    search = {"kind": "optuna", "trials": 3} if optuna else {"kind": "grid"}
    sweep = make_sweep(tmp_path, {RATE: "choice(0.1, 0.01)"}, search=search)
    (event,) = run_events(sweep, TrialRecord("a", "", {RATE: "-1"}), {})
    assert event.kind == "problem"
    assert "learning_rate" in event.problem
