"""The check of a quickstart's scores: passes the two rules, names each that is broken."""

import importlib.util
from pathlib import Path

import pytest

from rayembed.evaluation.tables import ScoreTable, score_csv

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "check_quickstart.py"
NAMES = (
    "WikiSentenceRetrieval",
    "WikiDescriptionRetrieval",
    "WikiTopicClassification",
    "WikiTopicClustering",
    "WikiRelatedness",  # no stage trains it
)
BASE = dict(zip(NAMES, (0.35, 0.44, 0.5, 0.5, 0.6), strict=True))
FIRST = dict.fromkeys(NAMES, 0.1)
GOOD = dict(zip(NAMES, (0.56, 0.9, 0.6, 0.5, 0.5), strict=True))


@pytest.fixture(scope="module")
def check():
    spec = importlib.util.spec_from_file_location("check_quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checked(check, folder, rows):
    (folder / "scores.csv").write_text(score_csv(ScoreTable(rows)))
    return check.main([str(folder)])


def rows(**changes):
    """A table of which only the last stage counts, beside the base."""
    last = {name: score for name, score in {**GOOD, **changes}.items() if score is not None}
    others = {"BM25": {"WikiSentenceRetrieval": 0.9}}
    return {"untrained": BASE, "stage 1: retrieval": FIRST, "stage 2: blend": last, **others}


def test_scores_that_hold_pass(check, tmp_path, capsys):
    assert checked(check, tmp_path, rows()) == 0
    said = capsys.readouterr().out
    assert "What is trained holds" in said
    assert "not trained: WikiRelatedness 0.600 → 0.500" in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WikiSentenceRetrieval": 0.54}, "WikiSentenceRetrieval: 0.350 → 0.540, must gain 0.20"),
        ({"WikiTopicClustering": 0.499}, "WikiTopicClustering: 0.500 → 0.499, must gain 0.00"),
        ({"WikiTopicClustering": float("nan")}, "WikiTopicClustering: 0.500 → nan, must gain 0.00"),
        ({"WikiDescriptionRetrieval": None}, "WikiDescriptionRetrieval: no score of 'stage 2"),
    ],
)
def test_what_does_not_hold_is_named_and_nothing_else(check, tmp_path, capsys, changes, message):
    assert checked(check, tmp_path, rows(**changes)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_tables_without_what_is_compared_are_refused(check, tmp_path, capsys):
    assert check.main([str(tmp_path)]) == 1
    assert "make quickstart" in capsys.readouterr().err
    assert checked(check, tmp_path, {"BM25": BASE}) == 1
    assert "needs rows 'untrained'" in capsys.readouterr().err
