"""Sweeps over stages whose length is given in epochs."""

import io
import json

import pytest
from own_pairs import write_pairs

from rayembed.errors import ConfigError
from rayembed.pipeline.checks.files import check_at_hand
from rayembed_extras.sweeps import trial as sweep_trial
from rayembed_extras.sweeps import trials as of_trials
from rayembed_extras.sweeps.decisions_on_ray import asha
from rayembed_extras.sweeps.dry_run import print_sweep
from rayembed_extras.sweeps.job import sweep_job
from rayembed_extras.sweeps.settings import Sweep, metric_source
from rayembed_extras.sweeps.trial_store import TrialRecord
from rayembed_extras.sweeps.trials import check_sweep, known_trials, make_trial

EPOCHS = "stages.finetune.epochs"


def sweep_of(folder, *assignments: str, arguments=()) -> Sweep:
    path = folder / "pairs.jsonl"
    if not path.exists():
        write_pairs(path, number=2000)
    words = ["--recipe", "biencoder", "--set", f"data.datasets.pairs.source.path={path}"]
    words += [word for one in assignments for word in ("--set", one)]
    return sweep_job().resolve([*words, *arguments])[0].sweep


def check_at_hand_of(sweep: Sweep) -> str:
    with pytest.raises(ConfigError) as error:
        check_at_hand(known_trials(sweep)[0].run)
    return str(error.value)


def steps_of(folder, epochs: float) -> int:
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").open()]
    different = len({(row["query"], row["positive"]) for row in rows})
    return round(epochs * round(0.9 * different) / 64)


def test_each_trial_trains_for_its_epochs(tmp_path):
    trials = known_trials(sweep_of(tmp_path, f"{EPOCHS}=grid(1, 3)"))
    assert [t.run.total_steps for t in trials] == [steps_of(tmp_path, 1), steps_of(tmp_path, 3)]
    assert len({trial.run.fingerprint for trial in trials}) == 2
    fixed = sweep_of(tmp_path, f"{EPOCHS}=3", "seed=grid(0, 1)")
    check_sweep(fixed)
    assert [t.run.total_steps for t in known_trials(fixed)] == [steps_of(tmp_path, 3)] * 2
    out, tables = io.StringIO(), io.StringIO()
    print_sweep(fixed, out=out, tables=tables)
    assert f"2 trials with {2 * steps_of(tmp_path, 3)} steps in all" in tables.getvalue()


def test_the_best_trial_is_handed_on_as_it_was_trained(tmp_path, monkeypatch):
    sweep = sweep_of(tmp_path, f"{EPOCHS}=grid(1, 3)")
    trial = known_trials(sweep)[1]
    trained = []
    monkeypatch.setattr(sweep_trial, "train", trained.append)
    sweep_trial.register_best(sweep, TrialRecord(trial.key, "", dict(trial.values)))
    assert (trained[0].name, trained[0].fingerprint) == (trial.key, trial.run.fingerprint)


def test_rows_are_counted_once_and_anew_for_the_next_sweep(tmp_path, monkeypatch):
    counted, count = [], of_trials.expected_records

    def count_and_tell(dataset, root):
        counted.append(dataset.name)
        return count(dataset, root)

    monkeypatch.setattr(of_trials, "expected_records", count_and_tell)
    sweep = sweep_of(tmp_path, f"{EPOCHS}=grid(1, 2)", "seed=grid(0, 1)")
    check_sweep(sweep)
    (before, *_), keys = known_trials(sweep), [trial.key for trial in known_trials(sweep)]
    assert counted == ["pairs"]
    write_pairs(tmp_path / "pairs.jsonl", number=4000)
    check_sweep(sweep)
    after = known_trials(sweep)[0]
    assert counted == ["pairs"] * 2
    assert after.run.total_steps > before.run.total_steps
    assert [trial.key for trial in known_trials(sweep)] == keys


def test_a_search_that_chooses_later_counts_them_too(tmp_path):
    rate = "stages.finetune.optimizer.learning_rate=loguniform(1e-5, 1e-4)"
    arguments = ("--search", "optuna", "--trials", "4")
    sweep = sweep_of(tmp_path, f"{EPOCHS}=3", rate, arguments=arguments)
    check_sweep(sweep)
    tables = io.StringIO()
    print_sweep(sweep, out=io.StringIO(), tables=tables)
    assert f"4 trials with {4 * steps_of(tmp_path, 3)} steps in all" in tables.getvalue()
    values = {"stages.finetune.optimizer.learning_rate": "2e-5"}
    assert make_trial(sweep, "", values).run.total_steps == steps_of(tmp_path, 3)


def test_the_first_rung_of_asha_lies_within_the_epochs(tmp_path):
    judged = [
        "evaluation.validation.data={kind: beir, path: judged/}",
        "stages.finetune.checkpoint_every_steps=10",
        f"{EPOCHS}=3",
    ]
    arguments = ("--scheduler", "asha")
    sweep = sweep_of(tmp_path, *judged, "seed=grid(0, 1)", arguments=arguments)
    total = known_trials(sweep)[0].run.total_steps
    bracket = asha(sweep, [], total)._brackets[0]
    assert bracket._rungs[-1][0] == 10
    with pytest.raises(ConfigError, match=r"lower evaluation\.validation\.every_steps"):
        check_sweep(sweep_of(tmp_path, *judged[::2], "seed=grid(0, 1)", arguments=arguments))


