"""Softmax attention within concatenated texts, without padding.

On CUDA by the kernel of `torch.nn.attention.varlen`, which is FlashAttention 2, or on Hopper
FlashAttention 3 where it is installed; elsewhere by a reference in plain torch, which is slow and
takes every number type.

B texts, T tokens of their queries and K of their keys, H heads, G key heads, D head width.
"""

from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rayembed.machine.hardware import ran_out

_WIDTHS = 8
"""Head widths of the kernel are multiples of this number."""

_WIDEST = 256
_WIDEST_ON_SMALL_GPUS = 192
"""Maximum head width of its backward pass; smaller shared memory than a data centre's GPUs have
holds less."""

_LARGE_GPUS = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities of A100, H100 and B200."""

_FLASH_3 = "FA3"
_FLASH_3_MODULE = "flash_attn_interface"
"""Name of FlashAttention 3 in torch's registry, and the module from which that takes it."""
_HOPPER = 9

_TRIED = [70, 1, 128]
"""Tokens of the texts on which FlashAttention 3 is tried."""
_TRIED_WIDTHS, _TRIED_SIDES = (64, 128, 256), ((-1, -1), (-1, 0), (16, 16))
"""Head widths, and keys seen to either side: builds may lack some, which would show in training."""
_TOLERANCE = 0.05
"""Largest difference, as a share of the norm of its outputs and gradients, in bfloat16."""


def varlen_attention(
    query: Float[Tensor, "T H D"],
    key: Float[Tensor, "K G D"],
    value: Float[Tensor, "K G D"],
    cu_queries: Int[Tensor, " texts"],
    cu_keys: Int[Tensor, " texts"],
    longest: tuple[int, int],
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
) -> Float[Tensor, "T H D"]:
    """Attention of each text's queries to the same text's keys, in the queries' dtype.

    G key heads serve H / G heads each, without copies on CUDA.

    Args:
        cu_queries: (B + 1,) int32 cumulative numbers of queries, from 0 to T.
        cu_keys: (B + 1,) int32 cumulative numbers of keys.
        longest: maximum queries and keys of a text.
        causal: whether a query sees no later key; queries and keys of a text then are as many.
        window: number of keys that a query sees to either side, itself included; None: all.
        scale: of the products; None: D ** -0.5.

    Raises:
        ValueError: on CUDA, a number type, a head width or a GPU without a kernel.
    """
    near = -1 if window is None else window - 1
    sides = (near, 0 if causal else near)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    compute = _kernel if query.device.type == "cuda" else reference
    return compute(query, key, value, cu_queries, cu_keys, longest, sides, scale)


@lru_cache
def settled_kernel(device: torch.device) -> str:
    """Choose the attention kernel for packed texts on a device; return its name, with the reason if
    FlashAttention 3 cannot be used on a Hopper GPU.

    Switches the process to FlashAttention 3 where that is installed and right, which SDPA then
    takes as well; see `attention._kernels_with_dropout`. One that was switched on before stays.
    """
    from torch.nn import attention

    if device.type != "cuda":
        return "plain torch"
    if (active := attention.current_flash_attention_impl()) is not None:
        return active.replace("FA", "FlashAttention ")
    if torch.cuda.get_device_capability(device)[0] != _HOPPER:
        return "FlashAttention 2"
    reason = _why_not_flash_3(device)
    return "FlashAttention 3" if reason is None else f"FlashAttention 2 ({reason})"


def _why_not_flash_3(device: torch.device) -> str | None:
    """Switch to FlashAttention 3 and test it; if it is missing or wrong, switch back and return the
    reason.
    """
    from torch.nn import attention

    if _FLASH_3 not in attention.list_flash_attention_impls():
        return "torch has no FlashAttention 3"
    if find_spec(_FLASH_3_MODULE) is None:
        return f"{_FLASH_3_MODULE} of FlashAttention 3 is not installed"
    try:
        attention.activate_flash_attention_impl(_FLASH_3)
        off = _difference(device)
    except Exception as error:  # builds fail in their own ways; the other one is there
        if ran_out(error):  # of the device, and nothing of the build
            if attention.current_flash_attention_impl() is not None:
                attention.restore_flash_attention_impl()
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        reason = f"FlashAttention 3 fails: {said}"
    else:
        if off <= _TOLERANCE:
            return None
        reason = f"FlashAttention 3 differs by {off:.1g} of the norm"
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    return reason


