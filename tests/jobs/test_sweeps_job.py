"""A sweep from its command line to the registry: ended early, killed, submitted again."""

from pathlib import Path

import mlflow
import numpy as np
import pytest
from tiny_job import run_here, write_inputs
from tiny_sweep import (
    RATE,
    alone,
    command,
    kill_in_the_middle,
    submit,
    submit_with_a_dying_trial,
    sweep_over,
)

from rayembed.pipeline.run.validation import VALIDATION_FILE, read_validation_log
from rayembed.registry.metrics_log import MetricsLog
from rayembed_extras.sweeps.trial_store import TrialRecord, TrialStore

pytestmark = [pytest.mark.job, pytest.mark.ray]


def swept(folder: Path, rates: list[str], *arguments: str, done: int, seconds: float):
    """Records before and after a driver was killed, and what the second one printed."""
    write_inputs(folder)
    given = command(folder, rates, *arguments)
    before = kill_in_the_middle(given, folder, done=done, seconds=seconds)
    again = submit(given, seconds=seconds)
    assert again.returncode == 0, again.stderr[-4000:]
    (folder / "again.log").write_text(again.stdout + again.stderr)
    return before, TrialStore(str(folder / "outputs" / "sweeps" / "rates")).read(), again


def check_not_repeated(before: dict[str, TrialRecord], after: dict[str, TrialRecord]) -> None:
    """What had ended is as it was, with the times of its scores; what had not was not."""
    ended = {key for key, record in before.items() if record.is_done}
    assert ended
    assert len(ended) < len(after), "it was killed too late"
    for key in ended:
        assert after[key] == before[key], key


def check_states(records: dict[str, TrialRecord], *, rung: int, last: int) -> None:
    """Ended at the only rung are those, and only those, that ASHA's rule ends by their own scores.

    That is where a score is below the median of those that came before: what a tiny model's
    scores are, and with them how many are ended, differs by machine.
    """
    reports = {
        key: next(report for report in record.reports if report.global_step == rung)
        for key, record in records.items()
    }
    seen: list[float] = []
    for key in sorted(records, key=lambda key: reports[key].time):
        score = reports[key].score
        is_worse = bool(seen) and score < np.percentile(seen, 50)
        expected = ("stopped", rung) if is_worse else ("finished", last)
        assert (records[key].state, records[key].last_step) == expected, (key, score, seen)
        seen.append(score)


def check_tracked(folder: Path, records: dict[str, TrialRecord]) -> None:
    """One parent run with each trial once below it; the best one is the candidate."""
    client = mlflow.MlflowClient(f"sqlite:///{folder}/outputs/mlflow.db")
    experiments = [e.experiment_id for e in client.search_experiments()]
    runs = {run.info.run_name: run for run in client.search_runs(experiments)}
    assert runs.keys() == {"rates", *records}
    assert len(client.search_runs(experiments)) == len(runs)
    assert runs["rates"].info.status == "FINISHED"
    for key, record in records.items():
        tags = runs[key].data.tags
        assert tags["mlflow.parentRunId"] == runs["rates"].info.run_id
        assert tags[f"rayembed.trial.{RATE}"] == record.values[RATE]
        expected = {"finished": "FINISHED", "stopped": "KILLED"}[record.state]
        assert runs[key].info.status == expected, key
    best = max(
        (r for r in records.values() if r.final is not None), key=lambda r: r.final.score
    ).key
    version = client.get_model_version_by_alias("rates", "candidate")
    assert version.run_id == runs[best].info.run_id
    assert runs["rates"].data.tags["rayembed.sweep.best"] == best
    names = {file.path for file in client.list_artifacts(runs["rates"].info.run_id)}
    assert {"report.md", "trials.csv", "parallel_coordinates.png"} <= names


def check_best_alone(folder: Path, records: dict[str, TrialRecord], *arguments: str) -> None:
    """The best trial's settings, trained without a sweep, give its scores to the last digit."""
    best = max((r for r in records.values() if r.final is not None), key=lambda r: r.final.score)
    done = submit(alone(folder, best.values[RATE], *arguments), seconds=700)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = folder / "outputs" / "runs"
    scored, by_itself = (
        read_validation_log(runs / name / VALIDATION_FILE) for name in (best.key, "alone")
    )
    assert scored == by_itself
    assert best.final.score in {line["score"] for line in by_itself}
    others = [
        read_validation_log(runs / key / VALIDATION_FILE) for key in records if key != best.key
    ]
    assert by_itself not in others


def check_no_traceback(printed: str) -> None:
    """The driver printed none. Lines of other processes have their names in front: Ray's own
    handler of SIGTERM leaves one in an actor that is ended while it drops a handle.
    """
    assert not [line for line in printed.splitlines() if line.startswith("Traceback")]


