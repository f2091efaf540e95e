"""From the arguments of the sweep job to a sweep; the papers' tables; what a dry run prints."""

import io
import subprocess
import sys

import pytest
import yaml
from tiny_job import ROOT, make_run

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.pipeline.sweep_check import check_all
from rayembed.pipeline.sweep_dry_run import print_sweep
from rayembed.pipeline.sweep_job import parse_arguments, run_sweep_job
from rayembed.recipes.tables import get_table, table_names
from rayembed.tuning.trials import known_trials, runs_of_data

RATE = "stages.finetune.optimizer.learning_rate"

PUBLISHED = (
    "nvembed-table2",
    "nvembed-table4",
    "nomic-table7",
    "nomic-table8",
    "causal2vec-table2",
    "causal2vec-table5",
    "causal2vec-table12",
    "cde-table1",
)


def sweep_of(*arguments):
    return parse_arguments(["--recipe", "biencoder-quickstart", *arguments]).sweep


def test_domains_are_searched_and_values_are_set():
    sweep = sweep_of("--set", f"{RATE}=grid(1e-5, 1e-4)", "--set", "seed=3", "--name", "x")
    assert sweep.name == "x"
    assert sweep.space == {RATE: "grid(1e-5, 1e-4)"}
    assert sweep.search.kind == "grid"
    assert {trial.run.seed for trial in known_trials(sweep)} == {3}


def test_a_space_with_no_end_is_searched_at_random_unless_told_otherwise(tmp_path):
    path = tmp_path / "space.yaml"
    path.write_text(f"{RATE}: loguniform(1e-5, 1e-3)\nseed: [1, 2]\n")
    sweep = sweep_of("--space", str(path), "--trials", "3")
    assert sweep.search.kind == "random"
    assert len(known_trials(sweep)) == 6
    drawn = sweep_of(
        "--set", f"{RATE}=loguniform(1e-5, 1e-3)", "--search", "optuna", "--trials", "7"
    )
    assert (drawn.search.kind, drawn.search.trials) == ("optuna", 7)
    with pytest.raises(ConfigError, match=r"search\.trials|trials"):
        sweep_of("--set", f"{RATE}=grid(1e-5)", "--search", "grid", "--trials", "7")


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
    sweep = parse_arguments(["--sweep", str(path)]).sweep
    assert list(sweep.runs) == ["plain", "cde"]
    assert len(known_trials(sweep)) == 4
    path.write_text("name: none\nspace: {seed: [1, 2]}\n")
    with pytest.raises(ConfigError, match="has no runs"):
        parse_arguments(["--sweep", str(path)])
    path.write_text("recipe: cde-quickstart\nsetting: [seed=1]\nspace: {seed: [1]}\n")
    with pytest.raises(ConfigError, match="no setting 'setting'"):
        parse_arguments(["--sweep", str(path)])


def test_what_a_dry_run_prints_is_read_back(tmp_path):
    sweep = sweep_of("--set", f"{RATE}=grid(1e-5, 1e-4)", "--set", "seed=grid(0, 1)")
    out, tables = io.StringIO(), io.StringIO()
    print_sweep(sweep, out=out, tables=tables)
    path = tmp_path / "sweep.yaml"
    path.write_text(out.getvalue())
    assert parse_arguments(["--sweep", str(path)]).sweep == sweep
    told = tables.getvalue()
    for trial in known_trials(sweep):
        assert trial.key in told
    assert "6 results of preparation for 2 different plans" in told
    assert "a trial takes" in told


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_table_is_there_at_both_sizes_with_the_papers_figures(name):
    large, small = get_table(name), get_table(f"{name}-quickstart")
    for table in (large, small):
        check_all(table.sweep)
        assert table.printed
    seeds = {trial.run.seed for trial in known_trials(small.sweep)}
    assert seeds == {0, 1, 2}
    rows = {row_name(trial) for trial in known_trials(large.sweep)}
    assert rows == set(large.printed), "each row has its figures, and each figure its row"
    assert all(run.placement.use_gpu for run in large.sweep.runs.values())
    assert not any(run.placement.use_gpu for run in small.sweep.runs.values())
    assert len(known_trials(small.sweep)) % 3 == 0


def row_name(trial):
    values = ", ".join(
        f"{'.'.join(path.split('.')[-2:])}={value}"
        for path, value in trial.values.items()
        if path != "seed"
    )
    return ", ".join(part for part in (trial.label, values) if part)


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_at_the_quickstarts_size_stand_beside_rows_of_the_paper(name):
    small = get_table(f"{name}-quickstart")
    rows = {row_name(trial) for trial in known_trials(small.sweep)}
    assert rows <= set(small.printed)
    fingerprints = [trial.run.fingerprint for trial in known_trials(small.sweep)]
    assert len(set(fingerprints)) == len(fingerprints), "no two rows are the same training"


def test_trials_of_a_table_share_data():
    sweep = get_table("nvembed-table2-quickstart").sweep
    runs = [trial.run for trial in known_trials(sweep)]
    assert len(runs) == 24
    assert len(runs_of_data(runs)) == 3  # one a seed


def test_figures_are_those_in_print():
    table = get_table("nvembed-table2").printed
    assert table["pooling.kind=latent_attention, model.mask=bidirectional"]["Average (56)"] == 69.32
    assert get_table("cde-table1").printed["both"] == {"NDCG@10": 63.1}
    assert get_table("causal2vec-table5").printed["Mistral-7B, model.num_contextual_tokens=8"] == {
        "MTEB-MINI (30)": 65.68
    }


def test_figures_of_other_models_or_data_stand_in_columns_of_their_own():
    mining = get_table("nomic-table8-quickstart").printed
    assert mining["all-MiniLM, margin none, 4 negatives"] == {"Average, Arctic Embed Large": 52.87}
    assert mining["all-MiniLM, margin 0.95, 4 negatives"] == {
        "Average, Arctic Embed Large": 55.2,
        "Average, Stella 1.5B": 57.22,
    }
    stages = get_table("nvembed-table4-quickstart").printed
    assert stages["two stages"]["Average (56)"] == 72.31
    assert stages["two stages"]["Average (56), public data"] == 71.83  # the paper's S1
    assert stages["S0: no positive-aware mining"] == {
        "Average (56), public data": 70.73,
        "Retrieval (15), public data": 59.22,
    }


def test_a_plain_value_is_set_in_all_trials_also_where_the_table_searches_it():
    plain = parse_arguments(
        ["--sweep", "nvembed-table2-quickstart", "--set", "seed=7", "--set", "model.mask=causal"]
    ).sweep
    assert set(plain.space) == {"model.pooling.kind"}
    assert plain.base.seed == 7
    assert [trial.run.model.mask for trial in known_trials(plain)] == ["causal"] * 4


def test_an_unknown_table_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'nvembed-table2'"):
        get_table("nvembed-tble2")
    assert set(PUBLISHED) <= set(table_names())


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
    assert run_sweep_job(arguments, about=None) == 2
    assert "mines 2" in capsys.readouterr().err


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
