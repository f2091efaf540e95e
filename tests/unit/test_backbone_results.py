"""What trials come to: medians, the best setting, models that are kept, tables."""

import csv
import io
import json
from dataclasses import replace

import pytest

from rayembed.assets.storage import write_atomic
from rayembed.errors import ArtifactError, PlacementError
from rayembed_papers.backbone.catalogue import FINETUNINGS, TASKS
from rayembed_papers.backbone.finetune import Grid
from rayembed_papers.backbone.results import (
    best_result,
    find_results,
    keep_best_model,
    missing,
    summarize,
    trials_of,
)
from rayembed_papers.backbone.rows import StoredRows
from rayembed_papers.backbone.settings import BackbonePlacement
from rayembed_papers.backbone.tables import comparison, markdown, scores_csv, settings_table
from rayembed_papers.backbone.trial import Backbone

BACKBONE = Backbone("folder", "tiny", "abc", "float32", 0.1)
RTE = FINETUNINGS["RTE"]
MNLI = FINETUNINGS["MNLI"]

SCORES = {
    # (rate, batch): accuracy of seeds 0, 1 and 2
    (1e-5, 16): (0.50, 0.60, 0.70),
    (2e-5, 16): (0.55, 0.61, 0.90),
    (1e-5, 32): (0.58, 0.61, 0.80),
    (2e-5, 32): (0.40, 0.40, 0.95),
}


def grid(one, folder, *, keeps_model=False, start=None, **changes):
    protocol = {"learning_rates": (1e-5, 2e-5), "batch_sizes": (16, 32), "seeds": (0, 1, 2)}
    one = replace(one, protocol=one.protocol.model_copy(update=protocol | changes))
    data = {rows: StoredRows("place", rows.path) for rows in one.all_rows}
    return trials_of(one, BACKBONE, data, str(folder), keeps_model=keeps_model, start=start)


def finish(trial, accuracy, *, loss=0.5):
    metrics = {"accuracy": accuracy, "f1": accuracy / 2}
    scores = {}
    for scored in trial.finetuning.scored:
        # The mismatched half counts for nothing in the table.
        here = metrics if scored.subset != "validation_mismatched" else {"accuracy": 0.0}
        scores.setdefault(scored.task, {})[scored.subset] = here
    write_atomic(trial.result_path, json.dumps({"training_loss": loss, "scores": scores}).encode())


def finish_all(trials):
    for trial in trials:
        finish(trial, SCORES[trial.grid.learning_rate, trial.grid.batch_size][trial.grid.seed])


def test_the_best_setting_has_the_highest_median(tmp_path):
    trials = grid(RTE, tmp_path)
    assert len(trials) == 12
    finish_all(trials)
    summary = summarize(TASKS["RTE"], find_results(trials))
    # Equal medians of 0.61: the mean of (2e-5, 16) is the higher.
    assert summary.setting == (2e-5, 16)
    assert (summary.median, summary.mean) == (0.61, pytest.approx(2.06 / 3))
    mean = 2.06 / 3
    squares = (0.55 - mean) ** 2 + (0.61 - mean) ** 2 + (0.90 - mean) ** 2
    assert summary.deviation == pytest.approx((squares / 3) ** 0.5)
    # Of twelve: 0.40 0.40 0.50 0.55 0.58 0.60 | 0.61 0.61 0.70 0.80 0.90 0.95
    assert summary.median_of_all == pytest.approx(0.605)


def test_trials_without_a_result_are_missing_and_no_others(tmp_path):
    trials = grid(RTE, tmp_path)
    assert missing(trials, find_results(trials)) == trials
    finish_all(trials[:5])
    assert missing(trials, find_results(trials)) == trials[5:]
    wider = grid(RTE, tmp_path, seeds=(0, 1, 2, 7))
    left = missing(wider, find_results(wider))
    assert {t.key for t in left} == {t.key for t in wider} - {t.key for t in trials[:5]}
    assert not find_results(grid(RTE, tmp_path, epochs=4)), "another protocol, other trials"
    other = grid(RTE, tmp_path, start=grid(MNLI, tmp_path)[0])
    assert not find_results(other), "another start, other trials"


