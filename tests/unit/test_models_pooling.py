import pytest
import torch

from rayembed.config.backbone import (
    ClsPooling,
    EosPooling,
    LatentAttentionPooling,
    MeanPooling,
    SelfAttentionPooling,
)
from rayembed.errors import ConfigError
from rayembed.models.nvembed.pooling import build_pooling
from rayembed.models.pooling import masked_mean

HIDDEN = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 9.0]], [[7.0, 1.0], [2.0, 2.0], [8.0, 8.0]]])
ATTENTION = torch.tensor([[1, 1, 1], [1, 1, 0]])
POOL = torch.tensor([[False, True, True], [True, True, False]])


def random_batch(size=32, dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 7, size, generator=g).to(dtype)
    attention = (torch.arange(7) < torch.tensor([[7], [4], [6]])).long()
    pool = attention.bool().clone()
    pool[0, :2] = False
    return hidden, attention, pool


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MeanPooling(), [[4.0, 6.5], [4.5, 1.5]]),
        (ClsPooling(), [[1.0, 2.0], [7.0, 1.0]]),
        (EosPooling(), [[5.0, 9.0], [2.0, 2.0]]),
    ],
)
def test_simple_pooling_by_hand(config, expected):
    pooling = build_pooling(config, 2)
    assert pooling(HIDDEN, ATTENTION, POOL).tolist() == expected
    assert pooling(HIDDEN.bfloat16(), ATTENTION, POOL).dtype == torch.float32


def test_mean_of_many_bfloat16_states_is_summed_in_float32():
    hidden = torch.ones(1, 4096, 1, dtype=torch.bfloat16)
    hidden[0, :2048] = 3.0
    mask = torch.ones(1, 4096, dtype=torch.bool)
    assert masked_mean(hidden, mask).item() == 2.0
    # The control: bfloat16 holds 8 bits, and 4096 addends of this size need 13.
    summed = torch.zeros((), dtype=torch.bfloat16)
    for value in hidden[0, :, 0]:
        summed = summed + value
    assert summed.item() / 4096 < 1.0


LAYERS = [
    LatentAttentionPooling(num_latents=5, num_heads=2),
    LatentAttentionPooling(num_latents=5, num_heads=2, head_dim=6, mlp_ratio=2),
    LatentAttentionPooling(num_latents=5, num_heads=2, form="paper"),
    SelfAttentionPooling(num_heads=4),
]


@pytest.mark.parametrize("config", LAYERS)
def test_padding_and_what_is_out_of_the_pool(config):
    torch.manual_seed(0)
    pooling = build_pooling(config, 32)
    hidden, attention, pool = random_batch()
    found = pooling(hidden, attention, pool)
    other = hidden.clone()
    other[1, 4:] = 99.0  # padding
    assert torch.allclose(pooling(other, attention, pool), found, atol=1e-6)
    alone = pooling(hidden[1:2, :4], attention[1:2, :4], pool[1:2, :4])
    assert torch.allclose(alone, found[1:2], atol=1e-6)
    other = hidden.clone()
    other[0, 0] = -other[0, 0]  # instruction: seen by self-attention alone
    changed = (pooling(other, attention, pool) - found).abs().max() > 1e-7
    assert changed == isinstance(config, SelfAttentionPooling)


@pytest.mark.parametrize("config", LAYERS)
def test_gradients_reach_every_parameter_from_the_start(config):
    torch.manual_seed(0)
    pooling = build_pooling(config, 32)
    hidden, attention, pool = random_batch()
    out = pooling(hidden, attention, pool)
    (out * torch.randn(out.shape)).sum().backward()
    for name, parameter in pooling.named_parameters():
        assert parameter.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("config", [LAYERS[0], LAYERS[1], LAYERS[3]])
def test_training_starts_close_to_mean_pooling(config):
    torch.manual_seed(0)
    pooling = build_pooling(config, 32)
    hidden, attention, pool = random_batch()
    mean = masked_mean(hidden, pool)
    cosine = torch.nn.functional.cosine_similarity(pooling(hidden, attention, pool), mean)
    assert cosine.min() > 0.999
    with torch.no_grad():  # the control: the usual initialisation of the output projections
        for module in pooling.modules():
            if isinstance(module, torch.nn.Linear):
                module.reset_parameters()
    cosine = torch.nn.functional.cosine_similarity(pooling(hidden, attention, pool), mean)
    assert cosine.min() < 0.999


def test_latent_attention_has_the_published_names():
    names = set(build_pooling(LAYERS[0], 32).state_dict())
    p = "cross_attend_blocks."
    assert names == {
        "latents",
        *(f"{p}0.{n}.{k}" for n in ("norm", "norm_context") for k in ("weight", "bias")),
        *(f"{p}0.fn.{n}.weight" for n in ("to_q", "to_kv", "to_out")),
        *(f"{p}1.{n}.{k}" for n in ("norm", "fn.net.0", "fn.net.2") for k in ("weight", "bias")),
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (SelfAttentionPooling(num_heads=7), r"num_heads is 7.*hidden size 32; allowed: \[1, 2, 4"),
        (LatentAttentionPooling(num_heads=7, form="paper"), "num_heads is 7"),
        (LatentAttentionPooling(num_heads=4, head_dim=32, form="paper"), "set head_dim to null"),
    ],
)
def test_heads_that_do_not_fit_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build_pooling(config, 32)
