"""What a sweep refuses to begin, how its trials' runs in MLflow end, and what its report says."""

from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from tiny_job import make_run

from rayembed.assets.storage import write_atomic
from rayembed.config.named_benchmarks import with_named_benchmarks
from rayembed.config.override import override
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError, WorkerError
from rayembed.recipes.catalogue import get_recipe
from rayembed.registry.tracking import Tracker
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed.training.checkpoints.checkpoint_list import CHECKPOINTS
from rayembed_extras.sweeps import sweep as job
from rayembed_extras.sweeps import trial as sweep_trial
from rayembed_extras.sweeps.dry_run import expected_time
from rayembed_extras.sweeps.optuna_space import importance
from rayembed_extras.sweeps.report import report_text
from rayembed_extras.sweeps.results import rows_of
from rayembed_extras.sweeps.settings import Sweep, deciding
from rayembed_extras.sweeps.trial_store import Report, TrialRecord
from rayembed_extras.sweeps.trials import check_sweep, known_trials
from rayembed_papers.tables.catalogue import table_sweeps

RATE = "stages.retrieval.optimizer.learning_rate"


def make_sweep(folder, **changes) -> Sweep:
    run = make_run(folder).model_dump(mode="json")
    values = {"name": "s", "runs": {"": run}, "space": {RATE: "grid(0.1, 0.01)"}, **changes}
    return parse(Sweep, values)


def record(name, **changes) -> TrialRecord:
    return TrialRecord(name, "", {RATE: "0.1"}, **changes)


def report(step, score=0.5) -> Report:
    return Report(step, score, {"t": score}, 1.0)


def test_another_sweep_of_the_name_is_refused_and_the_same_goes_on(tmp_path):
    sweep, place = make_sweep(tmp_path), tmp_path / "s"
    job._as_begun(sweep, str(place))
    place.mkdir()
    (place / job.SWEEP_FILE).write_text(sweep.to_yaml())
    job._as_begun(sweep, str(place))
    other = make_sweep(tmp_path, space={RATE: "grid(0.1, 0.02)"})
    with pytest.raises(ArtifactError, match=r"cannot resume in .*another --name"):
        job._as_begun(other, str(place))
    (place / job.SWEEP_FILE).write_text("name: [")
    with pytest.raises(ArtifactError, match="cannot be read"):
        job._as_begun(sweep, str(place))


def test_a_sweep_goes_on_with_its_data_alone(tmp_path):
    sweep, place = make_sweep(tmp_path), tmp_path / "s"
    first = {"a": ["retrieval-1"]}
    assert job._with_earlier(sweep, str(place), first) == first  # nothing is begun
    place.mkdir()
    (place / job.DATA_FILE).write_text('{"a": ["retrieval-1"], "b": ["retrieval-2"]}')
    both = {**first, "b": ["retrieval-2"]}
    assert job._with_earlier(sweep, str(place), first) == both  # fewer trials are asked for
    further = {**first, "c": ["retrieval-3"]}
    assert job._with_earlier(sweep, str(place), further) == {**both, **further}
    told = r"plan retrieval-2 would be retrieval-4 now.*another --name"
    with pytest.raises(ArtifactError, match=told):
        job._with_earlier(sweep, str(place), {**first, "b": ["retrieval-4"]})


def test_what_is_left_is_estimated(tmp_path):
    sweep = make_sweep(tmp_path)
    trials = known_trials(sweep)
    whole, half = expected_time(sweep, trials, 2), expected_time(sweep, trials[:1], 1)
    steps = trials[0].run.total_steps
    assert whole.startswith(f"2 trials with {2 * steps} steps in all")
    assert half.startswith(f"1 trial with {steps} steps in all")


def test_failed_trials_are_told_at_the_end_with_what_to_do():
    done = record("good", state="finished", final=report(4))
    job._refuse_failed({"good": done, "ended": record("ended", state="stopped")})
    with pytest.raises(WorkerError) as error:
        job._refuse_failed({"good": done, "bad": record("bad", state="failed", problem="made up")})
    assert str(error.value).startswith("1 of 2 trials failed")
    assert "Submit the sweep again" in str(error.value)
    assert "bad: made up" in str(error.value)


