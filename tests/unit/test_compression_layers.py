"""Fewer layers of every architecture: which are kept, their weights, and what is refused."""

import numpy as np
import pytest
import torch
from tiny_folders import TINY, save_tiny
from tiny_models import save_decoder, save_modern_encoder

from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.models.layers import layers_of
from rayembed.models.loading.load import load_model
from rayembed.models.passes.encoding import encode
from rayembed.models.saving.export import read_compression
from rayembed_extras.compression.contract import CompressionSource
from rayembed_extras.compression.layers import Layers, evenly_spaced

TEXTS = ["are cats larger than dogs", "Paris is the capital of France"]


def test_layers_are_evenly_spaced_and_of_the_right_kind():
    def any_kind(layer, place):
        return True

    def alternating(layer, place):
        return layer % 2 == place % 2

    assert evenly_spaced(12, 6, any_kind) == [0, 2, 4, 7, 9, 11]
    assert evenly_spaced(12, 3, any_kind) == [0, 5, 11]
    assert evenly_spaced(4, 1, any_kind) == [0]
    assert evenly_spaced(12, 6, alternating) == [0, 3, 4, 7, 8, 11]
    assert evenly_spaced(24, 12, alternating)[::11] == [0, 23]
    with pytest.raises(ConfigError, match="no layer of the kind"):
        evenly_spaced(3, 2, lambda layer, place: place == 0)


@pytest.mark.parametrize("kind", TINY)
def test_kept_layers_are_those_of_the_whole_model(kind, tmp_path):
    whole = save_tiny(kind, tmp_path / "whole")
    before = load_model(whole)
    number = len(layers_of([before.backbone]))
    way = Layers(which=(0,)) if number == 2 else Layers(share=0.5)
    way.check(whole)
    told = way.compress(CompressionSource(whole), tmp_path / "small")
    after = load_model(tmp_path / "small")
    assert len(layers_of([after.backbone])) == max(1, number // 2)
    first = zip(*(layers_of([m.backbone])[0].parameters() for m in (before, after)), strict=True)
    assert all(torch.equal(*pair) for pair in first)
    gone = sum(p.numel() for p in before.parameters()) - sum(p.numel() for p in after.parameters())
    assert (told.compressed, told.weights) == (gone, sum(p.numel() for p in before.parameters()))
    assert gone > 0
    assert read_compression(tmp_path / "small")["settings"]["kind"] == "layers"
    vectors = [encode(model, TEXTS, role="document") for model in (before, after)]
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3, "the control: layers matter"


def test_the_vectors_are_those_of_the_kept_layers_by_hand(tmp_path):
    folder = save_modern_encoder(tmp_path / "modern")  # its three layers attend differently
    Layers(which=(0, 2)).compress(CompressionSource(folder), tmp_path / "small")
    model = load_model(folder)
    ids = torch.tensor([[2, 20, 21, 22, 23, 24, 25, 26, 27, 3]])
    seen = []
    hook = model.backbone.layers[1].register_forward_hook(
        lambda module, given, made: (given[0], *made[1:]) if isinstance(made, tuple) else given[0]
    )
    seen.append(model.backbone(input_ids=ids).last_hidden_state)
    hook.remove()
    small = load_model(tmp_path / "small").backbone
    assert torch.equal(small(input_ids=ids).last_hidden_state, seen[0])
    assert small.config.layer_types == [model.backbone.config.layer_types[i] for i in (0, 2)]


def test_kinds_of_layers_go_with_their_layers(tmp_path):
    folder = save_decoder(tmp_path / "gemma", "gemma3_text", num_hidden_layers=8)
    Layers(number=3).compress(CompressionSource(folder), tmp_path / "small")
    kinds = load_model(folder).backbone.config.layer_types
    small = load_model(tmp_path / "small").backbone.config
    assert small.layer_types == [kinds[layer] for layer in (0, 3, 7)]


def test_what_cannot_be_cut_is_refused_before_work(tmp_path):
    folder = save_tiny("nomic-moe", tmp_path / "moe")
    for way, told in (
        (Layers(number=2), "has 2 layers"),
        (Layers(which=(0, 7)), r"asked for \(0, 7\)"),
        (Layers(which=(1,)), "layers of another kind"),
        (Layers(number=1, part="encoder"), "names 'encoder'"),
    ):
        with pytest.raises(ConfigError, match=told):
            way.check(folder)
    for values in ({}, {"share": 0.5, "number": 3}, {"which": [3, 1]}):
        with pytest.raises(ConfigError, match="layers"):
            parse(Layers, values)
