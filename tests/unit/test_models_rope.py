"""Base and scaling of rotary position embeddings, by the formula and through a saved model."""

import json

import numpy as np
import pytest
import torch
import transformers
from tiny_models import save_decoder, save_encoder, save_modern_encoder

from rayembed.config.backbone import BackboneConfig
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.models.biencoder.config import BiEncoderConfig
from rayembed.models.loading.backbones import load_backbone
from rayembed.models.loading.build import build_model
from rayembed.models.loading.load import load_model
from rayembed.models.nomic_moe.config import NomicMoeConfig
from rayembed.models.passes.encoding import encode

HEAD, POSITIONS = 8, 128
TEXTS = ["are cats larger than dogs and where do they live", "the quick brown fox"]


def loaded(folder, rope):
    config = parse(BackboneConfig, {"path": "unused", "dtype": "float32", "rope": rope})
    return load_backbone(folder, config, mask="bidirectional")


def angles(base, factor=1.0):
    """Angle of a step in position, of each pair of components."""
    return torch.tensor([base ** (-2 * i / HEAD) / factor for i in range(HEAD // 2)])


def test_angles_follow_the_formula(tmp_path):
    folder = save_decoder(tmp_path, "llama")
    for rope, expected in (
        (None, angles(10_000.0)),
        ({"base": 500_000.0}, angles(500_000.0)),
        ({"factor": 4.0, "scaling": "linear"}, angles(10_000.0, 4.0)),
        ({"base": 2_000.0, "factor": 2.0, "scaling": "linear"}, angles(2_000.0, 2.0)),
    ):
        torch.testing.assert_close(loaded(folder, rope).rotary_emb.inv_freq, expected)


def test_yarn_keeps_the_fastest_and_stretches_the_slowest(tmp_path):
    """A pair that turns over 32 times in a text of pretraining stays; one that never does slows
    down (arXiv 2309.00071, section 3.2)."""
    model = loaded(save_decoder(tmp_path, "llama"), {"base": 1e6, "factor": 4.0})
    plain, found = angles(1e6), model.rotary_emb.inv_freq
    turns = POSITIONS * plain / (2 * torch.pi)
    assert turns[-1] < 1
    torch.testing.assert_close(found[-1], plain[-1] / 4)
    assert (found <= plain + 1e-7).all()
    assert (found >= plain / 4 - 1e-7).all()
    torch.testing.assert_close(found[0], plain[0])
    assert model.config.max_position_embeddings == 4 * POSITIONS


def test_a_scaling_of_pretraining_is_not_replaced(tmp_path):
    folder = save_decoder(tmp_path, "llama")
    path = folder / "config.json"
    settings = json.loads(path.read_text())
    for scaling in (
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "dynamic", "factor": 2.0},
    ):
        rope = {"rope_theta": 10_000.0, **scaling}
        path.write_text(json.dumps({**settings, "rope_parameters": rope}))
        with pytest.raises(ConfigError, match=rf"the scaling '{scaling['rope_type']}' that"):
            loaded(folder, {"factor": 2.0})
        loaded(folder, {"base": 500.0})


def test_states_are_those_of_transformers_own_model(tmp_path):
    folder = save_decoder(tmp_path, "llama")
    model = loaded(folder, {"base": 500.0, "factor": 2.0})
    config = transformers.AutoConfig.from_pretrained(folder)
    config.is_causal = False
    config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 2.0,
        "original_max_position_embeddings": POSITIONS,
    }
    theirs = transformers.AutoModel.from_pretrained(folder, config=config).eval()
    for module in theirs.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = False
    ids = torch.randint(3, 300, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found, expected = (one.eval()(input_ids=ids).last_hidden_state for one in (model, theirs))
        plain = loaded(folder, None).eval()(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, expected)
    assert (found - plain).abs().max() > 1e-3


def test_layers_with_a_window_keep_theirs(tmp_path):
    model = loaded(save_modern_encoder(tmp_path), {"base": 1e6, "factor": 2.0})
    told = model.config.rope_parameters
    assert told["full_attention"]["rope_theta"] == 1e6
    assert told["full_attention"]["factor"] == 2.0
    assert told["sliding_attention"] == {"rope_type": "default", "rope_theta": 10_000.0}


@pytest.mark.parametrize("rope", [{"base": 1e6}, {"factor": 4.0}])
def test_a_saved_model_has_them_and_loads_twice_the_same(tmp_path, rope):
    folder = save_modern_encoder(tmp_path / "pretrained")
    vectors = {}
    for name, asked in (("plain", None), ("rope", rope)):
        backbone = {"path": "given", "dtype": "float32", "rope": asked}
        settings = {"backbone": backbone, "query_max_length": 32, "document_max_length": 32}
        model = build_model(parse(BiEncoderConfig, settings), folder, seed=0)
        vectors[name] = encode(model, TEXTS, role="document")
    model.save(tmp_path / "saved")
    again = load_model(tmp_path / "saved", dtype="float32")
    np.testing.assert_allclose(encode(again, TEXTS, role="document"), vectors["rope"], atol=1e-6)
    again.save(tmp_path / "twice")
    twice = load_model(tmp_path / "twice", dtype="float32")
    np.testing.assert_allclose(encode(twice, TEXTS, role="document"), vectors["rope"], atol=1e-6)
    assert np.abs(vectors["plain"] - vectors["rope"]).max() > 1e-4


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no rotary position embeddings; set it to null"):
        loaded(save_encoder(tmp_path), {"base": 1e6})
    with pytest.raises(ConfigError, match="rope has no effect"):
        parse(BackboneConfig, {"path": "p", "rope": {}})
    with pytest.raises(ConfigError, match="factor"):
        parse(BackboneConfig, {"path": "p", "rope": {"factor": 0.5}})
    nomic = parse(NomicMoeConfig, {"backbone": {"path": "p", "rope": {"base": 1e6}}})
    with pytest.raises(ConfigError, match="rope: a nomic-moe model keeps"):
        build_model(nomic, tmp_path, seed=0)
    written = parse(BackboneConfig, {"path": "p"}).model_dump(mode="json")
    assert "rope" not in written
