"""The drill's measures see what they are there for: lost rows, other weights, parts of files."""

from dataclasses import replace

import pytest
import safetensors.torch
import torch
from outcome import NotThrown, Outcome, Trained, compare, half_written, markdown_table
from scene import STAGE, StepsSeen

from rayembed.registry.metrics_log import MetricsLog

WHOLE = Trained(
    {"a": torch.tensor([1.0, 2.0]), "b": torch.zeros(3)},
    [(1, 0.5, 10.0), (2, 0.25, 12.0), (3, 0.125, 8.0)],
    {1: ["r0", "r1"], 2: ["r2", "r3"], 3: ["r4", "r5"]},
)


def test_an_equal_run_has_lost_nothing():
    assert compare(WHOLE, WHOLE) == (0, 0, None)


@pytest.mark.parametrize(
    ("records", "lost", "twice"),
    [
        (WHOLE.records[:2], 2, 0),
        ([*WHOLE.records, WHOLE.records[1]], 0, 2),
        ([WHOLE.records[0], (2, 0.26, 12.0), WHOLE.records[2]], 2, 0),
        ([WHOLE.records[0], (2, 0.25, 13.0), WHOLE.records[2]], 2, 0),
        ([], 6, 0),
    ],
    ids=["a step missing", "a step twice", "another loss", "other tokens", "nothing"],
)
def test_rows_of_steps_that_are_not_those_of_the_undisturbed_run(records, lost, twice):
    assert compare(replace(WHOLE, records=records), WHOLE) == (lost, twice, None)


def test_other_rows_in_the_plan_are_seen():
    other = replace(WHOLE, rows={**WHOLE.rows, 3: ["r4", "r4"]})
    assert compare(other, WHOLE)[:2] == (1, 1)


def test_other_weights_are_seen():
    other = replace(WHOLE, weights={**WHOLE.weights, "a": torch.tensor([1.0, 2.5])})
    assert compare(other, WHOLE)[2] == 0.5
    assert compare(replace(WHOLE, weights={}), WHOLE)[2] == float("inf")


def test_parts_of_files_are_found(tmp_path):
    train = tmp_path / "runs" / "drill" / STAGE / "train"
    (train / "step-0000004").mkdir(parents=True)
    (tmp_path / ".weights.tmp").touch()
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(safetensors.torch.save({"a": torch.zeros(9)})[:-1])
    safetensors.torch.save_file({"a": torch.zeros(9)}, tmp_path / "whole.safetensors")
    assert half_written(tmp_path) == (
        ".weights.tmp",
        "cut.safetensors",
        f"runs/drill/{STAGE}/train/step-0000004",
    )


def test_steps_that_were_replaced_count_as_repeated(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    seen = StepsSeen(log.path)
    for step in (1, 2, 3, 4):
        log.append("only", step, step, {"loss": 1.0})
    while seen.last() < 4:
        pass
    for step in (3, 4, 5):
        log.append("only", step, step, {"loss": 1.0})
    assert seen.repeated() == 2


def test_the_table_tells_what_is_bad():
    good = Outcome("f", "a|b", "nothing", 2, 0, 0, None)
    assert good.is_good
    for bad in ({"rows_lost": 1}, {"rows_twice": 1}, {"difference": 0.0}, {"half_written": ("x",)}):
        assert not replace(good, **bad).is_good
    table = markdown_table([good, NotThrown("g", "no root", failed=False)])
    assert "| f | a\\|b | nothing | 2 | 0 | yes |" in table
    assert "| g | not thrown: no root |" in table
