"""Tensors that say they are on a GPU, of torch's CUDA build on a machine without one.

Operations run as far as shapes, number types, strides and devices go (torch's FakeTensorMode), by
the code that is chosen on a GPU of some compute capability. A value cannot be read: what asks for
one raises. Backward passes need `no_accelerator.c` preloaded; `make cuda-wheel` does so.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rayembed.models.adapters import adapted_linear
from rayembed.models.attention import unpadded

GPU = torch.device("cuda", 0)

CAPABILITIES = {(9, 0): "NVIDIA H100", (8, 0): "NVIDIA A100", (7, 5): "Tesla T4"}
"""Compute capability → name of a GPU."""

_aten = torch.ops.aten


class Operations(TorchDispatchMode):
    """Counts operations by name, and copies from the GPU to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.to_host = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = func(*args, **kwargs)
        self.names[func.overloadpacket.__name__] += 1
        on_gpu = any(x.device.type == "cuda" for x in given)
        on_host = isinstance(made, Tensor) and made.device.type == "cpu"
        if on_gpu and on_host:
            self.to_host += 1
        return made


class _Event:
    """A `torch.cuda.Event` for which nobody waits."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def fake_gpu(capability: tuple[int, int], free: int = 60 << 30) -> Iterator[FakeTensorMode]:
    """Code inside takes this machine for one with a GPU of that capability.

    Args:
        free: bytes of memory that the GPU says are free.
    """
    assert torch.version.cuda, "the CPU build has no device guard for CUDA: make cuda-wheel"
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in {
            "get_device_capability": capability,
            "get_device_name": CAPABILITIES[capability],
            "mem_get_info": (free, 80 << 30),
            "memory_reserved": 0,
            "memory_allocated": 0,
            "max_memory_allocated": 0,
        }.items():
            patch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
        patch.setattr(torch.cuda, "Event", _Event)
        # A trial reads values; what it would find is said here.
        packs = capability >= (8, 0)
        patch.setattr(unpadded, "_why_padded", lambda _: None if packs else "no kernel")
        patch.setattr(adapted_linear, "kernels_work", lambda *_: True)
        with (
            torch.autograd.set_multithreading_enabled(False),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
        ):
            yield mode


def to_gpu(module: nn.Module) -> None:
    """Put a module's parameters and buffers onto the fake GPU, in place; values are lost."""
    for owner in module.modules():
        for name, own in owner._parameters.items():
            if own is not None:
                empty = torch.empty(own.shape, dtype=own.dtype, device=GPU)
                owner._parameters[name] = nn.Parameter(empty, requires_grad=own.requires_grad)
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)


def faked(mode: FakeTensorMode, found):
    """Nested containers and dataclasses with fake tensors, on the host, for all tensors."""
    if isinstance(found, Tensor):
        return mode.from_tensor(found)
    if isinstance(found, dict):
        return {key: faked(mode, value) for key, value in found.items()}
    if type(found) in (list, tuple):
        return type(found)(faked(mode, one) for one in found)
    if dataclasses.is_dataclass(found) and not isinstance(found, type):
        changed = {
            field.name: faked(mode, getattr(found, field.name))
            for field in dataclasses.fields(found)
            if field.init and field.name != "batch"
        }
        return dataclasses.replace(found, **changed)
    return found
