"""A GPU that is not there: tensors of a CPU that say they are on one.

What code asks of `device` is answered `cuda:0` for them, operators compute with the CPU's kernels,
and one that gets a tensor of the GPU and one of the host is refused, as CUDA's are. Backward passes
run without the check.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from varlen_on_cpu import varlen_on_cpu

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


class OnGpu(Tensor):
    """A tensor that says it is on the GPU."""

    device = GPU
    is_cuda = True
    is_cpu = False


_MAY_MIX = {
    *("__getitem__", "__setitem__", "copy_", "to", "__get__", "__set__", "as_subclass"),
    *("backward", "grad"),
}
"""Functions that take tensors of both devices, as indices, sources or attributes; and gradients, of
which a backward pass makes plain tensors."""
_TO_HOST = {"cpu", "numpy", "tolist", "item", "__format__", "__repr__"}


def _is_gpu(device: object) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _Gpu(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        on_gpu = [isinstance(x, OnGpu) for x in given]
        placed = [x for x in (*args, *(kwargs or {}).values()) if isinstance(x, str | torch.device)]
        to_gpu, to_cpu = any(map(_is_gpu, placed)), any(str(x) == "cpu" for x in placed)
        if any(on_gpu) and name not in _MAY_MIX:
            host = [x for x, gpu in zip(given, on_gpu, strict=True) if not gpu and x.dim()]
            if host:
                raise RuntimeError(
                    f"{name}: expected all tensors to be on the same device, but found cuda:0 and "
                    f"cpu of {[tuple(x.shape) for x in host]}"
                )
        args, kwargs = tree_map(lambda x: CPU if _is_gpu(x) else x, (args, kwargs or {}))
        if name in _TO_HOST or (name == "to" and to_cpu and not to_gpu):
            args = tree_map(lambda x: x.as_subclass(Tensor) if isinstance(x, OnGpu) else x, args)
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if to_gpu:
            out = tree_map(lambda x: x.as_subclass(OnGpu) if isinstance(x, Tensor) else x, out)
        return out


def moved_to_gpu(model: nn.Module) -> nn.Module:
    """The model with its weights on the GPU, in place."""
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                own = nn.Parameter(weight.detach().as_subclass(OnGpu), weight.requires_grad)
                module._parameters[name] = own
        for name, value in list(module._buffers.items()):
            if value is not None:
                module._buffers[name] = value.as_subclass(OnGpu)
    return model


def _moved(model: nn.Module, *to: Any, of: Any = nn.Module.to, **more: Any) -> nn.Module:
    on_gpu = any(map(_is_gpu, (*to, *more.values())))
    to = tuple(CPU if _is_gpu(x) else x for x in to)
    more = {name: CPU if _is_gpu(x) else x for name, x in more.items()}
    of(model, *to, **more)
    return moved_to_gpu(model) if on_gpu else model


class _Event:
    """What `torch.cuda.Event` and streams do for those who wait."""

    def __init__(self, *_: object, **__: object) -> None:
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.update([name])


@contextmanager
def pretended_gpu(
    patch: pytest.MonkeyPatch,
    capability: tuple[int, int] = (9, 0),
    free: int = 60 << 30,
    total: int = 80 << 30,
) -> Iterator[None]:
    """Within, there is a GPU of this capability and memory, and CPU tensors may be on it."""
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_name": lambda _=None: "pretended",
        "get_device_capability": lambda _=None: capability,
        "mem_get_info": lambda _=None: (free, total),
        "memory_reserved": lambda _=None: 0,
        "memory_allocated": lambda _=None: 0,
        "default_generators": [torch.default_generator],
        "empty_cache": lambda: None,
        "Event": _Event,
        "get_rng_state": lambda _=None: torch.get_rng_state(),
        "set_rng_state": lambda state, _=None: torch.set_rng_state(state),
    }
    with ExitStack() as stack:
        within = stack.enter_context(patch.context())
        stack.enter_context(varlen_on_cpu(patch, capability, tried=True))
        for name, answer in answers.items():
            within.setattr(torch.cuda, name, answer)
        within.setattr(Tensor, "pin_memory", lambda tensor: tensor.clone())
        within.setattr(nn.Module, "to", _moved)
        within.setattr(
            torch,
            "autocast",
            lambda _, *given, of=torch.autocast, **more: of("cpu", *given, **more),
        )
        stack.enter_context(_Gpu())
        yield
