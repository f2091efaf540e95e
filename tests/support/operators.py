"""Operators that code runs, and whether the installed torch has kernels of them for CUDA."""

from functools import cache
from pathlib import Path

import torch
import torchgen
import yaml
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_ANY_DEVICE = {
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
}
_TABLE = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"

_OF_THE_HOST = ("profiler", "c10d")
"""Namespaces of what is no operator on a device; NCCL has rules of its own."""

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

_HALVES = (torch.bfloat16, torch.float16)
_ATOMIC = ("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce")
"""Operators that CUDA computes by an atomic addition for each addend."""


class Operators(TorchDispatchMode):
    """Notes the operators that run within."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.atomic: set[str] = set()
        """Those whose sums are rounded to 16 bits at each addend on CUDA."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "rayembed":  # made of others, which are noted
            with self:
                return func.redispatch(_ON_CPU, *args, **(kwargs or {}))
        if func.namespace not in _OF_THE_HOST:
            self.names.add(str(func))
        if func.overloadpacket.__name__ in _ATOMIC:
            tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
            if any(x.dtype in _HALVES for x in tensors):
                self.atomic.add(str(func))
        return func(*args, **(kwargs or {}))


@cache
def _entries() -> dict[str, dict]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entries = yaml.load(_TABLE.read_text(), loader)
    found = {}
    for entry in entries:
        found[entry["func"].partition("(")[0]] = entry
        for made in (entry.get("autogen") or "").split(","):
            # Made by torch from the entry's own function, for any device.
            found.setdefault(made.strip(), {"dispatch": {"CompositeExplicitAutograd": ""}})
    return found


def has_cuda_kernel(name: str) -> bool:
    """Whether torch's table of operators has a kernel for CUDA, or one for all devices.

    Args:
        name: of the operator with its overload, as torch prints it.

    Raises:
        KeyError: the table has no such operator.
    """
    if name.startswith("mkldnn._is_"):
        return True  # a question about the CPU, for which nothing is computed
    entry = _entries()[name.removeprefix("aten.").removesuffix(".default")]
    if (other := entry.get("structured_delegate")) is not None:
        return has_cuda_kernel(other)
    if "ufunc_inner_loop" in entry or not entry.get("dispatch"):
        return True  # made for CPU and CUDA; or a function of other operators
    keys = {key.strip() for group in entry["dispatch"] for key in group.split(",")}
    return bool(keys & (_ANY_DEVICE | {"CUDA"}))
