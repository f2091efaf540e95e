"""CDE's recipes against the paper and its released model (arXiv 2410.02525)."""

import pytest

from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.pipeline.estimate.requirements import model_size, step_load
from rayembed.recipes.catalogue import get_recipe

ROWS = ("cde-quickstart-random", "cde-quickstart-clustered", "cde-quickstart-filtered")


@pytest.mark.parametrize("name", ["cde-small", "cde-small-unsupervised"])
def test_published_runs_have_the_numbers_of_section_5(name):
    run = get_recipe(name)
    for stage in run.stages:
        assert (stage.batch.policy, stage.batch.global_pairs) == ("clustered", 512)
        assert stage.loss.temperature == 0.02
        assert stage.optimizer.learning_rate == 2e-5
        assert (stage.optimizer.warmup_steps, stage.optimizer.schedule.kind) == (1000, "linear")
        assert stage.optimizer.weight_decay == 0
    assert [s.batch.num_negatives for s in run.stages] == [0, 1][: len(run.stages)]
    model = run.model
    assert (model.num_context, model.sequence_dropout) == (512, 0.005)
    assert (model.query_max_length, model.document_max_length) == (512, 512)
    assert model.context_positions == "none"
    assert not model.pool_context
    assert model.backbone.path == model.encoder.path


def test_unsupervised_steps_are_three_epochs_of_some_235_million_pairs():
    (stage,) = get_recipe("cde-small-unsupervised").stages
    assert stage.steps * 512 / 3 == pytest.approx(235e6, rel=0.02)


def test_prefixes_are_those_of_section_10_7():
    run = get_recipe("cde-small")
    told = {d.query_instruction for d in run.data.datasets}
    assert told == {"search_query: ", "classification: ", "clustering: "}


def test_both_stages_have_the_size_of_nomic_bert():
    """137M parameters each ("137M parameters", section 5), and the layers around them."""
    size = model_size(get_recipe("cde-small").model)
    width = 768
    mlp = 2 * (width * width + width)
    prompts = width * width + width + 8 * (width * width + width)
    assert size.total - 2 * mlp - prompts - width == pytest.approx(2 * 137e6, rel=0.005)
    assert size.trainable == size.total


def test_rows_of_the_quickstart_differ_in_one_thing_each():
    rows = [get_recipe(name) for name in (*ROWS, "cde-quickstart")]
    first = rows[0]
    for run in rows:
        assert (run.stages[0].steps, run.seed) == (first.stages[0].steps, first.seed)
        assert run.stages[0].optimizer == first.stages[0].optimizer
        assert run.evaluation == first.evaluation
        assert run.model.backbone == first.model.backbone
        assert run.model.query_prefix == first.model.query_prefix
        assert [d.source for d in run.data.datasets] == [d.source for d in first.data.datasets]
        assert {d.num_samples for d in run.data.datasets} == {3000}
    policies = [run.stages[0].batch.policy for run in rows]
    assert policies == ["homogeneous", "clustered", "clustered", "clustered"]
    margins = [
        d.clusters and d.clusters.false_negative_margin for r in rows for d in r.data.datasets
    ]
    assert margins == [None] * 4 + [0.0] * 4
    assert [isinstance(run.model, BiEncoderConfig) for run in rows] == [True] * 3 + [False]
    assert rows[2].data == rows[3].data


def test_the_context_before_each_text_counts_among_the_tokens_of_a_step():
    run = get_recipe("cde-quickstart")
    load = step_load(run, run.stages[0])
    assert load.texts == 128
    assert load.tokens == 128 * (64 + 32) + 32 * 64
    plain = get_recipe("cde-quickstart-filtered")
    assert step_load(plain, plain.stages[0]).tokens == 128 * 64


def test_the_recipe_of_own_pairs_has_a_context_of_a_whole_batch():
    run = get_recipe("cde")
    (stage,) = run.stages
    assert run.model.num_context == stage.batch.global_pairs
    (dataset,) = run.data.datasets
    assert (dataset.source.kind, stage.batch.policy) == ("pairs", "clustered")
    assert dataset.clusters.false_negative_margin == 0.0
    assert not run.evaluation.any_tasks
    assert [dataset.name for dataset in run.held_out_datasets] == ["pairs"]
