import pytest
import torch
import transformers
from tiny_models import DECODERS, save_decoder, save_encoder

from rayembed.config.backbone import BackboneConfig
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.loading.backbones import load_backbone, sees_later_tokens


def settings(**changes):
    return BackboneConfig(path="unused", dtype="float32", **changes)


def states(model, ids, mask=None):
    model.eval()
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask).last_hidden_state


@pytest.mark.parametrize("family", DECODERS)
def test_information_flows_backwards_at_all_distances(tmp_path, family):
    """Sliding windows of 4 in these configurations must not stop it either."""
    folder = save_decoder(tmp_path, family)
    bidirectional = load_backbone(folder, settings(), mask="bidirectional")
    causal = load_backbone(folder, settings(), mask="causal")
    ids = torch.randint(3, 300, (1, 12), generator=torch.Generator().manual_seed(1))
    changed = ids.clone()
    changed[0, -1] += 1
    reach = states(bidirectional, ids) - states(bidirectional, changed)
    assert (reach[0, 0].abs().max() > 1e-4).item()
    assert torch.equal(states(causal, ids)[:, :-1], states(causal, changed)[:, :-1])
    window = getattr(bidirectional.config, "sliding_window", None)
    assert window is None or window >= bidirectional.config.max_position_embeddings


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma2"])
def test_a_window_left_open_would_show(tmp_path, family):
    """The control: with the windows kept, two layers of reach 4 do not see 11 tokens ahead."""
    folder = save_decoder(tmp_path, family, layer_types=["sliding_attention"] * 2)
    config = transformers.AutoConfig.from_pretrained(folder)
    config.is_causal = False
    windowed = transformers.AutoModel.from_pretrained(folder, config=config)
    opened = load_backbone(folder, settings(), mask="bidirectional")
    ids = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(1))
    ids[1, :-1] = ids[0, :-1]
    # Padding makes a mask tensor, so that the windowed model does not fall back on the causal flag.
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[:, -1] = 0
    ids = torch.cat([ids, ids[:, :1]], dim=1)
    first, second = states(windowed, ids, mask)[:, 0]
    assert torch.allclose(first, second, atol=1e-6)
    first, second = states(opened, ids, mask)[:, 0]
    assert not torch.allclose(first, second, atol=1e-4)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("mask", ["bidirectional", "causal"])
def test_right_padding_changes_nothing(tmp_path, family, mask):
    model = load_backbone(save_decoder(tmp_path, family), settings(), mask=mask)
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(2))
    padded = torch.cat([ids, torch.full((1, 5), 2)], dim=1)
    attention = (torch.arange(14) < 9).long()[None]
    difference = states(model, padded, attention)[:, :9] - states(model, ids, attention[:, :9])
    assert difference.abs().max() < 2e-5  # fp32 sums in another order, states of size 1


def test_mask_that_a_family_does_not_have_is_refused(tmp_path):
    folder = save_encoder(tmp_path)
    with pytest.raises(ConfigError, match="family 'bert' always has bidirectional"):
        load_backbone(folder, settings(), mask="causal")
    assert sees_later_tokens(load_backbone(folder, settings(), mask="own"))


def test_dropout_has_the_name_of_its_family_or_is_refused(tmp_path):
    encoder = save_encoder(tmp_path / "bert")
    model = load_backbone(encoder, settings(attention_dropout=0.3, hidden_dropout=0.2), mask="own")
    assert model.config.attention_probs_dropout_prob == 0.3
    rates = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.2, 0.3}
    silent = load_backbone(encoder, settings(), mask="own")
    assert {m.p for m in silent.modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    decoder = save_decoder(tmp_path / "llama", attention_dropout=0.5)
    assert (
        load_backbone(decoder, settings(), mask="causal").layers[0].self_attn.attention_dropout == 0
    )
    with pytest.raises(ConfigError, match="'llama' have no such dropout"):
        load_backbone(decoder, settings(hidden_dropout=0.1), mask="causal")


def test_dtype_cache_and_attention_are_set(tmp_path):
    folder = save_decoder(tmp_path)
    config = BackboneConfig(path="unused", dtype="bfloat16")
    model = load_backbone(folder, config, mask="bidirectional")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.config.use_cache is False
    assert model.config._attn_implementation == "rayembed"


def test_encoders_unused_pooler_is_frozen(tmp_path):
    model = load_backbone(save_encoder(tmp_path), settings(), mask="own")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"pooler.dense.weight", "pooler.dense.bias"}


def test_missing_or_damaged_model_is_refused(tmp_path):
    import safetensors.torch

    with pytest.raises(ArtifactError, match="no transformers model"):
        load_backbone(tmp_path / "nowhere", settings(), mask="own")
    folder = save_decoder(tmp_path / "llama")
    state = safetensors.torch.load_file(folder / "model.safetensors")
    del state["layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"lacks 1 weights, such as 'layers\.1\.mlp\.up_proj"):
        load_backbone(folder, settings(), mask="own")
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0")
    with pytest.raises(ArtifactError, match="cannot load the model"):
        load_backbone(folder, settings(), mask="own")


def test_loading_leaves_the_random_state(tmp_path):
    folder = save_encoder(tmp_path)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_backbone(folder, settings(), mask="own")
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_first_layers_are_those_of_the_whole_model(tmp_path, family, caplog):
    folder = save_decoder(tmp_path / "whole", family, num_hidden_layers=3)
    whole = load_backbone(folder, settings(), mask="bidirectional")
    first = load_backbone(folder, settings(num_layers=2), mask="bidirectional")
    assert len(first.layers) == first.config.num_hidden_layers == 2
    mine, of_whole = first.state_dict(), whole.state_dict()
    assert set(of_whole) - set(mine) == {n for n in of_whole if n.startswith("layers.2.")}
    assert all(torch.equal(value, of_whole[name]) for name, value in mine.items())
    assert not caplog.records  # tables of weights that were left out or not cut


def test_more_layers_than_there_are_are_refused(tmp_path):
    folder = save_decoder(tmp_path / "whole")
    with pytest.raises(ConfigError, match="num_layers is 3, but the model has only 2 layers"):
        load_backbone(folder, settings(num_layers=3), mask="bidirectional")