@pytest.mark.timeout(1500)
def test_a_killed_sweep_goes_on_and_repeats_no_trial(tmp_path):
    before, after, again = swept(tmp_path, ["0.01", "1e-7"], done=1, seconds=700)
    check_not_repeated(before, after)
    assert len(after) == 2
    check_states(after, rung=4, last=8)
    for record in after.values():
        steps = MetricsLog(tmp_path / "outputs" / "runs" / record.key / "metrics.jsonl").records()
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    mined = list((tmp_path / "outputs" / "data" / "records").iterdir())
    assert len(mined) == 1, "the data were made once"
    check_tracked(tmp_path, after)
    assert "rates version 1 (models:/rates@candidate)" in again.stdout
    check_no_traceback(again.stderr)
    check_best_alone(tmp_path, after)


@pytest.mark.slow("the sweep above, its trials side by side")
@pytest.mark.timeout(1500)
def test_side_by_side_trials_score_as_alone(tmp_path):
    write_inputs(tmp_path)
    validation = ("--set", "placement.validation_cpus=0.5")
    asha = ("--scheduler", "asha", "--with", "scheduler.reduction_factor=2")
    given = (*validation, "--set", "placement.threads_per_worker=2", *asha)
    rates = "grid(0.01, 0.003, 1e-7)"
    done = submit(sweep_over(tmp_path, rates, *given, "--with", "trials_at_once=2"), seconds=900)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "starting 3 of 3 trials, 2 at a time" in done.stderr
    told = "results from a single trial, set --set placement.threads_per_worker=1"
    assert told in done.stderr
    records = TrialStore(str(tmp_path / "outputs" / "sweeps" / "rates")).read()
    check_states(records, rung=4, last=8)
    check_best_alone(tmp_path, records, *validation, "--set", "placement.threads_per_worker=1")


@pytest.mark.slow("a soak: the smaller sweep above is killed and goes on in the same way")
@pytest.mark.timeout(2400)
def test_six_trials_of_two_workers_with_two_ended_early(tmp_path):
    """Also killed in the middle, and later one trial's process alone, which is tried again."""
    rates = ["0.01", "0.003", "1e-4", "1e-5", "1e-6", "1e-7"]
    write_inputs(tmp_path)
    given = command(tmp_path, rates, "--set", "placement.workers=2")
    before = kill_in_the_middle(given, tmp_path, done=2, seconds=1000)
    begun = {path.name for path in (tmp_path / "outputs" / "runs").glob("rates-*")}
    code, log, killed = submit_with_a_dying_trial(given, tmp_path, begun, seconds=1200)
    assert code == 0, log[-4000:]
    after = TrialStore(str(tmp_path / "outputs" / "sweeps" / "rates")).read()
    check_not_repeated(before, after)
    assert len(after) == 6
    assert sum(record.state == "stopped" for record in after.values()) >= 2
    assert sum(record.state == "finished" for record in after.values()) >= 1
    assert killed
    assert after[killed].is_done
    assert f"run {killed} resumes" in log
    check_tracked(tmp_path, after)


@pytest.mark.slow("the smaller sweep with other proposals; what is proposed has unit tests")
@pytest.mark.timeout(2400)
def test_optuna_proposes_trials_and_goes_on_knowing_what_was_scored(tmp_path):
    write_inputs(tmp_path)
    rates = "loguniform(1e-8, 1e-1)"
    words = ("--search", "optuna", "--with", "trials_at_once=1", "--trials")
    before = kill_in_the_middle(
        sweep_over(tmp_path, rates, *words, "3"), tmp_path, done=1, seconds=700
    )
    again = submit(sweep_over(tmp_path, rates, *words, "3"), seconds=900)
    assert again.returncode == 0, again.stderr[-4000:]
    after = TrialStore(str(tmp_path / "outputs" / "sweeps" / "rates")).read()
    check_not_repeated(before, after)
    assert len(after) == 3
    assert all(1e-8 <= float(record.values[RATE]) <= 1e-1 for record in after.values())
    assert len({record.values[RATE] for record in after.values()}) == 3
    check_tracked(tmp_path, after)


def test_workers_that_the_cluster_never_has_are_refused_before_any_starts(tmp_path, cluster):
    write_inputs(tmp_path)
    given = command(
        tmp_path,
        ["0.01", "0.1"],
        "--set",
        "placement.workers=4",
        "--set",
        "placement.cpus_per_worker=64",
    )
    done = run_here("sweep_recipe", *given[given.index("--recipe") :])
    assert done.returncode == 1
    assert "placement.workers=4" in done.stderr
    check_no_traceback(done.stderr)
    assert not (tmp_path / "outputs" / "runs").exists()
    assert not (tmp_path / "outputs" / "sweeps" / "rates" / "sweep.yaml").exists()
