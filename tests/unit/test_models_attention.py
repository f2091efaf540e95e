import pytest
import torch
from tiny_models import DECODERS, save_decoder, save_encoder
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from rayembed.config.backbone import BackboneConfig
from rayembed.models.attention import short_texts as room
from rayembed.models.attention.short_texts import attention
from rayembed.models.loading.backbones import load_backbone

SDPA = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
ROWS, HEADS, LENGTH, WIDTH = 5, 4, 7, 8


class Layer(nn.Module):
    """What transformers hands over as `module`."""

    def __init__(self, is_causal):
        super().__init__()
        self.is_causal = is_causal


def made(seed=0, key_heads=HEADS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)

    def one(heads):
        values = torch.randn(ROWS, heads, LENGTH, WIDTH, generator=generator)
        return (1.5 * values).to(dtype).requires_grad_()

    return one(HEADS), one(key_heads), one(key_heads)


def visible():
    """Right padding of other lengths, text by text."""
    lengths = torch.tensor([7, 5, 3, 6, 1])
    return (torch.arange(LENGTH) < lengths[:, None])[:, None, None, :]


def with_gradients(output, inputs):
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    return [output, *torch.autograd.grad((output.double() * weights).sum(), inputs)]


def refuse(*_, **__):
    raise AssertionError("went to SDPA")


@pytest.fixture(autouse=True)
def sdpa_is_not_called(monkeypatch):
    monkeypatch.setattr(SDPA, refuse)
    # Groups of two texts: five texts make two whole ones and a rest.
    monkeypatch.setattr(room, "_SCORES_OF_GROUP", 2 * HEADS * LENGTH * LENGTH)


@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "padding of all", "added"])
def test_values_and_gradients_are_those_of_sdpa(key_heads, scaling, mask):
    query, key, value = inputs = made(key_heads=key_heads)
    given = {
        "padding": visible().expand(-1, 1, LENGTH, -1),
        "padding of all": visible()[1:2],
        "added": torch.randn(ROWS, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(3)),
    }.get(mask)
    output, weights = attention(
        Layer(mask == "causal"), query, key, value, given, scaling=scaling, sliding_window=None
    )
    assert weights is None
    expected = scaled_dot_product_attention(
        query, key, value, given, scale=scaling, is_causal=mask == "causal", enable_gqa=True
    )
    ours = with_gradients(output, inputs)
    theirs = with_gradients(expected.transpose(1, 2), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-5, rtol=1e-5)


def test_causality_of_the_call_overrules_the_layers():
    query, key, value = made()
    seen = attention(Layer(True), query, key, value, None, is_causal=False)[0]
    causal = attention(Layer(False), query, key, value, None, is_causal=True)[0]
    assert torch.allclose(seen[:, -1], causal[:, -1], atol=1e-6)
    assert (seen[:, 0] - causal[:, 0]).abs().max() > 0.1


def test_bfloat16_is_at_least_as_exact_as_sdpas():
    inputs = made(dtype=torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = with_gradients(scaled_dot_product_attention(*exact).transpose(1, 2), exact)
    ours = with_gradients(attention(Layer(False), *inputs, None)[0], inputs)
    theirs = with_gradients(scaled_dot_product_attention(*inputs).transpose(1, 2), inputs)
    assert ours[0].dtype == ours[1].dtype == torch.bfloat16
    for mine, other, right in zip(ours, theirs, wanted, strict=True):
        assert (mine - right).norm() < 1.05 * (other - right).norm()


def test_a_text_with_nothing_to_see_stays_finite():
    inputs = made()
    mask = visible().expand(-1, 1, LENGTH, -1).clone()
    mask[2] = False
    for found in with_gradients(attention(Layer(False), *inputs, mask)[0], inputs):
        assert torch.isfinite(found).all()


def test_dropout_drops_weights_and_keeps_the_mean():
    query, key, _ = made()
    # With one-hot values the output shows the attention weights themselves.
    value = torch.eye(LENGTH, WIDTH).expand(ROWS, HEADS, -1, -1)
    whole = attention(Layer(False), query, key, value, None)[0]
    torch.manual_seed(0)
    drawn = torch.stack(
        [attention(Layer(False), query, key, value, None, dropout=0.25)[0] for _ in range(400)]
    )
    dropped = (drawn[..., :LENGTH] == 0).float().mean()
    assert abs(dropped - 0.25) < 0.01
    assert torch.allclose(drawn.mean(0), whole, atol=0.1)


def test_long_texts_evaluation_and_cached_keys_go_to_sdpa(monkeypatch):
    query, key, value = made()
    calls = []
    monkeypatch.setattr(SDPA, lambda *given, **_: calls.append(given) or (query, None))
    attention(Layer(False), query, key, value, None)
    assert not calls
    attention(Layer(False).eval(), query, key, value, None)
    attention(Layer(False), query[:, :, :1], key, value, None)
    attention(Layer(False), query, key, value, None, position_bias=torch.zeros(1))
    attention(Layer(False), query, key, value, torch.ones(LENGTH, LENGTH, dtype=torch.bool))
    attention(Layer(False), query[:0], key[:0], value[:0], None)
    monkeypatch.setattr(room, "_SCORES_OF_TEXT", HEADS * LENGTH * LENGTH - 1)
    attention(Layer(False), query, key, value, None)
    monkeypatch.setattr(room, "_SCORES_OF_TEXT", 1 << 18)
    monkeypatch.setattr(room, "_SCORES_KEPT", ROWS * HEADS * LENGTH * LENGTH - 1)
    attention(Layer(False), query, key, value, None)
    assert len(calls) == 7


@pytest.mark.parametrize(
    ("family", "mask"),
    [("bert", "own"), *((f, m) for f in DECODERS for m in ("bidirectional", "causal"))],
)
def test_models_train_as_with_sdpa(tmp_path, family, mask, monkeypatch):
    """Padded micro-batches and whole ones, whose masks transformers makes differently."""
    monkeypatch.undo()
    folder = save_encoder(tmp_path) if family == "bert" else save_decoder(tmp_path, family)
    config = BackboneConfig(path="unused", dtype="float32")
    model = load_backbone(folder, config, mask=mask).train()
    assert model.config._attn_implementation == room.NAME
    ids = torch.randint(5, 100, (5, 12), generator=torch.Generator().manual_seed(1))
    for padded in (True, False):
        seen = torch.ones(5, 12, dtype=torch.int64)
        if padded:
            seen[1, 8:] = seen[3, 2:] = 0
        found = []
        for name in (room.NAME, "sdpa"):
            model.set_attn_implementation(name)
            monkeypatch.undo()
            if name == room.NAME:
                monkeypatch.setattr(SDPA, refuse)
                monkeypatch.setattr(room, "_SCORES_OF_GROUP", 3000)
            model.zero_grad()
            states = model(input_ids=ids, attention_mask=seen).last_hidden_state
            # A causal model's padding attends to nothing that counts; only tokens are compared.
            (states * seen[..., None]).square().sum().backward()
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            found.append([states.detach() * seen[..., None], *gradients])
        assert len(found[0]) > 10
        for mine, other in zip(*found, strict=True):
            assert (mine - other).norm() <= 1e-4 * other.norm() + 1e-5
