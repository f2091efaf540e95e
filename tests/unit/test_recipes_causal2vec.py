"""Causal2Vec's recipes for a laptop, and their ablations."""

import pytest

from rayembed.config.override import override
from rayembed.errors import ConfigError
from rayembed.recipes import causal2vec
from rayembed.recipes.catalogue import get_recipe
from rayembed.recipes.sample import MINILM, SMOLLM2


def test_the_ablations_are_settings():
    run = get_recipe("causal2vec-quickstart")
    changes = (
        [],
        *([f"model.num_contextual_tokens={n}"] for n in (2, 4, 8)),
        ["model.position=before_instruction"],
        *([f"model.representation={r}"] for r in ("average", "eos", "concat_encoder", "separate")),
        ["model.mask=bidirectional"],
        ["model.encoder.path=hf://thenlper/gte-small@main"],
        ["model.encoder.lora=null"],
        ["model.encoder.lora=null", "model.encoder.frozen=true"],
        ["model.encoder=null", "model.representation=eos"],
    )
    fingerprints = {override(run, change).fingerprint for change in changes}
    assert len(fingerprints) == len(changes)
    alone = get_recipe("causal2vec-quickstart-last-token")
    assert override(run, changes[-1]).fingerprint == alone.fingerprint
    assert (alone.stages, alone.data) == (run.stages, run.data)


def test_the_quickstart_trains_both_parts_on_the_samples():
    run = get_recipe("causal2vec-quickstart")
    assert run.model.backbone.path == SMOLLM2
    assert run.model.encoder.path == MINILM
    assert not run.model.encoder.frozen
    trained = {dataset.query_instruction for dataset in run.data.datasets}
    assert trained < set(run.evaluation.instructions.values())


def test_examples_of_the_evaluation_stand_in_its_instructions():
    run, plain = get_recipe("causal2vec-quickstart-icl"), get_recipe("causal2vec-quickstart")
    assert run.model.examples.max_examples == 2
    for task, instruction in run.evaluation.instructions.items():
        own = plain.evaluation.instructions[task]
        assert instruction.endswith(own)
        assert instruction.count("Response: ") == len(causal2vec.EXAMPLES.get(task, ()))
    assert get_recipe("causal2vec-mistral-7b-icl").model.examples.max_examples == 5
    with pytest.raises(ConfigError, match="examples for 'Other', which has no instruction"):
        causal2vec.with_examples(
            plain, "x", run.model.examples, {"Other": []}, query_max_length=224
        )
    with pytest.raises(ConfigError, match="is a run of 'biencoder'"):
        causal2vec.last_token(get_recipe("biencoder"), "x")
