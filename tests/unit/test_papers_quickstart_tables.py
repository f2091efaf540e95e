"""Tables of quickstarts with several seeds: made of finished runs of made-up scores."""

import types
from pathlib import Path

import pytest

import cde_quickstart_table as cde
import nomic_quickstart_table as nomic
import seeded_runs
from rayembed.evaluation.tables import ScoreTable, score_csv
from rayembed_papers.spread import SpreadTable

TASKS = ("WikiSentenceRetrieval", "WikiDescriptionRetrieval", "WikiTopicClustering")


def leave(comparison, given, label, seed, rows):
    """A run's folder with what a training job leaves of its scores, and the untrained ones."""
    run, _ = comparison.run_of(label, seed, given)
    folder = Path(run.placement.storage_path) / "runs" / run.name
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(run.to_yaml())
    if run.evaluation.before_training:
        rows = {"untrained": dict.fromkeys(next(iter(rows.values())), 0.5), **rows}
    (folder / "scores.csv").write_text(score_csv(ScoreTable(rows)))


def leave_cde(given, label, seed, scores):
    rows = {"stage 1: retrieval": dict(zip(TASKS, scores, strict=True))}
    if label == cde.CONTEXT:
        rows["the same, without context"] = dict.fromkeys(TASKS, 0.55)
    leave(cde.COMPARISON, given, label, seed, rows)


def leave_all(given, seeds=(0, 1, 2)):
    """Filtering helps with every seed, context with some, clusters with none less the filter."""
    for seed in seeds:
        base = 0.6 + 0.1 * seed
        leave_cde(given, cde.RANDOM, seed, (base, base, 0.5))
        leave_cde(given, cde.CLUSTERED, seed, (base - 0.02, base - 0.02, 0.5))
        leave_cde(given, cde.FILTERED, seed, (base + 0.04, base + 0.02, 0.5))
        gain = 0.02 if seed else -0.02
        leave_cde(given, cde.CONTEXT, seed, (base + 0.03 + gain, base + 0.03 + gain, 0.4))


def main(given, *arguments):
    words = [word for one in given for word in ("--set", one)]
    return seeded_runs.main(cde.COMPARISON, cde.__doc__, [*arguments, *words])


