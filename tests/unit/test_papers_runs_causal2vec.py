"""The published runs of Causal2Vec against its paper (arXiv 2507.23386)."""

import pytest

from rayembed.config.override import override
from rayembed.config.settings import parse
from rayembed.config.stage import StageConfig
from rayembed.errors import ConfigError
from rayembed.pipeline.run.dry_run import _share
from rayembed.recipes.catalogue import get_recipe
from rayembed.training.optimizer import learning_rate_factor
from rayembed_extras.estimates.requirements import model_size

LARGE = ("causal2vec-mistral-7b", "causal2vec-llama2-7b")
SMALL = ("causal2vec-qwen2.5-1.5b", "causal2vec-sllama-1.3b")


@pytest.mark.parametrize("name", [*LARGE, *SMALL])
def test_published_runs_have_the_numbers_of_the_appendix(name):
    run = get_recipe(name)
    (stage,) = run.stages
    large = name in LARGE
    assert stage.steps == (1000 if large else 2000)
    assert stage.optimizer.decay_steps == (2000 if large else 4000)
    assert (stage.optimizer.learning_rate, stage.optimizer.warmup_steps) == (1e-4, 300)
    assert stage.optimizer.schedule.kind == "linear"
    assert stage.loss.temperature == 0.05
    assert (stage.batch.policy, stage.batch.global_pairs) == ("homogeneous", 512)
    assert stage.batch.in_batch_negatives
    assert stage.batch.num_negatives > 0
    model = run.model
    assert (model.lora.rank, model.lora.alpha) == (64, 32 if large else 128)
    assert (model.query_max_length, model.document_max_length) == (512, 512)
    assert model.encoder.path.startswith("hf://intfloat/e5-base-v2")
    assert model.encoder.frozen is large  # "LoRA for Bidirectional Encoder"
    assert (model.encoder.lora is None) is large
    assert (model.representation, model.position, model.mask) == (
        "concat",
        "after_instruction",
        "causal",
    )
    assert model.num_contextual_tokens == 1
    assert len(stage.datasets) == len(run.data.datasets) == 16
    assert all(not d.document_instruction for d in run.data.datasets)
    assert model.backbone.dtype == "bfloat16"
    # Drawn by rows, so no share can be told before they are read.
    assert {_share(stage, name) for name in stage.datasets} == {"1 × rows"}


def test_the_encoder_has_the_size_of_table_6_and_llms_their_own():
    for name, billions in zip((*LARGE, *SMALL), (7.1, 6.6, 1.5, 1.3), strict=True):
        run = get_recipe(name)
        whole = model_size(override(run, ["model.encoder=null", "model.representation=eos"]).model)
        assert (whole.total - whole.adapters) / 1e9 == pytest.approx(billions, abs=0.06)
        both = override(run, ["model.encoder.frozen=true", "model.encoder.lora=null"]).model
        size, width = model_size(both), {7.1: 4096, 6.6: 4096, 1.5: 1536, 1.3: 2048}[billions]
        projector = 768 * width + width * width
        assert size.total - whole.total - projector == 109_482_240  # BERT-base
        assert size.trainable - whole.trainable == projector


def test_the_rate_decays_over_twice_the_steps():
    (stage,) = get_recipe("causal2vec-mistral-7b").stages
    assert learning_rate_factor(299, stage) == 1.0
    assert learning_rate_factor(300, stage) == 1.0
    assert learning_rate_factor(999, stage) == pytest.approx(1 - 699 / 1700)
    values = stage.model_dump(mode="json")
    without = {**values, "optimizer": {**values["optimizer"], "decay_steps": None}}
    assert learning_rate_factor(999, parse(StageConfig, without)) == pytest.approx(1 / 700)
    for change in ({"decay_steps": 999}, {"schedule": "constant"}):
        wrong = {**values, "optimizer": {**values["optimizer"], **change}}
        with pytest.raises(ConfigError, match="decay_steps"):
            parse(StageConfig, wrong)