def test_asha_on_pairs_alone_takes_what_they_hold_out(tmp_path):
    arguments = ("--scheduler", "asha")
    with pytest.raises(ConfigError, match=r"validation\.data to \{kind: held_out\}"):
        check_sweep(sweep_of(tmp_path, "seed=grid(0, 1)", arguments=arguments))
    held_out = "evaluation.validation={data: {kind: held_out}, every_steps: 10}"
    sweep = sweep_of(tmp_path, held_out, "seed=grid(0, 1)", arguments=arguments)
    check_sweep(sweep)
    assert metric_source(sweep) == "validation"
    assert sweep.base.validation_names == ("pairs-held-out",)
    share = "data.datasets.pairs.held_out.share=grid(0.1, 0.2)"
    for settings in ((held_out, share), (share,)):
        with pytest.raises(
            ConfigError, match=r"compared by held-out rows, but they hold out different rows"
        ):
            check_sweep(sweep_of(tmp_path, *settings))
    weighted = (*arguments, "--with", "metric.weights.pairs=1")
    with pytest.raises(
        ConfigError, match=r"names the task 'pairs', which the validation .* not score"
    ):
        check_sweep(sweep_of(tmp_path, held_out, "seed=grid(0, 1)", arguments=weighted))


def test_grace_steps_are_judged_by_the_steps_of_the_rows(tmp_path):
    held_out = "evaluation.validation={data: {kind: held_out}, every_steps: 10}"
    asha = ("--scheduler", "asha", "--with", "scheduler.grace_steps=1200")
    long, short = (f"{EPOCHS}={number}" for number in (60, 3))
    check_sweep(sweep_of(tmp_path, held_out, long, "seed=grid(0, 1)", arguments=asha))
    with pytest.raises(ConfigError, match=f"1200 exceeds the {steps_of(tmp_path, 3)} steps"):
        check_sweep(sweep_of(tmp_path, held_out, short, "seed=grid(0, 1)", arguments=asha))
    away = "data.datasets.pairs.source.path=s3://bucket/pairs.jsonl"
    check_sweep(sweep_of(tmp_path, held_out, short, away, "seed=grid(0, 1)", arguments=asha))


def test_lengths_that_cannot_be_are_told(tmp_path):
    steps = "stages.finetune.steps=grid(10, 20)"
    for epochs in ("grid(1, 2)", "1"):
        for given in ((f"{EPOCHS}={epochs}", steps), (steps, f"{EPOCHS}={epochs}")):
            both = r"stages\.finetune\.steps=10 and stages\.finetune\.epochs=1 are both given"
            with pytest.raises(ConfigError, match=both):
                sweep_of(tmp_path, *given)
    with pytest.raises(ConfigError, match=r"steps=7 and stages\.finetune\.epochs=1 are both given"):
        sweep_of(tmp_path, f"{EPOCHS}=grid(1, 2)", "stages.finetune.steps=7")
    searched = known_trials(sweep_of(tmp_path, steps))
    assert [trial.run.stages[0].length for trial in searched] == ["10 steps", "20 steps"]
    warm = "stages.finetune.optimizer.warmup_steps=500"
    none = "stages.finetune.optimizer.warmup_share=null"
    with pytest.raises(ConfigError, match="training steps; lower warmup_steps"):
        check_sweep(sweep_of(tmp_path, warm, none, f"{EPOCHS}=grid(1, 2)"))
    away = "data.datasets.pairs.source.path=away.jsonl"
    told = check_at_hand_of(sweep_of(tmp_path, away, f"{EPOCHS}=grid(1, 2)"))
    assert "away.jsonl" in told


def test_a_command_replaces_the_length_of_a_file_which_gives_one_alone(tmp_path):
    file = tmp_path / "sweep.yaml"
    write_pairs(tmp_path / "pairs.jsonl", number=2000)
    written = {
        "recipe": "biencoder",
        "set": [f"data.datasets.pairs.source.path={tmp_path / 'pairs.jsonl'}"],
        "space": {"stages.finetune.steps": "grid(10, 20)", "seed": "grid(0, 1)"},
    }
    file.write_text(json.dumps(written))
    here = ["--sweep", str(file), "--set", f"{EPOCHS}=2"]
    lengths = {t.run.stages[0].length for t in known_trials(sweep_job().resolve(here)[0].sweep)}
    assert lengths == {"2 epochs"}
    lengths = [t.run.stages[0].length for t in known_trials(sweep_job().resolve(here[:2])[0].sweep)]
    assert sorted(set(lengths)) == ["10 steps", "20 steps"]
    file.write_text(json.dumps({**written, "set": [*written["set"], f"{EPOCHS}=2"]}))
    with pytest.raises(ConfigError, match=r"steps=10 and stages\.finetune\.epochs=2 are both"):
        sweep_job().resolve(here[:2])
