"""From the arguments of the sweep job to a sweep; what a dry run prints."""

import io
import shlex
import subprocess
import sys

import pytest
import yaml
from tiny_job import ROOT, make_run

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.machine.hardware import Precision
from rayembed_extras.completion.completion import print_completion
from rayembed_extras.sweeps.dry_run import print_sweep
from rayembed_extras.sweeps.folder import sweep_settled
from rayembed_extras.sweeps.job import sweep_job
from rayembed_extras.sweeps.settings import metric_source
from rayembed_extras.sweeps.trials import check_sweep, known_trials

RATE = "stages.finetune.optimizer.learning_rate"


def sweep_of(*arguments):
    return sweep_job().resolve(["--recipe", "biencoder-quickstart", *arguments])[0].sweep


def test_domains_are_searched_and_values_are_set():
    sweep = sweep_of("--set", f"{RATE}=grid(1e-5, 1e-4)", "--set", "seed=3", "--name", "x")
    assert sweep.name == "x"
    assert sweep.space == {RATE: "grid(1e-5, 1e-4)"}
    assert sweep.search.kind == "grid"
    assert {trial.run.seed for trial in known_trials(sweep)} == {3}


def test_a_space_with_no_end_is_searched_at_random_unless_told_otherwise(tmp_path):
    path = tmp_path / "sweep.yaml"
    space = f"{{{RATE}: 'loguniform(1e-5, 1e-3)', seed: [1, 2]}}"
    path.write_text(f"recipe: biencoder-quickstart\nspace: {space}\n")
    sweep = sweep_job().resolve(["--sweep", str(path), "--trials", "3"])[0].sweep
    assert sweep.search.kind == "random"
    assert len(known_trials(sweep)) == 6
    drawn = sweep_of(
        "--set", f"{RATE}=loguniform(1e-5, 1e-3)", "--search", "optuna", "--trials", "7"
    )
    assert (drawn.search.kind, drawn.search.trials) == ("optuna", 7)
    for words in (("--search", "grid"), ()):
        with pytest.raises(
            ConfigError, match=r"--trials 7 limits .* add --search random or optuna"
        ):
            sweep_of("--set", f"{RATE}=choice(1e-5, 1e-4)", *words, "--trials", "7")


def test_settings_of_what_is_not_there_say_what_to_add():
    space = ("--set", f"{RATE}=grid(1e-5, 1e-4)")
    with pytest.raises(ConfigError, match=r"scheduler\.grace_steps: .*; add --scheduler asha"):
        sweep_of(*space, "--with", "scheduler.grace_steps=200")
    with pytest.raises(ConfigError, match=r"search\.seed: .*; add --search random or optuna"):
        sweep_of(*space, "--with", "search.seed=1")
    options = ("--with", "scheduler.kind=asha", "--with", "scheduler.grace_steps=20")
    assert sweep_of(*space, *options).scheduler.grace_steps == 20


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("grid[1, 2]", r"expected one of grid\(…\), .*, with parentheses"),
        ("grid(1, 2", "with parentheses"),
        ("logunifrm(1e-6, 1e-4)", "did you mean 'loguniform'"),
    ],
)
def test_a_misspelt_domain_says_how_it_is_written(value, message):
    with pytest.raises(ConfigError, match=message):
        sweep_of("--set", f"{RATE}={value}", "--set", "seed=grid(0, 1)")


def test_the_documented_asha_on_own_pairs_is_a_sweep():
    words = shlex.split(
        (ROOT / "docs/sweeps.md").read_text().partition("`--scheduler asha ")[2].partition("`")[0]
    )
    assert len(words) == 2
    judged = words[1].replace("{kind: held_out}", "{kind: beir, path: judged/}")
    assert judged != words[1]
    searched = ["--recipe", "biencoder", "--set", "seed=grid(0, 1)", "--scheduler", "asha", "--set"]
    for validation in (words[1], judged):
        sweep = sweep_job().resolve([*searched, validation])[0].sweep
        check_sweep(sweep)
        assert metric_source(sweep) == "validation"
        assert sweep.base.validation_interval(sweep.base.stages[0]) == 100


def test_a_text_that_is_like_a_domain_is_a_text():
    sweep = sweep_of("--set", "model.query_prefix=uniforms(a)", "--set", "seed=grid(0, 1)")
    assert sweep.base.model.query_prefix == "uniforms(a)"


