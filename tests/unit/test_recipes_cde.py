"""CDE's recipes for a laptop and for own pairs."""

from rayembed.pipeline.run.dry_run import step_load
from rayembed.recipes.catalogue import get_recipe


def test_the_context_before_each_text_counts_among_the_tokens_of_a_step():
    run = get_recipe("cde-quickstart")
    load = step_load(run, run.stages[0])
    assert load.texts == 128
    assert load.tokens == 128 * (64 + 32) + 32 * 64
    plain = get_recipe("biencoder-quickstart")
    assert step_load(plain, plain.stages[0]).tokens == 128 * 128


def test_the_recipe_of_own_pairs_has_a_context_of_a_whole_batch():
    run = get_recipe("cde")
    (stage,) = run.stages
    assert run.model.num_context == stage.batch.global_pairs
    (dataset,) = run.data.datasets
    assert (dataset.source.kind, stage.batch.policy) == ("pairs", "clustered")
    assert dataset.clusters.false_negative_margin == 0.0
    assert not run.evaluation.any_tasks
    assert [dataset.name for dataset in run.held_out_datasets] == ["pairs"]
