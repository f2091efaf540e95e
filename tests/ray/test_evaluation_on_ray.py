"""Evaluation as a Ray task."""

import math
import os
import sys

import pytest
import ray
from made_up_articles import run_over, write_articles
from one_thread import one_thread
from rayembed.evaluation.evaluate import evaluate_reference
from tiny_models import byte_level_tokenizer, save_cde_stages, save_decoder
from word_articles import run_over_words, write_word_articles

from rayembed.config.model import CDEConfig
from rayembed.config.settings import parse
from rayembed.errors import AssetError, ConfigError, WorkerError
from rayembed.evaluation.context_sizes import scores_by_size
from rayembed.evaluation.on_ray import evaluate_on_ray, measured_on_ray
from rayembed.models.build import build_model
from rayembed.training.on_ray import export_on_ray

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_a_task_gives_the_scores_of_this_process(cluster, tmp_path):
    run = run_over(write_articles(tmp_path / "articles.json"))
    model = save_decoder(tmp_path / "model", tokenizer=byte_level_tokenizer())
    with one_thread():
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


def dies(*_):
    os._exit(1)


def test_a_task_whose_process_dies_is_an_error_that_says_what_to_do(cluster, tmp_path, monkeypatch):
    run = run_over(tmp_path / "articles.json")
    monkeypatch.setattr("rayembed.evaluation.on_ray._evaluate", dies)
    with pytest.raises(WorkerError, match=r"evaluation of 'x' was lost(.|\n)*submit the run again"):
        evaluate_on_ray("bm25", run, name="x", results_folder=tmp_path)
    monkeypatch.setattr("rayembed.training.on_ray.export", dies)
    with pytest.raises(WorkerError, match=r"export of .*/model' was lost(.|\n)*Submit the run"):
        export_on_ray(run, None, str(tmp_path / "model"))


def test_an_analysis_of_a_model_is_that_of_this_process(cluster, tmp_path):
    run = run_over_words(write_word_articles(tmp_path / "articles.json"))
    config = {
        "backbone": {"path": "given", "dtype": "float32"},
        "encoder": {"path": "given"},
        "num_context": 4,
        "query_max_length": 62,
        "document_max_length": 62,
    }
    model = build_model(parse(CDEConfig, config), save_cde_stages(tmp_path), seed=5)
    model.save(tmp_path / "model")
    asked = {"name": "tiny", "sizes": [0, 4], "draws": 1}
    with one_thread():
        here = scores_by_size(tmp_path / "model", run, results_folder=tmp_path / "here", **asked)
    there = measured_on_ray(
        scores_by_size, tmp_path / "model", run, results_folder=tmp_path / "there", **asked
    )
    assert there.keys() == here.keys()
    for size, scores in here.items():
        assert there[size] == {task: pytest.approx(found) for task, found in scores.items()}
    with pytest.raises(ConfigError, match="9 context documents are more"):
        measured_on_ray(
            scores_by_size,
            tmp_path / "model",
            run,
            results_folder=tmp_path,
            **asked | {"sizes": [9]},
        )
