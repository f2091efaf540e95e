"""The published runs of CDE against its paper (arXiv 2410.02525)."""

import pytest

from rayembed.recipes.catalogue import get_recipe
from rayembed_extras.estimates.requirements import model_size


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
