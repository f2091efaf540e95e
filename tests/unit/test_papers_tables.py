"""The papers' tables as sweeps: rows, figures in print, and what the job's arguments change."""

import pytest

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.evaluation.prompts_table import literal_prompts
from rayembed.evaluation.validation import validation_prompts, validation_tasks
from rayembed.jobs.command_line import main
from rayembed_extras.completion.completion import print_completion
from rayembed_extras.sweeps.job import named_sweep, sweep_job
from rayembed_extras.sweeps.trials import check_sweep, known_trials, runs_of_data
from rayembed_papers.tables.catalogue import table_sweeps

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


def get_table(name):
    return named_sweep(name, table_sweeps())


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_table_is_there_at_both_sizes_with_the_papers_figures(name):
    large, small = get_table(name), get_table(f"{name}-quickstart")
    for table in (large, small):
        check_sweep(table.sweep)
        assert table.printed
    seeds = {trial.run.seed for trial in known_trials(small.sweep)}
    assert seeds == {0, 1, 2}
    rows = {row_name(trial) for trial in known_trials(large.sweep)}
    assert rows == set(large.printed), "each row has its figures, and each figure its row"
    assert all(run.placement.use_gpu for run in large.sweep.runs.values())
    assert {run.placement.use_gpu for run in small.sweep.runs.values()} == {"auto"}
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
    told, _ = sweep_job(table_sweeps()).resolve(
        ["--sweep", "nvembed-table2-quickstart", "--set", "seed=7", "--set", "model.mask=causal"]
    )
    plain = told.sweep
    assert set(plain.space) == {"model.pooling.kind"}
    assert plain.base.seed == 7
    assert [trial.run.model.mask for trial in known_trials(plain)] == ["causal"] * 4


def test_an_unknown_table_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'nvembed-table2'"):
        get_table("nvembed-tble2")
    assert set(PUBLISHED) <= set(table_sweeps())


@pytest.mark.parametrize("name", ["nvembed-table2", "causal2vec-table5", "nomic-table8"])
def test_a_nano_task_has_the_instruction_of_its_models_paper(name):
    run = next(iter(get_table(name).sweep.runs.values()))
    told = literal_prompts(validation_prompts(run), validation_tasks(run))
    assert set(told) == set(run.evaluation.validation.data.tasks)
    found = {name: query for name, (query, _) in told.items()}
    if run.model.kind == "biencoder":
        assert set(found.values()) == {run.model.query_prefix}
        return
    assert {document for _, document in told.values()} == {""}
    assert all(found.values())
    assert "Given a claim about climate change" in found["NanoClimateFeverRetrieval"]
    assert "semantically equivalent" in found["NanoQuoraRetrieval"]
    own = override(run, ["evaluation.validation.data.instructions={NanoNQRetrieval: ''}"])
    other = literal_prompts(validation_prompts(own), validation_tasks(own))
    assert other == {**told, "NanoNQRetrieval": ["", ""]}


def test_jobs_of_the_papers_are_listed_last_and_completed(capsys):
    main(["--help"])
    shown = capsys.readouterr().out
    heads = [line for line in shown.splitlines() if line.endswith(":")]
    assert heads[-1] == "papers:"
    assert print_completion(["zsh"]) == 0
    assert "papers-noise" in capsys.readouterr().out
