"""FlashAttention 3 is switched on where it is there and right, and SDPA with dropout goes past it.

Its registration is faked: no GPU, and no package of it, is needed.
"""

import logging

import pytest
import torch
from torch.nn import attention as of_torch
from torch.nn.attention import _registry

from rayembed.machine.hardware import say_once
from rayembed.models.attention import short_texts as attention
from rayembed.models.attention import unpadded, varlen
from rayembed.models.attention.varlen import reference, settled_kernel

CPU = torch.device("cpu")


class Gpu:
    """Stands for a device in questions; tensors of the trial stay on the CPU."""

    type = "cuda"


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A Hopper with FlashAttention 3, whose kernel is the reference; what was done, in order."""
    done = []

    class Handle:
        def remove(self):
            done.append("restored")

    def register():
        done.append("activated")
        return Handle()

    def kernel(query, key, value, cu_q, cu_k, *longest, scale, window_size, enable_gqa):
        done.append(str(query.dtype))
        return reference(query, key, value, cu_q, cu_k, longest, window_size, scale)

    (tmp_path / "flash_attn_interface.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    difference = varlen._difference
    monkeypatch.setattr(varlen, "_difference", lambda device: difference(CPU))
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", None)
    settled_kernel.cache_clear()
    yield done
    settled_kernel.cache_clear()


def test_it_is_activated_once_on_a_hopper_and_tried(hopper):
    device = Gpu()
    assert settled_kernel(device) == "FlashAttention 3"
    assert hopper == ["activated", *["torch.bfloat16"] * 9]
    assert of_torch.current_flash_attention_impl() == "FA3"
    settled_kernel(device)
    assert settled_kernel(Gpu()) == "FlashAttention 3", "another device of the process"
    assert hopper.count("activated") == 1


def test_it_is_tried_with_gradients_where_a_model_is_in_use(hopper):
    with torch.inference_mode():
        assert settled_kernel(Gpu()) == "FlashAttention 3"


def test_other_gpus_and_cpus_get_none(hopper, monkeypatch):
    assert settled_kernel(CPU) == "plain torch"
    for capability in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        assert settled_kernel(Gpu()) == "FlashAttention 2"
    assert hopper == []


def test_without_its_package_or_in_a_torch_without_it_nothing_is_activated(hopper, monkeypatch):
    monkeypatch.setattr(varlen, "find_spec", lambda name: None)
    told = "FlashAttention 2 (flash_attn_interface of FlashAttention 3 is not installed)"
    assert settled_kernel(Gpu()) == told
    monkeypatch.delitem(_registry._FLASH_ATTENTION_IMPLS, "FA3")
    assert settled_kernel(Gpu()) == "FlashAttention 2 (torch has no FlashAttention 3)"
    assert hopper == []


def test_a_package_that_does_not_load_leaves_what_was_there(hopper, monkeypatch):
    def register():
        raise ImportError("undefined symbol: cudaX\nmore")

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    told = "FlashAttention 2 (FlashAttention 3 fails: undefined symbol: cudaX)"
    assert settled_kernel(Gpu()) == told
    assert of_torch.current_flash_attention_impl() is None


def test_memory_that_runs_out_in_the_trial_says_nothing_of_the_kernel(hopper, monkeypatch):
    """Else FlashAttention 2 would stay for as long as the process lives."""
    full = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")

    def fails(_):
        raise full

    with monkeypatch.context() as once:
        once.setattr(varlen, "_difference", fails)
        with pytest.raises(RuntimeError, match="ALLOC_FAILED"):
            settled_kernel(Gpu())
        assert of_torch.current_flash_attention_impl() is None
    assert settled_kernel(Gpu()) == "FlashAttention 3"


@pytest.mark.parametrize(("factor", "told"), [(1.2, "0.2"), (float("nan"), "nan")])
def test_a_kernel_that_is_wrong_is_switched_off_again(hopper, monkeypatch, factor, told):
    right = torch.nn.attention.varlen.varlen_attn
    wrong = lambda *given, **named: right(*given, **named) * factor  # noqa: E731 - one line
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
    expected = f"FlashAttention 2 (FlashAttention 3 differs by {told} of the norm)"
    assert settled_kernel(Gpu()) == expected
    assert hopper == ["activated", *["torch.bfloat16"] * 9, "restored"]
    assert of_torch.current_flash_attention_impl() is None


@pytest.mark.parametrize(("width", "window"), [(128, (-1, -1)), (64, (-1, 0)), (256, (16, 16))])
def test_a_build_that_lacks_a_width_or_a_mask_is_switched_off_again(
    hopper, monkeypatch, width, window
):
    right = torch.nn.attention.varlen.varlen_attn

    def lacking(query, *given, **named):
        if query.shape[-1] == width and named["window_size"] == window:
            raise RuntimeError("not built")
        return right(query, *given, **named)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lacking)
    assert settled_kernel(Gpu()) == "FlashAttention 2 (FlashAttention 3 fails: not built)"
    assert of_torch.current_flash_attention_impl() is None


def test_wrong_gradients_are_seen_too(hopper, monkeypatch):
    right = torch.nn.attention.varlen.varlen_attn

    def wrong(query, key, value, *given, **named):
        value = value.detach() + (value - value.detach()) * 2
        return right(query, key, value, *given, **named)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
    assert "differs by 1 of the norm" in settled_kernel(Gpu())


def test_one_that_somebody_else_switched_on_stays(hopper, monkeypatch):
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA4", hopper.append)
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", ("FA4", None))
    assert settled_kernel(Gpu()) == "FlashAttention 4"
    assert hopper == []


def test_the_log_names_the_kernel_of_packed_texts(hopper, monkeypatch, caplog):
    class Model:
        unpadded = "auto"

        def parameters(self):
            yield type("Weight", (), {"device": Gpu()})

    monkeypatch.setattr(unpadded, "_why_padded", lambda model: None)
    say_once.cache_clear()
    with caplog.at_level(logging.INFO):
        assert unpadded.packs(Model())
    assert "texts are packed: attention without padding by FlashAttention 3" in caplog.text


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("active", [None, ("FA3", None)])
def test_dropout_goes_past_a_flash_kernel_that_has_none(monkeypatch, dropout, active):
    monkeypatch.setattr(_registry, "_FLASH_ATTENTION_ACTIVE", active)
    seen = []
    original = torch.nn.functional.scaled_dot_product_attention

    def sdpa(*given, **named):
        seen.append((named["dropout_p"], torch.backends.cuda.flash_sdp_enabled()))
        return original(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    inputs = [torch.ones(2, 4, 5, 8) for _ in range(3)]
    layer = torch.nn.Identity().eval()  # products are of training
    attention.attention(layer, *inputs, None, dropout=dropout, is_causal=False)
    assert seen == [(dropout, not (dropout and active))]
    assert torch.backends.cuda.flash_sdp_enabled()
