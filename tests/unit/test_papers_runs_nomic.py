"""The published run of Nomic Embed v2 MoE against its paper (arXiv 2502.07972)."""

import pytest

from rayembed.config.override import override
from rayembed.pipeline.run.dry_run import step_load
from rayembed.recipes.catalogue import get_recipe
from rayembed_extras.estimates.requirements import model_size


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
