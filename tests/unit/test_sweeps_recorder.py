"""What the driver notes of trials as Ray Tune tells of them."""

import pytest
from tiny_job import make_run

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed_extras.sweeps.on_ray import given_to, message_in
from rayembed_extras.sweeps.recorder import TrialRecorder
from rayembed_extras.sweeps.settings import Sweep
from rayembed_extras.sweeps.trial_store import TrialRecord, TrialStore
from rayembed_extras.sweeps.trials import known_trials, make_trial, number_left

RATE = "stages.retrieval.optimizer.learning_rate"


def make_sweep(folder, space, **settings) -> Sweep:
    run = override(make_run(folder), ["evaluation.own_sets=[]"])
    values = {"name": "s", "runs": {"": run.model_dump(mode="json")}, "space": space, **settings}
    return parse(Sweep, values)


def blank(key) -> TrialRecord:
    return TrialRecord(key, "", {RATE: "1"})


def result(kind, step=4, score=0.5) -> dict:
    told = {"kind": kind, "global_step": step, "score": score, "scores": {}, "evaluation": {}}
    return told | {"problem": "wrong" if kind == "problem" else ""}


@pytest.fixture
def trial_store(tmp_path) -> TrialStore:
    return TrialStore(str(tmp_path))


def test_a_trial_has_ended_when_it_or_ray_tune_says_so(trial_store):
    recorder = TrialRecorder(trial_store, {})
    for number, kind in enumerate(("score", "final", "problem")):
        recorder.record(str(number), blank(f"trial-{number}"), result(kind))
    assert recorder.num_ended == 2
    recorder.record_end("0", "trial-0")  # by the scheduler
    recorder.record_end("1", "trial-1")  # has said so itself
    recorder.record_end("9", "trial-9")  # an interrupt: it has not told anything
    assert recorder.num_ended == 3
    assert {key: record.state for key, record in trial_store.read().items()} == {
        "trial-0": "stopped",
        "trial-1": "finished",
        "trial-2": "failed",
    }


def test_a_trial_is_known_from_its_start_on(trial_store):
    """A driver that is killed before the first score leaves it to the next submission."""
    recorder = TrialRecorder(trial_store, {})
    recorder.record_start(blank("a"))
    assert (trial_store.find("a").state, trial_store.find("a").score) == ("begun", None)
    recorder.record("0", blank("a"), result("score"))
    recorder.record_start(blank("a"))  # after an error
    assert trial_store.find("a").score == 0.5
    assert recorder.num_ended == 0


def test_what_is_proposed_again_stays_as_it_ended(trial_store):
    recorder = TrialRecorder(trial_store, {})
    recorder.record("0", blank("a"), result("score"))
    recorder.record_end("0", "a")
    before = trial_store.find("a")
    recorder.record("1", blank("a"), {"kind": "known", "global_step": 4, "score": 0.5})
    recorder.record_end("1", "a")
    assert trial_store.find("a") == before
    assert before.state == "stopped"
    assert before.last_step == 4
    assert recorder.num_ended == 2
    assert trial_store.find("b") is None


@pytest.mark.parametrize("optuna", [True, False])
def test_a_trial_that_fails_before_its_first_score_is_known_by_its_values(
    tmp_path, trial_store, optuna
):
    search = {"kind": "optuna", "trials": 3} if optuna else {"kind": "grid"}
    sweep = make_sweep(tmp_path, {RATE: "choice(0.1, 0.01)"}, search=search)
    trial = make_trial(sweep, "", {RATE: "0.01"})
    listed = {"key": trial.key, "label": "", "values": {RATE: "0.01"}}
    given = given_to(sweep, {RATE: "0.01"} if optuna else {"trial": listed})
    assert (given.key, given.values) == (trial.key, {RATE: "0.01"})
    recorder = TrialRecorder(trial_store, {})
    recorder.record_failure("0", given, "out of memory")
    record = trial_store.find(trial.key)
    assert (record.state, record.problem) == ("failed", "out of memory")
    assert record.values == {RATE: "0.01"}
    assert recorder.num_ended == 1
    # The next submission has it run again, under the same name.
    recorder.record("1", given, result("final"))
    assert trial_store.find(trial.key).state == "finished"


def test_no_more_trials_are_asked_of_optuna_than_differ(tmp_path):
    done = {str(n): TrialRecord(str(n), "", {}, state="finished") for n in range(3)}
    past = {**done, "begun": TrialRecord("begun", "", {})}
    for space, expected in (("choice(1, 2, 4, 8)", 1), ("loguniform(1, 8)", 17)):
        sweep = make_sweep(tmp_path, {RATE: space}, search={"kind": "optuna", "trials": 20})
        assert number_left(sweep, [], past) == expected
    listed = make_sweep(tmp_path, {RATE: "grid(1, 2)"})
    first, second = known_trials(listed)
    assert number_left(listed, [first, second], past) == 2
    ended = TrialRecord(first.key, "", {}, state="stopped")
    assert number_left(listed, [first, second], {first.key: ended}) == 1


def test_values_that_the_settings_refuse_fail_their_trial_alone(tmp_path):
    """The driver must name it without an error of its own; it is refused when it begins."""
    search = {"kind": "optuna", "trials": 3}
    sweep = make_sweep(tmp_path, {RATE: "choice(0.1, -1)"}, search=search)
    given = given_to(sweep, {RATE: "-1"})
    assert given.key.startswith("s-")
    assert given.values == {RATE: "-1"}
    assert given.key == given_to(sweep, {RATE: "-1"}).key != given_to(sweep, {RATE: "0.1"}).key
    with pytest.raises(ConfigError, match="learning_rate"):
        make_trial(sweep, given.label, given.values)


@pytest.mark.parametrize(
    ("traceback", "told"),
    [
        ("the process of the trial died", "the process of the trial died"),
        (
            """Traceback (most recent call last):
  File "a.py", line 1, in f
    raise ValueError("first")
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 7, in g
    raise WorkerError(
    ^^^^^^^^^^^^^^^^^^
rayembed.errors.WorkerError: worker 1 of 2 ended: DataError: 'a.csv' has 3 rows that are too long
  row 4: 9,000 characters

Raise max_characters, or cut them
""",
            "rayembed.errors.WorkerError: worker 1 of 2 ended: DataError: 'a.csv' has 3 rows that "
            "are too long\n  row 4: 9,000 characters\nRaise max_characters, or cut them",
        ),
        ('ray::f()\n  File "a.py", line 1, in f\n    g()\n    ^^^\nSystemExit: 3', "SystemExit: 3"),
        (
            'ray::f()\n  File "a.py", line 1, in f\nDataError: one\nDataError: two',
            "DataError: one\nDataError: two",
        ),
        ("The actor died.\n\tclass_name: Trial", "The actor died.\n\tclass_name: Trial"),
    ],
)
def test_all_lines_of_the_last_error_are_kept(traceback, told):
    assert message_in(traceback) == told
