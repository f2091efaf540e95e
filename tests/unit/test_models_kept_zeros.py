"""A pruned start: what of it stays zero, what is refused, and adapters that keep its zeros."""

import numpy as np
import pytest
import torch
from pruned import moved_zeros, prune_folder
from tiny_folders import ARCHITECTURES, save_biencoder, save_nvembed, tiny_settings

from rayembed.config.settings import parse
from rayembed.errors import ArtifactError, ConfigError
from rayembed.models.adapters.lora import merged_state
from rayembed.models.loading.build import build_model, check_buildable
from rayembed.models.loading.load import load_model
from rayembed.models.nvembed.config import NVEmbedConfig
from rayembed.models.passes.encoding import encode
from rayembed.models.saving.export import write_compression
from rayembed.recipes.catalogue import get_recipe

TEXTS = ["are cats larger than dogs", "Paris is the capital of France"]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_architecture_notes_the_zeros_of_its_backbone(kind, tmp_path):
    start = prune_folder(ARCHITECTURES[kind](tmp_path / "whole"), tmp_path / "pruned")
    config = tiny_settings(kind, keep_zeros=True)
    folders = dict.fromkeys(config.parts, start)
    check_buildable(config, folders)
    model = build_model(config, folders, seed=1)
    model.eval().save(tmp_path / "saved")
    saved = load_model(tmp_path / "saved")
    state = saved.state_dict()
    moved, number = moved_zeros(start, state)
    noted = {name: zeros for name, zeros in model.kept_zeros.items() if bool(zeros.any())}
    assert moved == 0
    assert sum(int(zeros.sum()) for zeros in noted.values()) == number > 1000
    assert all(not state[name][zeros].any() for name, zeros in noted.items())
    assert not saved.config.keep_zeros, "a setting of training alone"


def lora_model(start, **changes):
    lora = {"rank": 2, "alpha": 4, "dropout": 0.0, "target_modules": ["q_proj", "down_proj"]}
    values = tiny_settings("nvembed", keep_zeros=True).model_dump(mode="json")
    model = build_model(parse(NVEmbedConfig, {**values, "lora": lora, **changes}), start, seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return model.eval()


def test_an_adapted_layer_computes_with_the_weights_that_are_exported(tmp_path):
    start = prune_folder(save_nvembed(tmp_path / "whole"), tmp_path / "pruned")
    model = lora_model(start)
    merged = merged_state(model.backbone)
    name = "layers.1.mlp.down_proj"
    layer, weight = model.backbone.get_submodule(name), merged[f"{name}.weight"]
    zeros = model.kept_zeros[f"backbone.{name}.weight"]
    assert not weight[zeros].any()
    assert (weight != layer.base_layer.weight)[~zeros].all()
    x = torch.randn(3, 5, weight.shape[1])
    # Sums of 48 products of size 1 in another order.
    torch.testing.assert_close(layer(x), x @ weight.T, atol=1e-5, rtol=1e-5)
    free = lora_model(start, keep_zeros=False)
    unmasked = merged_state(free.backbone)[f"{name}.weight"]
    assert unmasked[zeros].all(), "the control: adapters without a mask"
    assert torch.equal(unmasked[~zeros], weight[~zeros])
    model.eval().save(tmp_path / "saved")
    vectors = encode(model, TEXTS, role="query")
    np.testing.assert_allclose(
        encode(load_model(tmp_path / "saved"), TEXTS, role="query"), vectors, atol=1e-5
    )
    assert moved_zeros(start, load_model(tmp_path / "saved").state_dict())[0] == 0


def test_gradients_of_masked_adapters_are_those_of_the_masked_product(tmp_path):
    start = prune_folder(save_nvembed(tmp_path / "whole"), tmp_path / "pruned")
    layer = lora_model(start).backbone.layers[0].self_attn.q_proj
    x = torch.randn(4, 32)
    layer(x).square().sum().backward()
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    found = down.grad, up.grad
    a, b = (one.detach().clone().requires_grad_() for one in (down, up))
    weight = layer.base_layer.weight.detach()
    ((x @ (weight + 2.0 * (weight != 0) * (b @ a)).T).square().sum()).backward()
    for one, expected in zip(found, (a.grad, b.grad), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-3)  # gradients of size 100


def test_a_start_that_was_not_pruned_is_refused_before_weights_are_read(tmp_path):
    whole = save_biencoder(tmp_path / "whole")
    config = tiny_settings("biencoder", keep_zeros=True)
    with pytest.raises(ConfigError, match=r"keep_zeros.*was not pruned.*compression\.json"):
        check_buildable(config, whole)
    write_compression(whole, {"settings": {"kind": "int8"}})
    with pytest.raises(ConfigError, match="was not pruned"):
        check_buildable(config, whole)
    write_compression(whole, {"matrices": ["backbone.nowhere.weight"]})
    with pytest.raises(ArtifactError, match=r"'backbone\.nowhere\.weight'.*does not have"):
        check_buildable(config, whole)
    write_compression(whole, {"matrices": ["backbone.encoder.layer.0.output.dense.weight"]})
    check_buildable(config, whole)
    with pytest.raises(ArtifactError, match="hold no zero"):
        build_model(config, whole, seed=1)


def test_the_setting_is_part_of_a_runs_identity():
    run = get_recipe("biencoder-quickstart")
    keeping = run.model.model_copy(update={"keep_zeros": True})
    assert run.model_copy(update={"model": keeping}).fingerprint != run.fingerprint


def test_a_pruned_head_is_kept_where_the_run_takes_it_from_the_start(tmp_path):
    start = save_nvembed(tmp_path / "whole")
    model = load_model(start)
    name = next(n for n, p in model.head.named_parameters() if p.ndim == 2)
    with torch.no_grad():
        dict(model.head.named_parameters())[name][:, ::2] = 0.0
    model.save(tmp_path / "pruned")
    write_compression(tmp_path / "pruned", {"matrices": [f"pooling.{name}"]})
    config = tiny_settings("nvembed", keep_zeros=True)
    kept = build_model(config, tmp_path / "pruned", seed=9).kept_zeros
    assert list(kept) == [f"pooling.{name}"]
    assert kept[f"pooling.{name}"][:, ::2].all()
    other = {"kind": "latent_attention", "num_latents": 8, "num_heads": 2}
    values = {**config.model_dump(mode="json"), "pooling": other}
    with pytest.raises(ConfigError, match="was not pruned"):  # the head starts fresh
        check_buildable(parse(NVEmbedConfig, values), tmp_path / "pruned")
