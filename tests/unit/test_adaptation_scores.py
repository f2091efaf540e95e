"""Scores of an adaptation are told from its log while it trains, and the last ones at its end."""

import time

import pytest

from rayembed.pipeline import adapt
from rayembed.pipeline.adapt import held_out_scores
from rayembed.registry.metrics_log import MetricsLog


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setattr(adapt, "_POLL_SECONDS", 0.01)
    return MetricsLog(tmp_path / "metrics.jsonl")


def step(log, number, perplexity=None):
    scores = {} if perplexity is None else {"held_out/perplexity/en": perplexity}
    log.append("adapt", number, number, {"loss": 1.0, **scores})


def test_scores_are_one_by_perplexity_and_their_mean_over_languages():
    metrics = {"held_out/perplexity/en": 4.0, "held_out/perplexity/fr": 2.0, "perplexity/en": 9.0}
    assert held_out_scores(metrics) == {"en": 0.25, "fr": 0.5, "score": 0.375}
    assert held_out_scores({"held_out/perplexity": 4.0}) == {}


def test_a_score_is_told_while_the_training_goes_on(log):
    told = []
    step(log, 1, perplexity=8.0)  # of an earlier process
    with adapt._scores_told(log, lambda *score: told.append(score)):
        step(log, 2)
        step(log, 3, perplexity=4.0)
        ends = time.monotonic() + 10
        while len(told) < 2 and time.monotonic() < ends:
            time.sleep(0.01)
        assert [(scores["en"], at) for _, scores, at in told] == [(0.125, 1), (0.25, 3)]
    assert len(told) == 2


def test_the_last_score_is_told_where_the_training_fails(log, monkeypatch):
    monkeypatch.setattr(adapt, "_POLL_SECONDS", 60.0)
    told = []

    def train():
        with adapt._scores_told(log, lambda *score: told.append(score)):
            step(log, 2, perplexity=4.0)
            raise RuntimeError("made up")

    with pytest.raises(RuntimeError, match="made up"):
        train()
    assert [at for _, _, at in told] == [2]


def test_a_step_that_is_taken_again_is_told_once(log):
    told = []
    with adapt._scores_told(log, lambda *score: told.append(score)):
        step(log, 1)
        step(log, 2, perplexity=4.0)
        step(log, 2, perplexity=4.0)
        step(log, 3, perplexity=2.0)
    assert [at for _, _, at in told] == [2, 3]
