"""Tables and pictures of scores."""

import csv
import io

import numpy as np
import pytest
from rich.console import Console

from rayembed.display.tables import MISSING, show
from rayembed.evaluation.plots import loss_curve, score_bars, smoothed
from rayembed.evaluation.tables import (
    UNTRAINED,
    ScoreKey,
    ScoreTable,
    run_table,
    score_csv,
    score_table,
)

TABLE = ScoreTable(
    rows={
        "untrained": {"WikiSentenceRetrieval": 0.45, "WikiTopicClustering": 0.30},
        "stage 2": {"WikiSentenceRetrieval": 0.7104, "WikiTopicClustering": 0.28},
        "BM25": {"WikiSentenceRetrieval": 0.39},
    },
    base="untrained",
)


def test_markdown_marks_the_best_and_the_difference_to_the_base():
    assert show(score_table(TABLE), "markdown").splitlines() == [
        "| Model | Sentence retrieval nDCG@10 | Topic clustering V-measure |",
        "| --- | ---: | ---: |",
        "| untrained | 0.450 | **0.300** |",
        "| stage 2 | **0.710** (+0.260) | 0.280 (-0.020) |",
        f"| BM25 | 0.390 (-0.060) | {MISSING} |",
    ]


def test_labels_are_made_for_the_table_and_scores_are_found_by_key(monkeypatch):
    last = ScoreKey("blend")
    scores = {
        UNTRAINED: {"x": 0.1},
        ScoreKey("retrieval"): {"x": 0.2},
        last: {"x": 0.3},
        ScoreKey("blend", dimension=256): {"x": 0.25},
        ScoreKey("blend", precision="int8"): {"x": 0.29},
        ScoreKey("blend", dimension=256, precision="binary"): {"x": 0.2},
        ScoreKey("blend", without_context=True): {"x": 0.15},
        ScoreKey(baseline="BM25"): {"x": 0.4},
    }
    table = run_table(scores, ["retrieval", "blend"])
    assert list(table.rows) == [
        "untrained",
        "stage 1: retrieval",
        "stage 2: blend",
        "the same, 256 dimensions",
        "the same, int8",
        "the same, 256 dimensions, binary",
        "the same, without context",
        "BM25",
    ]
    assert table.base == "untrained"
    monkeypatch.setattr(ScoreKey, "label", lambda key, stages: f"row {id(key)}")
    relabelled = run_table(scores, ["retrieval", "blend"])
    assert list(relabelled.rows.values()) == list(table.rows.values())
    assert scores[ScoreKey("blend")] == {"x": 0.3}


def test_scores_that_print_alike_are_both_the_best():
    table = ScoreTable({"a": {"x": 0.50012}, "b": {"x": 0.50038}})
    assert show(score_table(table), "markdown").count("**0.500**") == 2


def test_the_mean_is_of_complete_rows_only():
    means = TABLE.with_means()
    assert means.score("untrained", "Mean") == pytest.approx(0.375)
    assert means.score("BM25", "Mean") is None


def test_own_and_general_tasks_have_a_mean_each():
    rows = {
        "untrained": {"a": 0.5, "b": 0.7, "mine": 0.2},
        "trained": {"a": 0.4, "b": 0.6, "mine": 0.4},
        "BM25": {"a": 0.3, "mine": 0.25},
    }
    shown = show(
        score_table(ScoreTable(rows, "untrained", own=["mine"]), with_mean=True), "markdown"
    )
    head, _, untrained, trained, bm25 = shown.splitlines()
    assert head == "| Model | a | b | mine | Own | General |"
    assert untrained.endswith("| 0.200 | 0.200 | **0.600** |")
    assert trained.endswith("| **0.400** (+0.200) | **0.400** (+0.200) | 0.500 (-0.100) |")
    assert bm25.endswith(f"| 0.250 (+0.050) | 0.250 (+0.050) | {MISSING} |")
    one_kind = score_table(ScoreTable(rows, own=["a", "b", "mine"]), with_mean=True)
    assert one_kind.heads[-1] == "Mean"


def test_a_score_that_is_no_number_counts_as_missing():
    table = ScoreTable({"a": {"x": float("nan")}, "b": {"x": 0.2}}, base="b")
    assert table.best("x") == 0.2
    assert table.with_means().score("a", "Mean") is table.difference("a", "x") is None
    assert f"| a | {MISSING} |" in show(score_table(table), "markdown")


def test_csv_keeps_full_precision_and_leaves_missing_scores_empty():
    rows = list(csv.DictReader(io.StringIO(score_csv(TABLE))))
    assert rows[1]["WikiSentenceRetrieval"] == "0.7104"
    assert rows[2] == {"model": "BM25", "WikiSentenceRetrieval": "0.39", "WikiTopicClustering": ""}


def test_the_terminal_shows_every_row_and_bold_only_for_the_best():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120, color_system="standard")
    console.print(score_table(TABLE, with_mean=True))
    shown = text.getvalue()
    assert "\x1b[1m0.710" in shown
    assert "\x1b[1m0.450" not in shown
    for word in ("untrained", "stage 2", "BM25", "+0.260", "-0.020", "0.375", MISSING):
        assert word in shown


def test_smoothing_keeps_straight_lines_and_follows_no_outermost_value():
    line = np.linspace(3.0, 1.0, 200)
    np.testing.assert_allclose(smoothed(line), line)
    np.testing.assert_allclose(smoothed(np.array([1.0, 4.0, 1.0])), [2.0, 2.0, 2.0])
    jumps = np.zeros(100)
    jumps[[0, -1]] = 10.0
    assert smoothed(jumps).max() < 4.0
    noise = np.random.default_rng(0).normal(size=400)
    assert smoothed(noise).std() < 0.4 * noise.std()
    assert smoothed(np.array([])).shape == (0,)
    assert smoothed(np.array([7.0])).tolist() == [7.0]


def test_pictures_are_written(tmp_path):
    score_bars(TABLE, tmp_path / "deep" / "scores.png")
    score_bars(ScoreTable({"a": {"x": float("nan")}, "b": {"x": -0.1}}), tmp_path / "odd.png")
    records = [
        {"step": step, "loss": 2.0 / step, "learning_rate": 1e-5 * step, "stage": stage}
        for stage in ("retrieval", "blend")
        for step in range(1, 9)
    ]
    loss_curve(records, tmp_path / "loss.png")
    loss_curve([], tmp_path / "empty.png")
    scored = [{"stage": "blend", "step": step, "score": step / 10} for step in (4, 8)]
    loss_curve(records, tmp_path / "validated.png", validation=scored)
    assert (tmp_path / "validated.png").read_bytes() != (tmp_path / "loss.png").read_bytes()
    dropped = {**records[3], "step": 3.5, "loss": float("nan")}
    loss_curve([*records[:3], dropped, *records[3:]], tmp_path / "dropped.png")
    assert (tmp_path / "dropped.png").read_bytes() == (tmp_path / "loss.png").read_bytes()
    for name in ("deep/scores.png", "loss.png", "validated.png", "empty.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