def test_settings_of_the_sweep_itself_are_set_by_with():
    sweep = sweep_of(
        *("--set", f"{RATE}=grid(1e-5, 1e-4)", "--scheduler", "asha"),
        *("--with", "scheduler.grace_steps=20", "--with", "trials_at_once=2"),
        *("--with", "metric.weights.WikiSentenceRetrieval=2"),
    )
    assert sweep.scheduler.grace_steps == 20
    assert sweep.trials_at_once == 2
    assert sweep.metric.weights == {"WikiSentenceRetrieval": 2.0}
    with pytest.raises(ConfigError, match="did you mean 'grace_steps'"):
        sweep_of("--set", f"{RATE}=grid(1)", "--scheduler", "asha", "--with", "scheduler.grace=1")


def test_a_file_names_recipes_with_settings(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        """
name: both
runs:
  plain: {recipe: cde-quickstart-filtered}
  cde: {recipe: cde-quickstart, set: [seed=4]}
space: {seed: [1, 2]}
metric: {of: evaluation}
"""
    )
    sweep = sweep_job().resolve(["--sweep", str(path)])[0].sweep
    assert list(sweep.runs) == ["plain", "cde"]
    assert len(known_trials(sweep)) == 4
    path.write_text("name: none\nspace: {seed: [1, 2]}\n")
    with pytest.raises(ConfigError, match="has no runs"):
        sweep_job().resolve(["--sweep", str(path)])
    path.write_text("recipe: cde-quickstart\nsetting: [seed=1]\nspace: {seed: [1]}\n")
    with pytest.raises(ConfigError, match="no setting 'setting'"):
        sweep_job().resolve(["--sweep", str(path)])


def test_what_a_dry_run_prints_is_read_back(tmp_path):
    sweep = sweep_of("--set", f"{RATE}=grid(1e-5, 1e-4)", "--set", "seed=grid(0, 1)")
    out, tables = io.StringIO(), io.StringIO()
    print_sweep(sweep, out=out, tables=tables)
    path = tmp_path / "sweep.yaml"
    path.write_text(out.getvalue())
    assert sweep_job().resolve(["--sweep", str(path)])[0].sweep == sweep
    told = tables.getvalue()
    # as the sweep names them once it has asked its nodes for the number type
    run = sweep_settled(sweep, lambda _: Precision("float32", "this CPU emulates bfloat16"))
    assert len(known_trials(run)) == 4
    for trial in known_trials(run):
        assert trial.key in told
    assert "4 results of preparation for 2 different plans" in told
    assert "a trial takes" in told
    assert "4 trials with" in told


def test_negatives_that_no_mining_gives_are_told_before_anything_starts(tmp_path, capsys):
    run = override(
        make_run(tmp_path),
        [
            "data.datasets.sentences.mining={teacher: t, num_negatives: 2}",
            "stages.retrieval.batch.num_negatives=1",
        ],
    )
    path = tmp_path / "run.yaml"
    path.write_text(run.to_yaml())
    arguments = ["--recipe", str(path), "--set", "stages.retrieval.batch.num_negatives=grid(1, 5)"]
    assert sweep_job()(arguments) == 2
    assert "mines only 2" in capsys.readouterr().err


def test_the_job_prints_errors_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "jobs/sweep_recipe.py", "--set", "seeed=grid(1, 2)", "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean 'seed'" in done.stderr
    assert "Traceback" not in done.stderr
    assert yaml.safe_load(done.stdout) is None


def test_a_shell_completes_the_schedulers(capsys):
    assert print_completion(["bash"]) == 0
    assert "asha" in capsys.readouterr().out


def test_leaving_one_out_compares_each_data_set_by_tasks_of_all_runs():
    sweep = sweep_of("--leave-one-out", "--set", "seed=grid(0, 1)")
    whole, *without = sweep.runs.values()
    names = [dataset.name for dataset in whole.used_datasets]
    assert list(sweep.runs) == ["all data sets", *(f"without {name}" for name in names)]
    for name, run in zip(names, without, strict=True):
        assert [d.name for d in run.used_datasets] == [other for other in names if other != name]
    tasks = {own.name for own in whole.evaluation.own_sets}
    assert tasks
    assert sweep.metric.weights == dict.fromkeys(tasks, 1.0)
    assert metric_source(sweep) == "evaluation"
    assert len(known_trials(sweep)) == 2 * (1 + len(names))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "evaluation.own_sets=[]"], "needs tasks that all runs are scored on"),
        (["--recipe", "biencoder"], "has the single data set 'pairs', and nothing is left"),
    ],
)
def test_leaving_one_out_is_refused_where_nothing_can_be_compared(arguments, message):
    pairs = ("--set", "data.datasets.pairs.source.path=x") if "--recipe" in arguments else ()
    with pytest.raises(ConfigError, match=message):
        sweep_of("--leave-one-out", *arguments, *pairs)
