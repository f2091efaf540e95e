"""Scores taken by Ray tasks."""

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
from made_up_articles import run_over, write_articles
from one_thread import one_thread
from run_scoring import evaluate_reference
from tiny_models import byte_level_tokenizer, save_decoder

from rayembed.assets.stored_folder import StoredFolder
from rayembed.config.data_run import data_of
from rayembed.config.evaluation import EvaluationPlacement
from rayembed.config.mining import Teacher
from rayembed.config.override import override
from rayembed.data.engine.on_ray import ray_pipeline_context
from rayembed.errors import ArtifactError, AssetError, WorkerError
from rayembed.evaluation.jobs import ScoreTask
from rayembed.evaluation.plan import task_factories
from rayembed.evaluation.pooled.on_ray import run_jobs
from rayembed.evaluation.pooled.pool import Workers
from rayembed.evaluation.run_scores import run_model
from rayembed.evaluation.tables import ScoreKey
from rayembed.machine import hardware
from rayembed.machine.hardware import auto_precision
from rayembed.pipeline.evaluate.run_scorer import RunScorer
from rayembed.pipeline.run.folders import RunFolders
from rayembed.pipeline.run.on_ray import OnRay
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.on_ray import export_on_ray

pytestmark = pytest.mark.ray

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def run_of(folder, **evaluation):
    run = run_over(write_articles(folder / "articles.json"), **evaluation)
    return override(run, [f"placement.storage_path={folder}/out", "placement.threads_per_worker=1"])


def scorer_of(run, folder):
    return RunScorer(run, RunFolders(StoredFolder(str(folder), folder)), OnRay())


def test_a_run_has_the_scores_of_this_process(cluster, tmp_path):
    run = run_of(tmp_path)
    model = save_decoder(tmp_path / "model", tokenizer=byte_level_tokenizer())
    with one_thread():
        here = evaluate_reference(model, run, name="tiny", results_folder=tmp_path / "here")
    scorer = scorer_of(run, tmp_path / "there")
    there = scorer.score(ScoreKey(baseline=str(model))).scores
    assert there == pytest.approx(here, abs=1e-4)
    assert all(math.isfinite(score) for score in here.values())
    words = scorer.score(ScoreKey(baseline="bm25")).scores
    assert words == {"WikiSentenceRetrieval": 1.0, "WikiDescriptionRetrieval": 1.0}
    files = {path.name for path in (tmp_path / "there").rglob("*.json")}
    assert files == {path.name for path in (tmp_path / "here").rglob("*.json")}
    assert not (tmp_path / "there" / "embeddings").exists(), "they were for these tasks alone"


@pytest.mark.parametrize("driver", [1 / 9, 2.4])
def test_a_node_says_what_it_computes_fast_whatever_the_driver_does(cluster, monkeypatch, driver):
    expected = ray.get(ray.remote(auto_precision).remote("cpu")).dtype
    monkeypatch.setattr(hardware, "bfloat16_speed", lambda: driver)
    assert OnRay().precision(EvaluationPlacement()).dtype == expected
    loader = ray_pipeline_context(data_of(get_recipe("biencoder"))).teacher_loader
    assert loader.settled(Teacher(teacher="a")).dtype == expected


def test_errors_come_back_as_they_were_raised(cluster, tmp_path):
    run = run_of(tmp_path)
    with pytest.raises(AssetError, match="nothing-there"):
        scorer_of(run, tmp_path / "out").score(ScoreKey(baseline="/nothing-there"))
    model = save_decoder(tmp_path / "model", tokenizer=byte_level_tokenizer())
    spec = run_model(run, str(model), name="rayembed/x")
    tasks = [ScoreTask(factory) for factory in task_factories(run.scores)]
    (model / "model.safetensors").unlink()
    with pytest.raises(ArtifactError):
        list(run_jobs(tasks, spec, None, Workers()))


@dataclass(frozen=True)
class Dies:
    """A job whose process dies, as often as files can be made in a folder."""

    folder: str
    times: int
    name: str = "dies"
    num_texts: int = 1_000_000

    def run(self, model):
        before = len(list(Path(self.folder).iterdir()))
        if before < self.times:
            Path(self.folder, str(before)).touch()
            os._exit(1)
        return {"deaths": before}


def test_a_process_that_dies_has_another_one_do_what_is_left(cluster, tmp_path):
    run = run_of(tmp_path)
    model = save_decoder(tmp_path / "model", tokenizer=byte_level_tokenizer())
    spec = run_model(run, str(model), name="rayembed/x")
    (tmp_path / "some").mkdir()
    (tmp_path / "many").mkdir()
    task = ScoreTask(task_factories(run.scores)[0])
    done = list(run_jobs([task, Dies(f"{tmp_path}/some", 1)], spec, None, Workers(tries=2)))
    assert [one.job.name for one in done] == ["dies", "WikiSentenceRetrieval"]
    assert done[0].outcome == {"deaths": 1}
    assert done[1].error is None
    done = list(run_jobs([task, Dies(f"{tmp_path}/many", 9)], spec, None, Workers(tries=2)))
    assert [one.job.name for one in done] == ["dies", "WikiSentenceRetrieval"]
    with pytest.raises(WorkerError, match=r"2 workers died over (.|\n)*in task dies(.|\n)*submit"):
        raise done[0].error
    assert done[1].error is None


def dies(*_, **__):
    os._exit(1)


def test_an_export_whose_process_dies_is_an_error_that_says_what_to_do(cluster, tmp_path):
    run = run_over(tmp_path / "articles.json")
    with pytest.raises(WorkerError, match=r"export of .*/model' was lost(.|\n)*Submit the run"):
        export_on_ray(dies, run, None, str(tmp_path / "model"))
