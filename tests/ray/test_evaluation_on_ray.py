"""Evaluation as a Ray task."""

import math

import pytest
from made_up_articles import run_over, write_articles
from tiny_models import byte_level_tokenizer, save_decoder

from rayembed.errors import AssetError, ConfigError
from rayembed.evaluation.evaluate import evaluate_reference
from rayembed.evaluation.on_ray import evaluate_on_ray

pytestmark = pytest.mark.ray


def test_a_task_gives_the_scores_of_this_process(cluster, tmp_path):
    run = run_over(write_articles(tmp_path / "articles.json"))
    model = save_decoder(tmp_path / "model", tokenizer=byte_level_tokenizer())
    here = evaluate_reference(model, run, name="tiny", results_folder=tmp_path / "here")
    there = evaluate_on_ray(
        model, run, name="tiny", results_folder=tmp_path / "there", num_threads=1
    )
    assert there == pytest.approx(here, abs=1e-4)
    assert all(math.isfinite(score) for score in here.values())
    words = evaluate_on_ray("bm25", run, name="bm25", results_folder=tmp_path / "bm25")
    assert words == {"WikiSentenceRetrieval": 1.0, "WikiDescriptionRetrieval": 1.0}
    files = sorted(path.name for path in (tmp_path / "there").rglob("*.json"))
    assert files == sorted(path.name for path in (tmp_path / "here").rglob("*.json"))


def test_errors_come_back_as_they_were_raised(cluster, tmp_path):
    run = run_over(write_articles(tmp_path / "articles.json"), instructions={"Wiki": "x"})
    with pytest.raises(ConfigError, match="no task 'Wiki'"):
        evaluate_on_ray("bm25", run, name="bm25", results_folder=tmp_path)
    with pytest.raises(AssetError, match="nothing-there"):
        evaluate_on_ray("/nothing-there", run, name="x", results_folder=tmp_path)
