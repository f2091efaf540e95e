"""What a run would need, against counts by hand and published sizes."""

import json

import pytest

from rayembed.config.override import override
from rayembed.config.run import Placement
from rayembed.errors import ConfigError
from rayembed.pipeline.requirements import (
    ModelSize,
    backbone_settings,
    checkpoint_bytes,
    export_bytes,
    model_size,
    step_load,
    worker_memory,
)
from rayembed.recipes.catalogue import get_recipe

MISTRAL_LORA = (
    16
    * 32
    * (
        2 * (4096 + 4096)  # q, o
        + 2 * (4096 + 1024)  # k, v: 8 of 32 heads
        + 3 * (4096 + 14336)  # gate, up, down
    )
)


def test_nv_embed_has_the_published_number_of_parameters():
    """The index of nvidia/NV-Embed-v2 gives 15,702,032,384 bytes in bf16."""
    run = get_recipe("nvembed-v2")
    size = model_size(run.model)
    assert (size.total - MISTRAL_LORA) * 2 == 15_702_032_384
    assert size.trainable == MISTRAL_LORA + 740_356_096  # all of the latent attention
    whole = model_size(override(run, ["model.lora=null"]).model)
    assert whole.total == whole.trainable == 15_702_032_384 // 2
    mean = model_size(override(run, ["model.pooling.kind=mean"]).model)
    assert mean.trainable == MISTRAL_LORA


def test_the_sample_models_have_their_published_sizes():
    smollm2 = override(get_recipe("nvembed-quickstart"), ["model.pooling.kind=mean"]).model
    lora = 16 * 30 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert model_size(smollm2) == ModelSize(134_515_008 + lora, lora)
    minilm = model_size(get_recipe("biencoder").model)
    assert minilm.total == 22_713_216
    assert minilm.trainable == 22_713_216 - (384 * 384 + 384)  # its own pooler is frozen


def test_a_local_backbone_is_counted_from_its_configuration(tmp_path):
    run = get_recipe("biencoder")
    run = override(run, [f"model.backbone.path={tmp_path}"])
    with pytest.raises(ConfigError, match="no model there"):
        model_size(run.model)
    family = {"model_type": "llama", "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(family | layers))
    by_hand = 11 * 8 + (2 * 8 * 8 + 2 * 8 * 4 + 3 * 8 * 12 + 2 * 8) + 8
    assert model_size(run.model) == ModelSize(by_hand, by_hand)
    lora = override(run, ["model.lora={rank: 2, target_modules: [q_proj, down_proj]}"]).model
    assert model_size(lora).trainable == 2 * ((8 + 8) + (12 + 8))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no model there"):
        model_size(run.model)
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(ConfigError, match="builds no model of the family 'nothing-known'"):
        model_size(run.model)


def test_what_only_the_hub_knows_is_not_known():
    run = override(get_recipe("biencoder"), ["model.backbone.path=hf://org/name@main"])
    assert backbone_settings(run.model.backbone.path) is None
    assert model_size(run.model) is None


def test_adapters_on_layers_that_the_backbone_lacks_are_refused():
    run = override(get_recipe("biencoder"), ["model.lora={}"])
    with pytest.raises(ConfigError, match=r"has no such layers; it has .*query"):
        model_size(run.model)
    run = override(run, ["model.lora.target_modules=[query, value]"])
    assert model_size(run.model).trainable == 16 * 6 * 2 * (384 + 384)


def test_heads_that_do_not_fit_are_refused():
    run = override(
        get_recipe("nvembed-quickstart"),
        ["model.pooling.kind=self_attention", "model.pooling.num_heads=7"],
    )
    with pytest.raises(ConfigError, match="7"):
        model_size(run.model)


@pytest.mark.parametrize(
    ("zero", "weights", "gradients", "optimizer"),
    [(0, 2000, 200, 1200), (1, 2000, 200, 300), (2, 2000, 50, 300), (3, 500, 50, 300)],
)
def test_memory_is_divided_as_zero_says(zero, weights, gradients, optimizer):
    size = ModelSize(total=1000, trainable=100)
    memory = worker_memory(size, "bfloat16", Placement(workers=4, zero_stage=zero))
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, gradients, optimizer)
    assert memory.total == weights + gradients + optimizer
    single = worker_memory(size, "float32", Placement(workers=1, zero_stage=zero))
    assert (single.weights, single.gradients, single.optimizer) == (4000, 400, 1200)


def test_disk_and_load_of_a_step():
    run = get_recipe("nvembed-quickstart")  # bf16, two stages, two checkpoints of each
    size = ModelSize(total=1000, trainable=100)
    assert checkpoint_bytes(run, size) == 100 * (2 + 12) * 2 * 2
    assert export_bytes(run, size) == 1000 * 2 * 2
    v2 = get_recipe("nvembed-v2")
    load = step_load(v2, v2.stages[0])
    assert (load.texts, load.tokens) == (128 * 9, 128 * 9 * 512)