def test_the_table_is_of_means_with_gains_seed_by_seed(tmp_path, capsys):
    given = [f"placement.storage_path={tmp_path}"]
    leave_all(given)
    assert main(given, "--only-table") == 0
    text = (tmp_path / "cde-quickstart-table" / "table.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "|" in line}
    assert "| random batches | 0.700 ± 0.100 | 0.700 ± 0.100 | 0.500 ± 0.000 |" in text
    assert rows["clustered, filtered"].startswith("| clustered, filtered | +0.040 ± 0.000 |")
    assert "untrained" in rows
    printed = capsys.readouterr().out
    assert "'clustered, filtered' less 'random batches': +0.030 ± 0.000, as in the paper" in printed
    context = "'clustered, filtered, context' less 'clustered, filtered': +0.007 ± 0.023, undecided"
    assert context in printed
    assert context in text
    csv_lines = (tmp_path / "cde-quickstart-table" / "table.csv").read_text().splitlines()
    assert len(csv_lines) == 1 + 7 * 3 * 3


def test_directions_against_the_paper_are_said():
    row = dict.fromkeys(TASKS, (0.5, 0.6))
    worse = dict.fromkeys(TASKS, (0.4, 0.5))
    rows = dict.fromkeys(cde.COMPARISON.rows, row) | {cde.CONTEXT: worse}
    said = cde.verdicts(SpreadTable(rows))
    assert "undecided" in said[0]
    assert "-0.100 ± 0.000, against the paper with every seed" in said[2]


def test_seeds_without_all_runs_are_left_out_and_named(tmp_path, capsys):
    given = [f"placement.storage_path={tmp_path}"]
    assert main(given, "--only-table") == 1
    assert "no seed" in capsys.readouterr().err
    leave_all(given, seeds=(0, 2))
    leave_cde(given, cde.RANDOM, 1, (0.1, 0.1, 0.1))
    assert main(given, "--only-table") == 1
    told = capsys.readouterr()
    assert "Not complete: seeds 1" in told.err
    assert "seeds 0, 2" in told.out
    assert "0.700 ± 0.141" in told.out


def test_only_missing_runs_are_run_and_scores_of_other_tasks_are_missing(tmp_path, monkeypatch):
    given = [f"placement.storage_path={tmp_path}"]
    leave_all(given)
    asked, returned = [], [0]

    def run(command, *, check):
        asked.append(command)
        return types.SimpleNamespace(returncode=returned[0])

    monkeypatch.setattr(seeded_runs.subprocess, "run", run)
    assert seeded_runs.train_missing(cde.COMPARISON, [0, 1, 2], given)
    assert asked == []
    sentences = "WikiSentenceRetrieval"
    path = f"evaluation.own_sets.{sentences}.path=sample://wikipedia/{sentences}?queries=100"
    smaller = [*given, path]
    assert seeded_runs.train_missing(cde.COMPARISON, [1], smaller)
    assert len(asked) == 4, "scored on other tasks"
    asked.clear()
    assert seeded_runs.train_missing(cde.COMPARISON, [3], given)
    names = [next(part for part in command if part.startswith("name=")) for command in asked]
    assert names == [f"name={recipe}-seed3" for recipe in cde.COMPARISON.recipes.values()]
    assert all("seed=3" in command for command in asked)
    returned[0] = 1
    assert not seeded_runs.train_missing(cde.COMPARISON, [3], given)


def test_dense_layers_and_experts_stand_at_both_widths(tmp_path, capsys):
    given = [f"placement.storage_path={tmp_path}"]
    tasks = (TASKS[0], nomic.CROSS_LINGUAL)
    for seed in (0, 1):
        for label, gain in ((nomic.DENSE, 0.0), (nomic.EXPERTS, 0.04)):
            whole = (0.6 + gain, 0.7 + gain * seed)
            scores = {
                "stage 1: pretrain": dict.fromkeys(tasks, 0.1),
                "stage 2: finetune": dict(zip(tasks, whole, strict=True)),
                "the same, 256 dimensions": dict(
                    zip(tasks, (s - 0.02 for s in whole), strict=True)
                ),
            }
            if label == nomic.DENSE:
                scores["all-minilm-l6-v2"] = dict.fromkeys(tasks, 0.65)
            leave(nomic.COMPARISON, given, label, seed, scores)
    words = ["--only-table", "--seeds", "0,1", "--set", *given]
    assert seeded_runs.main(nomic.COMPARISON, nomic.__doc__, words) == 0
    text = (tmp_path / "nomic-quickstart-table" / "table.md").read_text()
    assert "| untrained | 0.500 ± 0.000 | 0.500 ± 0.000 |" in text
    assert "| all-MiniLM as it is | 0.650 ± 0.000 | 0.650 ± 0.000 |" in text
    assert "| 8 experts, 2 for a token | 0.640 ± 0.000 | 0.720 ± 0.028 |" in text
    assert "| 8 experts, 2 for a token, 256 dimensions | 0.620 ± 0.000 | 0.700 ± 0.028 |" in text
    assert "Experts, across languages: +0.020 ± 0.028" in text
    assert "undecided between seeds" in text
    assert "Cut to 256 dimensions, mean of all tasks: -0.020 ± 0.000" in text
    assert "115 steps, seeds 0, 1" in capsys.readouterr().out


@pytest.mark.parametrize("comparison", [cde.COMPARISON, nomic.COMPARISON])
def test_recipes_and_jobs_are_there(comparison):
    assert (seeded_runs.JOBS / comparison.job).is_file()
    runs = [comparison.run_of(label, 0, [])[0] for label in comparison.recipes]
    assert len({sum(stage.steps for stage in run.stages) for run in runs}) == 1
    expected = {4: [True, False, False, True], 2: [True, False]}[len(runs)]
    assert [run.evaluation.before_training for run in runs] == expected
