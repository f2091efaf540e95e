"""Runs of Nomic Embed v2: the paper's numbers, the quickstart, stages of their own."""

import pytest

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.models.nomic_moe.upcycling import CONVERTIBLE
from rayembed.pipeline.estimate.published_shapes import PUBLISHED
from rayembed.pipeline.estimate.requirements import model_size, step_load
from rayembed.pipeline.run.training_job import training_job
from rayembed.recipes import nomic
from rayembed.recipes.catalogue import get_recipe


def test_the_published_run_has_the_numbers_of_the_paper():
    run = get_recipe("nomic-v2-moe")
    experts = run.model.experts
    assert (experts.num_experts, experts.top_k, experts.every) == (8, 2, 2)
    assert (experts.balance.coefficient, experts.balance.count_padding) == (1.0, False)
    assert run.model.rotary_base == 10_000
    assert (run.model.query_prefix, run.model.document_prefix) == (
        "search_query: ",
        "search_document: ",
    )
    pretrain, finetune = run.stages
    assert (pretrain.name, finetune.name) == ("pretrain", "finetune")
    assert (pretrain.batch.global_pairs, pretrain.batch.num_negatives) == (16_384, 0)
    assert (pretrain.query_max_length, pretrain.document_max_length) == (32, 256)
    assert pretrain.loss.temperature == 0.02
    optimizer = pretrain.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (8e-5, 1000)
    assert optimizer.schedule.kind == "cosine"
    assert pretrain.steps * 16_384 == 1_637_826_560  # one epoch of the counts of Table 10
    assert (finetune.batch.global_pairs, finetune.batch.num_negatives) == (256, 10)
    optimizer = finetune.optimizer
    assert (optimizer.learning_rate, optimizer.warmup_steps) == (2e-5, 400)
    assert optimizer.schedule.kind == "linear"
    assert finetune.steps == 1_029_632 // 256  # Table 11
    assert finetune.loss.dimensions == run.model.dimensions == (256,)
    assert {stage.batch.policy for stage in run.stages} == {"homogeneous"}
    assert step_load(run, pretrain).tokens == 16_384 * (32 + 256)
    assert step_load(run, finetune).tokens == 256 * 12 * 512


def test_sizes_are_those_of_the_paper():
    """475 M and 305 M with a vocabulary of 250,048 (section 4.3)."""
    size = model_size(get_recipe("nomic-v2-moe").model)
    assert size.total / 1e6 == pytest.approx(475.3, abs=0.1)
    assert size.active / 1e6 == pytest.approx(305.4, abs=0.1)
    dense = model_size(override(get_recipe("nomic-v2-moe"), ["model.experts=null"]).model)
    assert dense.total / 1e6 == pytest.approx(277.1, abs=0.5)
    assert dense.active is None


def test_the_quickstart_trains_on_three_languages_and_across_them():
    run = get_recipe("nomic-quickstart")
    by_name = {dataset.name: dataset for dataset in run.data.datasets}
    pretrain, finetune = run.stages
    assert {"sentence-en", "sentence-fr", "sentence-es", "en-fr", "en-es"} == set(pretrain.datasets)
    assert by_name["en-fr"].source.path != by_name["en-es"].source.path
    assert finetune.loss.dimensions == (256,)
    assert PUBLISHED[run.model.backbone.path]["model_type"] in CONVERTIBLE
    dense = get_recipe("nomic-quickstart-dense")
    assert dense.model.experts is None
    assert (dense.stages, dense.data) == (run.stages, run.data)
    with pytest.raises(ConfigError, match="is a run of 'biencoder'"):
        nomic.dense(get_recipe("biencoder"), "x")


def test_a_stage_runs_alone():
    run, _ = training_job("nomic-v2-moe").resolve(["--stage", "finetune", "--dry-run"])
    assert [stage.name for stage in run.stages] == ["finetune"]
    whole, _ = training_job("nomic-v2-moe").resolve(["--dry-run"])
    assert whole.fingerprint == get_recipe("nomic-v2-moe").fingerprint != run.fingerprint
    with pytest.raises(ConfigError, match="has no stage 'finetun'; did you mean 'finetune'"):
        training_job("nomic-v2-moe").resolve(["--stage", "finetun"])


def test_a_stage_reads_no_more_than_the_model():
    with pytest.raises(ConfigError, match=r"stages\.pretrain\.query_max_length 600 exceeds"):
        override(get_recipe("nomic-v2-moe"), ["stages.pretrain.query_max_length=600"])
