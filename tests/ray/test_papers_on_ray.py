"""Measurements of the papers on workers of Ray."""

import os
import sys

import pytest
import ray
from made_up_articles import wikipedia_over
from one_thread import one_thread
from tiny_models import save_cde_stages
from word_articles import run_over_words, write_word_articles

from rayembed.config.settings import parse
from rayembed.errors import ConfigError, WorkerError
from rayembed.models.cde.config import CDEConfig
from rayembed.models.loading.build import build_model
from rayembed_papers.context.sizes import scores_by_size
from rayembed_papers.measure_on_ray import measured_on_ray

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def dies(*_, **__):
    os._exit(1)


def test_a_measurement_whose_process_dies_is_an_error_that_says_what_to_do(cluster, tmp_path):
    run = run_over_words(write_word_articles(tmp_path / "articles.json"), sampled=wikipedia_over)
    with pytest.raises(WorkerError, match=r"evaluation of 'x' was lost(.|\n)*submit the run again"):
        measured_on_ray(dies, "x", placement=run.placement)


def test_an_analysis_of_a_model_is_that_of_this_process(cluster, tmp_path):
    run = run_over_words(write_word_articles(tmp_path / "articles.json"), sampled=wikipedia_over)
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
    place = {"placement": run.placement}
    with one_thread():
        here = scores_by_size(tmp_path / "model", run, results_folder=tmp_path / "here", **asked)
    there = measured_on_ray(
        scores_by_size, tmp_path / "model", run, results_folder=tmp_path / "there", **asked, **place
    )
    assert there.keys() == here.keys()
    for size, scores in here.items():
        assert there[size] == {task: pytest.approx(found) for task, found in scores.items()}
    with pytest.raises(ConfigError, match="9 context documents were requested"):
        measured_on_ray(
            scores_by_size,
            tmp_path / "model",
            run,
            results_folder=tmp_path,
            **asked | place | {"sizes": [9]},
        )