def test_trials_that_diverged_are_counted_and_no_results(tmp_path):
    trials = grid(MNLI, tmp_path, keeps_model=True)
    finish_all(trials)
    highest = {t.key for t in trials if t.grid == Grid(2e-5, 32, 2)}  # 0.95
    broken = [t for t in trials if t.key in highest or t.grid == Grid(2e-5, 16, 0)]
    for trial in broken:
        finish(trial, 0.99, loss=None)  # an argmax of NaN may name the right class
    results = find_results(trials)
    assert missing(trials, results) == [best_result(results).trial], "its model is not there"
    assert best_result(results).trial.grid == Grid(2e-5, 16, 2)
    summary = summarize(TASKS["MNLI"], results)
    assert (summary.diverged, len(summary.results)) == (2, 10)
    # Of (2e-5, 16), the best otherwise, seed 0 is missing.
    assert (summary.setting, summary.median) == ((1e-5, 32), 0.61)
    # Of ten: 0.40 0.40 0.50 0.58 0.60 | 0.61 0.61 0.70 0.80 0.90
    assert summary.median_of_all == pytest.approx(0.605)
    line = "Trials that diverged, and are no results: MNLI 2 of 12."
    assert line in markdown("glue", [summary], "tiny")
    finish_all(trials)
    whole = summarize(TASKS["MNLI"], find_results(trials))
    assert (whole.diverged, whole.setting) == (0, (2e-5, 16)), "the control"
    assert "diverged" not in markdown("glue", [whole], "tiny")


def test_a_damaged_result_is_told(tmp_path):
    (trial, *_) = grid(RTE, tmp_path)
    write_atomic(trial.result_path, b"{")
    with pytest.raises(ArtifactError, match=r"is damaged .* remove it"):
        find_results([trial])


def test_only_the_best_model_is_kept_and_made_again_when_it_is_gone(tmp_path):
    trials = grid(MNLI, tmp_path, keeps_model=True, seeds=(0,), batch_sizes=(16,))
    for trial, accuracy in zip(trials, (0.7, 0.6), strict=True):
        finish(trial, accuracy)
        write_atomic(f"{trial.model_path}/config.json", b"{}")
    keep_best_model(trials)
    results = find_results(trials)
    assert best_result(results).trial == trials[0]
    assert best_result(results).score(TASKS["MNLI"]) == 0.7, "the matched half alone"
    kept = sorted(path.parent.name for path in tmp_path.rglob("config.json"))
    assert kept == [trials[0].key.rpartition("/")[2]]
    assert missing(trials, results) == []
    (tmp_path / "models" / trials[0].key / "config.json").unlink()
    (tmp_path / "models" / trials[0].key).rmdir()
    assert missing(trials, results) == [trials[0]]


def test_tables_beside_the_papers(tmp_path):
    trials = grid(RTE, tmp_path)
    finish_all(trials)
    summaries = [summarize(TASKS["RTE"], find_results(trials))]
    table = comparison("glue", summaries, "tiny")
    rows = table.rows
    assert table.heads == ["Model", "RTE", "Mean of these"]
    assert rows[0] == ["XLM-R-Base (paper)", "77.26", "77.26"]
    assert rows[-2:] == [
        ["tiny, best setting", "61.00", "61.00"],
        ["tiny, median of all trials", "60.50", "60.50"],
    ]
    line = ["RTE", "accuracy", "2e-05", "16", "61.00", "68.67", "15.28", "3 of 12"]
    assert settings_table(summaries).rows[0] == line
    text = markdown("glue", summaries, "tiny")
    assert "| mNomic-BERT (paper) | 76.54 | 76.54 |" in text
    cells = list(csv.DictReader(io.StringIO(scores_csv(summaries))))
    found = {(c["subset"], c["metric"]): float(c["median"]) for c in cells}
    assert found == {("validation", "accuracy"): 0.61, ("validation", "f1"): 0.305}


def test_a_node_must_hold_a_trial():
    pytest.importorskip("ray")
    from rayembed_papers.backbone.on_ray import check_fits

    nodes = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0}]
    check_fits(BackbonePlacement(cpus_per_trial=8), nodes)
    check_fits(BackbonePlacement(cpus_per_trial=2, use_gpu=True), nodes)
    with pytest.raises(PlacementError, match=r"no node has the 4 CPU, 1 GPU .* 3 CPU, 0 GPU"):
        check_fits(BackbonePlacement(cpus_per_trial=4, use_gpu=True), nodes[1:])
