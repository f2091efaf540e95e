"""Runs of Nomic Embed v2: the quickstart, stages of their own."""

import pytest

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes.catalogue import get_recipe


def test_the_quickstart_trains_on_three_languages_and_across_them():
    run = get_recipe("nomic-quickstart")
    by_name = {dataset.name: dataset for dataset in run.data.datasets}
    pretrain, finetune = run.stages
    assert {"sentence-en", "sentence-fr", "sentence-es", "en-fr", "en-es"} == set(pretrain.datasets)
    assert by_name["en-fr"].source.path != by_name["en-es"].source.path
    assert finetune.loss.dimensions == (256,)


def test_a_stage_runs_alone():
    run, _ = training_job("nomic-quickstart").resolve(["--stage", "finetune", "--dry-run"])
    assert [stage.name for stage in run.stages] == ["finetune"]
    whole, _ = training_job("nomic-quickstart").resolve(["--dry-run"])
    assert whole.fingerprint == get_recipe("nomic-quickstart").fingerprint != run.fingerprint
    with pytest.raises(ConfigError, match="has no stage 'finetun'; did you mean 'finetune'"):
        training_job("nomic-quickstart").resolve(["--stage", "finetun"])


def test_a_stage_reads_no_more_than_the_model():
    with pytest.raises(ConfigError, match=r"stages\.pretrain\.query_max_length 600 exceeds"):
        override(get_recipe("nomic-quickstart"), ["stages.pretrain.query_max_length=600"])
