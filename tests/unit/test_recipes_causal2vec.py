"""Causal2Vec's recipes for a laptop, and their ablations."""

from rayembed.config.override import override
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


def test_the_quickstart_trains_both_parts_on_the_samples():
    run = get_recipe("causal2vec-quickstart")
    assert run.model.backbone.path == SMOLLM2
    assert run.model.encoder.path == MINILM
    assert not run.model.encoder.frozen
    trained = {dataset.query_instruction for dataset in run.data.datasets}
    assert trained < set(run.evaluation.instructions.values())
