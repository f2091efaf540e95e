"""Ablations of the papers' tables as recipes."""

import pytest

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.recipes.catalogue import get_recipe
from rayembed_papers import ablations

ROWS = ("cde-quickstart-random", "cde-quickstart-clustered", "cde-quickstart-filtered")


@pytest.mark.parametrize("base", ["nvembed-quickstart", "nvembed-v2"])
def test_single_stages_of_table_4(base):
    two = get_recipe(base)
    for suffix, in_batch in (("single-stage", False), ("single-stage-in-batch", True)):
        run = get_recipe(f"{base}-{suffix}")
        (stage,) = run.stages
        assert stage.datasets == two.stages[1].datasets
        assert stage.batch.in_batch_negatives is in_batch
        assert stage.steps == two.stages[0].steps + two.stages[1].steps
        assert (run.model, run.data) == (two.model, two.data)


@pytest.mark.parametrize("base", ["nvembed-quickstart", "nvembed-v2"])
def test_reversed_stages_of_table_4(base):
    two, run = get_recipe(base), get_recipe(f"{base}-reversed")
    blend, retrieval = run.stages
    assert (blend.name, retrieval.name) == ("blend", "retrieval")
    assert (blend.batch, retrieval.batch) == (two.stages[1].batch, two.stages[0].batch)
    assert (blend.datasets, retrieval.datasets) == (two.stages[1].datasets, two.stages[0].datasets)
    assert [s.optimizer for s in run.stages] == [s.optimizer for s in two.stages]
    assert (run.model, run.data, run.evaluation) == (two.model, two.data, two.evaluation)
    with pytest.raises(ConfigError, match="reversed only in a run with two stages"):
        ablations.reversed_stages(get_recipe("biencoder"), "x")


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


def test_examples_of_the_evaluation_stand_in_its_instructions():
    run, plain = get_recipe("causal2vec-quickstart-icl"), get_recipe("causal2vec-quickstart")
    assert run.model.examples.max_examples == 2
    for task, instruction in run.evaluation.instructions.items():
        own = plain.evaluation.instructions[task]
        assert instruction.endswith(own)
        assert instruction.count("Response: ") == len(ablations.EXAMPLES.get(task, ()))
    assert get_recipe("causal2vec-mistral-7b-icl").model.examples.max_examples == 5
    with pytest.raises(
        ConfigError, match="examples are set for the task 'Other', which has no instruction"
    ):
        ablations.with_examples(plain, "x", run.model.examples, {"Other": []}, query_max_length=224)
    with pytest.raises(ConfigError, match="is a run of 'biencoder'"):
        ablations.last_token(get_recipe("biencoder"), "x")


def test_the_llm_alone_is_a_setting():
    run, alone = get_recipe("causal2vec-quickstart"), get_recipe("causal2vec-quickstart-last-token")
    settings = ["model.encoder=null", "model.representation=eos"]
    assert override(run, settings).fingerprint == alone.fingerprint
    assert (alone.stages, alone.data) == (run.stages, run.data)


def test_dense_layers_are_trained_as_experts_are():
    run, dense = get_recipe("nomic-quickstart"), get_recipe("nomic-quickstart-dense")
    assert dense.model.experts is None
    assert (dense.stages, dense.data) == (run.stages, run.data)
    with pytest.raises(ConfigError, match="is a run of 'biencoder'"):
        ablations.dense(get_recipe("biencoder"), "x")