def test_runs_in_mlflow_end_as_their_trials_did(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    sweep = make_sweep(tmp_path)
    storage = sweep.base.placement.storage_path
    uri = resolve_tracking_uri(None, storage)
    ids = {}
    for name in ("stopped", "failed"):
        folder = Path(storage, "runs", name)
        folder.mkdir(parents=True)
        tracker = Tracker.open(uri, "unit", name, name, {}, {}, folder=folder, total_steps=10)
        ids[name] = tracker.run_id
        for stage in ("retrieval", "blend"):
            write_atomic(folder / stage / CHECKPOINTS / "step-0000004" / "position.json", b"{}")
    records = [
        record("stopped", state="stopped", reports=[report(4)]),
        record("failed", state="failed", reports=[report(2)], problem="made up"),
        record("never-begun", state="failed", problem="made up"),
        record("gone", state="stopped", reports=[report(4)]),
    ]
    job._close_ended(sweep, {one.key: one for one in records})
    runs = {name: mlflow.MlflowClient(uri).get_run(id_) for name, id_ in ids.items()}
    assert {name: run.info.status for name, run in runs.items()} == {
        "stopped": "KILLED",
        "failed": "FAILED",
    }
    tags = {name: run.data.tags.get(job.ENDED_TAG) for name, run in runs.items()}
    assert tags == {"stopped": "4", "failed": None}
    # The scheduler's word is final, an error's is not: that trial goes on from its checkpoints.
    left = {path.relative_to(storage).parts[1:4] for path in Path(storage).rglob("position.json")}
    assert left == {("failed", stage, CHECKPOINTS) for stage in ("retrieval", "blend")}
    assert "gone was stopped" in caplog.text
    assert "never-begun" not in caplog.text


def test_trials_score_only_what_is_compared_and_the_best_one_everything(tmp_path, monkeypatch):
    run = override(
        make_run(tmp_path),
        [
            "evaluation.before_training=true",
            "evaluation.guard={own_sets: [WikiSentenceRetrieval]}",
            "placement.registered_model=null",
        ],
    )
    sweep = make_sweep(tmp_path, runs={"": run.model_dump(mode="json")})
    first = known_trials(sweep)[0]
    evaluation = first.run.evaluation
    assert (evaluation.guard, evaluation.before_training, evaluation.baselines) == (None, False, ())
    parse(Run, first.run.model_dump(mode="json"))
    trained = []
    monkeypatch.setattr(sweep_trial, "train", trained.append)
    sweep_trial.register_best(sweep, TrialRecord(first.key, "", first.values, state="finished"))
    (best,) = trained
    assert (best.name, best.fingerprint) == (first.key, first.run.fingerprint)
    assert best.evaluation == run.evaluation
    assert best.evaluation.guard is not None
    assert best.placement.registered_model == "s"


def test_trials_on_own_pairs_are_compared_by_what_is_held_out(tmp_path):
    run = with_named_benchmarks(
        override(
            get_recipe("biencoder"),
            ["data.datasets.pairs.source.path=p.jsonl", "evaluation.tasks=[SciFact, NFCorpus]"],
        )
    )
    values = {"name": "s", "runs": {"": run}, "space": {"seed": "grid(0, 1)"}}
    sweep = parse(Sweep, values)
    check_sweep(sweep)
    evaluation = known_trials(sweep)[0].run.evaluation
    assert (evaluation.own_sets, evaluation.tasks, evaluation.guard) == ((), (), None)
    assert deciding(sweep, {"pairs-held-out": 0.5}) == 0.5
    weights = {"pairs-held-out": 3, "WikiSentenceRetrieval": 1, "SciFact": 1}
    weighted = parse(Sweep, {**values, "metric": {"weights": weights}})
    check_sweep(weighted)
    evaluation = known_trials(weighted)[0].run.evaluation
    assert [own.name for own in evaluation.own_sets] == ["WikiSentenceRetrieval"]
    assert evaluation.tasks == ("SciFact",)
    scores = {"pairs-held-out": 0.5, "WikiSentenceRetrieval": 1.0, "SciFact": 0.0}
    assert deciding(weighted, scores) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="did you mean 'pairs-held-out'"):
        check_sweep(parse(Sweep, {**values, "metric": {"weights": {"pair-held-out": 1}}}))
    # Which tasks a benchmark has is not known before it is loaded.
    hub = override(run, ["evaluation.benchmarks=[NanoBEIR]"])
    nano = {**values, "runs": {"": hub}, "metric": {"weights": {"NanoNQRetrieval": 1}}}
    assert known_trials(parse(Sweep, nano))[0].run.evaluation.benchmarks == ("NanoBEIR",)
    for weights in ({}, {"pairs-held-out": 1}):
        left = parse(Sweep, {**nano, "metric": {"weights": weights}})
        assert known_trials(left)[0].run.evaluation.benchmarks == ()


def test_a_papers_figures_stand_beside_what_was_measured_row_by_row():
    table = table_sweeps()["cde-table1-quickstart"]()
    sweep = table.sweep
    records = {}
    for place, trial in enumerate(known_trials(sweep)):
        score = 0.3 + 0.1 * list(sweep.runs).index(trial.label) + 0.01 * int(trial.values["seed"])
        final = Report(4, score, {}, 1.0)
        records[trial.key] = TrialRecord(
            *(trial.key, trial.label, trial.values),
            state="finished",
            final=replace(final, time=float(place)),
        )
    rows = rows_of(sweep, records)
    shares = importance(sweep, records)
    text = report_text(sweep, records, rows, shares, table.printed, table.source)
    assert "12 trials: 12 finished" in text
    beside = text.partition("## Beside the paper")[2].partition("## Trials")[0]
    for label, measured in zip(sweep.runs, (31, 41, 51, 61), strict=True):
        (line,) = (line for line in beside.splitlines() if line.startswith(f"| {label} |"))
        assert f"{measured:.2f} ± 1.00" in line
        assert f"{table.printed[label]['NDCG@10']}" in line
    assert "among those with as many finished trials as any (3)" in text
    assert "![importance](importance.png)" in text


def test_the_report_says_what_the_spread_over_seeds_covers():
    run = get_recipe("biencoder-quickstart")
    sweep = Sweep(name="s", runs={"": run}, space={"seed": "grid(0, 1)"})
    records = {
        seed: TrialRecord(seed, "", {"seed": seed}, state="finished", final=report(4))
        for seed in ("0", "1")
    }
    told = report_text(sweep, records, rows_of(sweep, records), {}, {}, "")
    assert "All seeds are scored on the same held-out texts" in told


def test_the_held_out_part_is_that_of_all_seeds_of_a_training_run(tmp_path):
    own = override(get_recipe("biencoder"), ["data.datasets.pairs.source.path=p.jsonl"])
    for run in (own, get_recipe("biencoder-quickstart")):
        exams = [
            (one.evaluation, [dataset.held_out for dataset in one.held_out_datasets])
            for one in (override(run, [f"seed={seed}"]) for seed in (0, 1))
        ]
        assert exams[0] == exams[1]
