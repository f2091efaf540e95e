import copy

import pytest
import torch
from tiny_models import save_decoder, save_encoder

from rayembed.config.backbone import (
    BackboneConfig,
    ClsPooling,
    LatentAttentionPooling,
    LoraConfig,
    MeanPooling,
)
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.adapters.lora import merge_lora, merged_state
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.contract import load_trainable_state, trainable_state
from rayembed.models.loading.build import build_model
from rayembed.models.nvembed.config import NVEmbedConfig

POOLING = LatentAttentionPooling(num_latents=4, num_heads=2, mlp_ratio=2)
TEXTS = ["are cats larger than dogs", "the quick brown fox jumps over the lazy dog", "Paris"]
TASK = "Given a question, retrieve passages that answer it"


def nvembed_config(dtype="float32", **changes):
    backbone = BackboneConfig(path="unused", dtype=dtype)
    return NVEmbedConfig(**({"backbone": backbone, "pooling": POOLING} | changes))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return save_decoder(tmp_path_factory.mktemp("decoder"))


def embed(model, role="query", instruction=TASK):
    model.eval()
    tokens = model.tokenizer(TEXTS, role, [instruction] * len(TEXTS))
    with torch.no_grad():
        return model(model.tokenizer.collate(tokens)).embeddings


def test_same_seed_gives_the_same_weights_and_leaves_the_generator(decoder):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = build_model(nvembed_config(), decoder, seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    two, three = (build_model(nvembed_config(), decoder, seed=s) for s in (7, 8))
    assert one.state_dict().keys() == two.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, two.state_dict()[name]), name
    differ = {n for n, v in one.state_dict().items() if not torch.equal(v, three.state_dict()[n])}
    assert "pooling.latents" in differ
    assert "backbone.layers.0.self_attn.q_proj.lora_A.default.weight" in differ
    assert not any("base_layer" in name or "embed_tokens" in name for name in differ)


def test_lora_trains_adapters_and_pooling_alone(decoder):
    model = build_model(nvembed_config(), decoder, seed=0).train()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {n for n in trained if n.startswith("backbone.")} == {
        f"backbone.layers.{i}.{block}.{layer}.lora_{ab}.default.weight"
        for i in range(2)
        for block, layers in (
            ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
        )
        for layer in layers
        for ab in "AB"
    }
    assert {n for n in trained if not n.startswith("backbone.")} == {
        f"pooling.{n}" for n in model.pooling.state_dict()
    }
    assert {model.backbone_parameter(n) for n in trained if "lora" in n} == {True}
    assert {model.backbone_parameter(n) for n in trained if "lora" not in n} == {False}
    layer = model.backbone.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 2.0  # alpha 32 over rank 16
    assert layer.lora_dropout["default"].p == 0.1
    assert layer.lora_A["default"].weight.shape == (16, 32)


