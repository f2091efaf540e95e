"""What NCCL demands of collectives and gloo does not, checked where workers talk by gloo.

NCCL takes contiguous tensors of the number types in its table, all on the worker's device. It hangs
where the workers of a group do not start the same collectives in the same order, which gloo bears
as long as each message finds its partner.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

DTYPES = {
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
}
"""Number types of ProcessGroupNCCL; of 8 bits in floating point it sends bytes and reduces none."""

COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
"""Methods of a process group in which all of its workers take part."""

POINT_TO_POINT = ("send", "recv", "recv_anysource")

UNEVEN = ("all_to_all_single", "alltoall", "alltoall_base")
"""Collectives to which each worker may bring another number of elements."""

ON_ONE = ("gather", "scatter")
"""Collectives in which one worker has tensors that the others have not."""


class Call(NamedTuple):
    """A collective as one of its workers started it."""

    name: str
    workers: tuple[int, ...]
    dtypes: tuple[str, ...]
    elements: tuple[int, ...]
    """Of each tensor; empty where workers may differ."""


def refused(name: str, tensors: Sequence[Tensor], device: str) -> str | None:
    """Why NCCL would not take a collective's tensors; None if it would."""
    for tensor in tensors:
        what = f"{name} of {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        if tensor.device.type != device:
            return f"{what}: the worker is on {device}"
        if not tensor.is_contiguous():
            return f"{what}: its strides {tensor.stride()} are not contiguous"
        if tensor.dtype not in DTYPES:
            return f"{what}: NCCL has no such number type"
    return None


class NcclRules:
    """Checks and notes the collectives of this process, from `install` on."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.calls: list[Call] = []

    def install(self) -> None:
        """Take the place of the methods of all process groups."""
        for name in (*COLLECTIVES, *POINT_TO_POINT):
            setattr(dist.ProcessGroup, name, self._checked(name, getattr(dist.ProcessGroup, name)))

    def _checked(self, name: str, method: Any) -> Any:
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if reason := refused(name, tensors, self.device):
                raise AssertionError(f"NCCL refuses {reason}")
            if name in COLLECTIVES:
                workers = tuple(dist.get_process_group_ranks(group))
                dtypes = sorted({str(tensor.dtype) for tensor in tensors})
                even = name not in UNEVEN + ON_ONE
                elements = [tensor.numel() for tensor in tensors] if even else []
                self.calls.append(Call(name, workers, tuple(dtypes), tuple(elements)))
            return method(group, *args, **kwargs)

        return call


def difference(calls: Mapping[int, Sequence[Call]]) -> str | None:
    """Where two workers started other collectives of their common groups; None if nowhere.

    Args:
        calls: of each worker, in order.
    """
    for left, right in combinations(calls, 2):
        mine, other = (
            [call for call in calls[rank] if {left, right} <= set(call.workers)]
            for rank in (left, right)
        )
        for number, (one, two) in enumerate(zip(mine, other, strict=False)):
            if one != two:
                return f"collective {number} of worker {left} is {one}, of worker {right} {two}"
        if len(mine) != len(other):
            return f"worker {left} started {len(mine)} collectives, worker {right} {len(other)}"
    return None