def _difference(device: torch.device) -> float:
    """Return the largest difference of the kernel's outputs and gradients from the reference's, for
    head widths and masks that some builds lack.
    """
    cases = [(width, sides) for width in _TRIED_WIDTHS for sides in _TRIED_SIDES]
    found = torch.tensor([_difference_of(device, *case) for case in cases])
    return float(found.max())


def _difference_of(device: torch.device, width: int, sides: tuple[int, int]) -> float:
    draw = torch.Generator().manual_seed(0)
    heads = (4, 2, 2, 4)  # of queries, keys, values, and gradients of what comes out
    found = []
    with torch.inference_mode(mode=False), torch.enable_grad():
        drawn = [torch.randn(sum(_TRIED), number, width, generator=draw) for number in heads]
        *inputs, weights = (x.to(device, torch.bfloat16) for x in drawn)
        ends = torch.tensor([0, *_TRIED]).cumsum(0).to(device, torch.int32)
        for compute in (_kernel, reference):
            own = [x.clone().requires_grad_() for x in inputs]
            longest = (max(_TRIED), max(_TRIED))
            query, key, value = own
            out = compute(query, key, value, ends, ends, longest, sides, width**-0.5)
            found.append([out.detach(), *torch.autograd.grad((out * weights).sum(), own)])
    pairs = [(mine.float(), right.float()) for mine, right in zip(*found, strict=True)]
    return float(torch.stack([(mine - right).norm() / right.norm() for mine, right in pairs]).max())


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest: tuple[int, int],
    sides: tuple[int, int],
    scale: float,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    dtype = _half(query, value)
    width, capability = query.shape[-1], torch.cuda.get_device_capability(query.device)
    widest = _WIDEST if capability in _LARGE_GPUS else _WIDEST_ON_SMALL_GPUS
    if dtype is None or width % _WIDTHS or width > widest or capability < (8, 0):
        raise ValueError(
            f"no attention kernel for packed texts supports {query.dtype}, heads of width {width} "
            f"and compute capability {capability[0]}.{capability[1]}"
        )
    attended = varlen_attn(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        cu_queries,
        cu_keys,
        *longest,
        scale=scale,
        window_size=sides,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    assert isinstance(attended, Tensor)  # nothing else was asked for
    return attended.to(query.dtype)


def _half(query: Tensor, value: Tensor) -> torch.dtype | None:
    """Return the 16-bit number type in which the kernel must run: that of the values or of
    autocast; None if neither has 16 bits.

    Rotary positions in float32 may have widened queries and keys.
    """
    halves = (torch.bfloat16, torch.float16)
    if value.dtype in halves:
        return value.dtype
    device = query.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return autocast if autocast in halves else None


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest: tuple[int, int],
    sides: tuple[int, int],
    scale: float,
) -> Tensor:
    """Plain implementation of `varlen_attention` for tests and CPUs: text by text, in float32 for
    narrower types.

    Args:
        sides: keys that a query sees before and behind it; -1 for all.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    shared = query.shape[1] // key.shape[1]
    attended = []
    ends = zip(_ranges(cu_queries), _ranges(cu_keys), strict=True)
    for (first, last), (first_key, last_key) in ends:
        # (G, H / G, tokens, D) against (G, 1, tokens, D): the heads of a group share their keys.
        own = query[first:last].transpose(0, 1).to(wide)
        own = own.reshape(-1, shared, *own.shape[1:])
        keys = key[first_key:last_key].transpose(0, 1).unsqueeze(1).to(wide)
        values = value[first_key:last_key].transpose(0, 1).unsqueeze(1).to(wide)
        scores = (own * scale) @ keys.transpose(-1, -2)
        hidden = _hidden(scores.shape[-2], scores.shape[-1], sides, scores.device)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        attended.append((weights @ values).flatten(0, 1).transpose(0, 1))
    return torch.cat(attended).to(query.dtype)


def _hidden(
    num_queries: int, num_keys: int, sides: tuple[int, int], device: torch.device
) -> Tensor:
    """(queries, keys) bool mask, true where a query may not attend to a key."""
    before, behind = sides
    places = torch.arange(num_keys, device=device)[None, :]
    distance = places - torch.arange(num_queries, device=device)[:, None]
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if before >= 0:
        hidden |= distance < -before
    if behind >= 0:
        hidden |= distance > behind
    return hidden


def _ranges(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(cu_seqlens.tolist()))