def test_everything_is_in_the_configs_dtype_but_frequencies(decoder):
    model = build_model(nvembed_config("bfloat16"), decoder, seed=0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.backbone.rotary_emb.inv_freq.dtype == torch.float32
    output = model(model.tokenizer.collate(model.tokenizer(TEXTS, "document")))
    assert output.embeddings.dtype == torch.float32
    assert torch.allclose(output.embeddings.norm(dim=-1), torch.ones(3), atol=1e-6)


def test_casting_the_whole_model_keeps_rotary_frequencies(decoder):
    """DeepSpeed calls `bfloat16()` on whatever it is given."""
    model = build_model(nvembed_config(), decoder, seed=0)
    frequencies = model.backbone.rotary_emb.inv_freq.clone()
    wrapped = torch.nn.Sequential(model).bfloat16()
    kept = wrapped[0].backbone.rotary_emb.inv_freq
    assert torch.equal(kept, frequencies)
    assert not torch.equal(frequencies.bfloat16().float(), frequencies)
    assert {p.dtype for p in wrapped.parameters()} == {torch.bfloat16}


def test_causal_and_bidirectional_models_differ(decoder):
    one = build_model(nvembed_config(), decoder, seed=0)
    two = build_model(nvembed_config(mask="causal"), decoder, seed=0)
    assert (embed(one) - embed(two)).abs().max() > 1e-3


def test_instruction_is_seen_though_not_pooled(decoder):
    model = build_model(nvembed_config(pooling=MeanPooling()), decoder, seed=0)
    plain = embed(model, instruction="")
    assert (plain - embed(model)).abs().max() > 1e-3
    tokens = model.tokenizer(TEXTS, "query", [TASK] * 3)
    batch = model.tokenizer.collate(tokens)
    with torch.no_grad():
        states = model.backbone(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    by_hand = torch.stack([s[m].mean(0) for s, m in zip(states, batch["pool_mask"], strict=True)])
    by_hand = by_hand / by_hand.norm(dim=-1, keepdim=True)
    assert torch.allclose(by_hand, embed(model), atol=1e-6)


def test_gradient_checkpointing_changes_no_gradient(decoder):
    def gradients(checkpointing):
        model = build_model(nvembed_config(), decoder, seed=0).train()
        if checkpointing:
            model.recompute_layers()
        torch.manual_seed(3)
        batch = model.tokenizer.collate(model.tokenizer(TEXTS, "document"))
        (model(batch).embeddings @ torch.randn(32)).sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.requires_grad}

    plain, recomputed = gradients(False), gradients(True)
    for name, gradient in plain.items():
        assert torch.allclose(gradient, recomputed[name], atol=1e-6), name
    assert plain["pooling.latents"].abs().max() > 0


def test_merged_weights_equal_the_adapted_model(decoder):
    model = build_model(nvembed_config(), decoder, seed=0)
    plain = build_model(nvembed_config(lora=None), decoder, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    plain.pooling.load_state_dict(model.pooling.state_dict())
    before = embed(plain)
    plain.backbone.load_state_dict(merged_state(model.backbone))
    assert (embed(model) - before).abs().max() > 1e-3
    assert torch.allclose(embed(model), embed(plain), atol=1e-5)  # fp32, other order of sums


def test_adapters_merged_in_place_are_those_of_an_export_and_cost_nothing_more(decoder):
    model = build_model(nvembed_config(), decoder, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.05, generator=torch.Generator().manual_seed(len(name)))
    before, exported = embed(model), merged_state(model.backbone)
    exported = {name: value.clone() for name, value in exported.items()}
    merge_lora(model)
    found = model.backbone.state_dict()
    assert found.keys() == exported.keys()
    assert all(torch.equal(found[name], value) for name, value in exported.items())
    assert not any(hasattr(module, "lora_A") for module in model.modules())
    assert torch.allclose(embed(model), before, atol=1e-5)  # fp32, other order of sums
    merge_lora(model)
    assert all(torch.equal(value, exported[n]) for n, value in model.backbone.state_dict().items())


def test_trainable_state_goes_round_and_is_strict(decoder):
    one, two = (build_model(nvembed_config(), decoder, seed=s) for s in (0, 1))
    state = {n: v.clone() for n, v in trainable_state(one).items()}
    assert all("base_layer" not in n and "embed_tokens" not in n for n in state)
    load_trainable_state(two, state)
    assert torch.equal(embed(one), embed(two))
    untouched = copy.deepcopy(two.state_dict())
    state["other"] = state.pop("pooling.latents")
    with pytest.raises(ArtifactError, match=r"missing 1 \['pooling.latents'\], unexpected 1"):
        load_trainable_state(two, state)
    state["pooling.latents"] = torch.zeros(9, 9)
    del state["other"]
    with pytest.raises(ArtifactError, match=r"'pooling.latents' has the shape \(9, 9\)"):
        load_trainable_state(two, state)
    assert all(torch.equal(v, untouched[n]) for n, v in two.state_dict().items())


def test_unknown_target_module_is_refused(decoder):
    config = nvembed_config(lora=LoraConfig(target_modules=("q_proj", "gateproj")))
    with pytest.raises(ConfigError, match=r"'gateproj'.*did you mean 'gate_proj'"):
        build_model(config, decoder, seed=0)


@pytest.mark.parametrize("pooling", [MeanPooling(), ClsPooling()])
def test_biencoder_pools_what_it_says(tmp_path, pooling):
    folder = save_encoder(tmp_path)
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused", dtype="float32"), pooling=pooling
    )
    model = build_model(config, folder, seed=0)
    assert all(p.requires_grad == ("pooler" not in n) for n, p in model.named_parameters())
    batch = model.tokenizer.collate(model.tokenizer(TEXTS, "document"))
    model.eval()
    with torch.no_grad():
        states = model.backbone(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).last_hidden_state
    for row, length in enumerate(batch["attention_mask"].sum(1)):
        own = states[row, :length]
        expected = own[0] if isinstance(pooling, ClsPooling) else own.mean(0)
        found = embed(model, role="document", instruction="")[row]
        assert torch.allclose(found, expected / expected.norm(), atol=1e-6)


def test_biencoder_takes_lora_too(tmp_path):
    config = BiEncoderConfig(
        backbone=BackboneConfig(path="unused"), lora=LoraConfig(target_modules=("query", "value"))
    )
    model = build_model(config, save_encoder(tmp_path), seed=0)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 2
    assert all("lora_" in name for name in trained)
