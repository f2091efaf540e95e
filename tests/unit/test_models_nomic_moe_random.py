"""Experts that are drawn anew: which weights are, by which seed and how large, and which stay."""

import json
import shutil

import pytest
import torch
from tiny_models import save_encoder, save_nomic

from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.models.loading.build import build_model
from rayembed.models.nomic_moe.config import NomicMoeConfig

EXPERTS = {"num_experts": 4, "top_k": 2}
DRAWN = ("encoder.layers.1.mlp.experts.mlp.w1", "encoder.layers.1.mlp.experts.mlp.w2")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("bert") / "bert")


def encoder_of(folder, start, *, seed=0, dtype="float32"):
    settings = {
        "backbone": {"path": "given", "dtype": dtype},
        "experts": None if start is None else EXPERTS | {"start": start},
        "query_max_length": 40,
        "document_max_length": 48,
    }
    return build_model(parse(NomicMoeConfig, settings), folder, seed=seed).backbone


def weights_of(folder, start, **settings):
    return encoder_of(folder, start, **settings).state_dict()


def same(one, other):
    return {name for name in one.keys() & other.keys() if torch.equal(one[name], other[name])}


def test_experts_are_drawn_by_the_seed_and_nothing_else_is(bert):
    first, again = weights_of(bert, "random"), weights_of(bert, "random")
    assert same(first, again) == first.keys()
    other = weights_of(bert, "random", seed=1)
    router = "encoder.layers.1.mlp.router.layer.weight"
    assert first.keys() - same(first, other) == {*DRAWN, router}
    dense = weights_of(bert, None)
    kept = {name for name in dense if not name.startswith("encoder.layers.1.mlp.")}
    assert same(first, dense) == kept
    assert {"emb_ln.weight", "encoder.layers.1.attn.Wqkv.weight"} < kept
    # Control: copied experts depend on no seed.
    copied, others = (weights_of(bert, "preserving", seed=seed) for seed in (0, 1))
    assert copied.keys() - same(copied, others) == {router}


def test_all_but_the_experts_is_as_with_copied_ones(bert):
    drawn, copied = weights_of(bert, "random"), weights_of(bert, "preserving")
    assert drawn.keys() == copied.keys()
    biases = {f"encoder.layers.1.mlp.experts.{name}" for name in ("mlp.b1", "bias")}
    assert drawn.keys() - same(drawn, copied) == {*DRAWN, *biases}
    assert not any(drawn[name].any() for name in biases)
    for name in DRAWN:
        each = [drawn[name].chunk(4), copied[name].chunk(4)]
        assert not torch.equal(each[0][0], each[0][1])
        assert torch.equal(each[1][0], each[1][1])


@pytest.mark.parametrize(("stated", "expected"), [(0.05, 0.05), (None, 0.02)])
def test_they_are_as_large_as_the_start_model_says(bert, tmp_path, stated, expected):
    folder = tmp_path / "bert"
    shutil.copytree(bert, folder)
    settings = json.loads((folder / "config.json").read_text())
    del settings["initializer_range"]
    if stated is not None:
        settings["initializer_range"] = stated
    (folder / "config.json").write_text(json.dumps(settings))
    drawn = weights_of(folder, "random")
    # 6,144 numbers: the standard error is 1 %. Outputs are scaled by E / k = 2.
    for name, size in zip(DRAWN, (expected, 2 * expected), strict=True):
        assert drawn[name].std().item() == pytest.approx(size, rel=0.04)
        assert drawn[name].mean().item() == pytest.approx(0.0, abs=0.06 * size)


def test_the_mixture_is_of_the_size_of_one_dense_layer_with_such_weights(bert):
    encoder = encoder_of(bert, "random")
    x = torch.nn.functional.layer_norm(torch.randn(4000, 32), (32,))
    layer = encoder.encoder.layers[1].mlp
    found = layer(x, torch.ones(len(x))).output.detach()
    generator = torch.Generator().manual_seed(1)
    fc1, fc2 = (torch.randn(size, generator=generator) * 0.02 for size in ((48, 32), (32, 48)))
    dense = torch.nn.functional.gelu(x @ fc1.T) @ fc2.T
    # The mean of k = 2 independent outputs is smaller than one of them by the root of 2.
    assert (found.std() / dense.std()).item() == pytest.approx(0.5**0.5, rel=0.2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_are_drawn_before_they_are_rounded(bert, dtype):
    drawn, exact = weights_of(bert, "random", dtype=dtype), weights_of(bert, "random")
    for name in DRAWN:
        assert drawn[name].dtype == getattr(torch, dtype)
        assert torch.equal(drawn[name], exact[name].to(drawn[name].dtype))


def test_a_start_with_experts_keeps_them_whatever_stands_there(tmp_path):
    folder = save_nomic(tmp_path / "nomic")
    first = weights_of(folder, "preserving")
    for start in ("released", "random"):
        assert same(first, weights_of(folder, start)) == first.keys()


def test_another_start_is_refused(bert):
    with pytest.raises(ConfigError, match=r"experts\.start.*'preserving', 'released' or 'random'"):
        weights_of(bert, "scratch")
