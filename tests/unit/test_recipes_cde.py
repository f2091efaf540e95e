"""CDE's recipes for a laptop and for own pairs."""

from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.pipeline.run.dry_run import step_load
from rayembed.recipes.catalogue import get_recipe

ROWS = ("cde-quickstart-random", "cde-quickstart-clustered", "cde-quickstart-filtered")


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
