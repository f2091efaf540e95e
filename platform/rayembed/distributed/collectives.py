"""Collectives over the data-parallel workers; they also work without a process group.

W workers, b rows of one worker. Gradients follow one rule: every worker computes the mean loss of
its own rows over gathered tensors, and the engine averages parameter gradients over workers. The
averaged gradient is then that of the mean over all rows in one process, with factor 1.000
(docs/decisions/0002-gradient-scale.md).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def world_size() -> int:
    """Number of data-parallel workers; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Rank of this worker; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_texts(own: str) -> list[str]:
    """Gather every worker's text, in rank order."""
    if world_size() == 1:
        return [own]
    texts = [""] * world_size()
    dist.all_gather_object(texts, own)
    return texts


def gather(local: Tensor) -> Tensor:
    """Concatenate every worker's (b, …) to (W·b, …) in rank order, without gradient.

    All workers must bring the same shape.
    """
    if world_size() == 1:
        return local.detach()
    local = local.detach().contiguous()
    everyone = local.new_empty(world_size() * len(local), *local.shape[1:])
    dist.all_gather_single(everyone, local)
    return everyone


def gather_with_gradient(local: Tensor) -> Tensor:
    """Concatenate every worker's (b, …) to (W·b, …) in rank order, with gradient.

    The gradient of a worker's rows is the sum over all workers of what they send back for them.
    """
    if world_size() == 1:
        return local
    gathered: Tensor = _Gather.apply(local)  # type: ignore[no-untyped-call]
    return gathered


def sum_with_gradient(local: Tensor) -> Tensor:
    """Sum a tensor over workers; its gradient is the sum of all workers' gradients."""
    if world_size() == 1:
        return local
    total: Tensor = _Sum.apply(local)  # type: ignore[no-untyped-call]
    return total


def summed(values: Tensor) -> Tensor:
    """Sum a tensor over workers in place, without gradient or device synchronisation."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def largest(value: int, device: torch.device) -> int:
    """Return the maximum over workers of an integer."""
    if world_size() == 1:
        return value
    return int(maxima(torch.tensor(value, device=device)))


def maxima(values: Tensor) -> Tensor:
    """Take the maximum over workers of each element in place, without device synchronisation."""
    if world_size() > 1:
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def read_together(*tensors: Tensor) -> list[Tensor]:
    """Copy several tensors to the CPU in one transfer, so that the host waits for the device only
    once.

    They go as float64, which holds all of float32 and integers below 2⁵³.
    """
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [p.view(t.shape).to(t.dtype) for p, t in zip(parts, tensors, strict=True)]


def _scatters(device: torch.device) -> bool:
    """Whether NCCL does the reduction, which can send each worker only its own part of the
    result.
    """
    return device.type == "cuda"


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return gather(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        if _scatters(grad.device):
            own = grad.new_empty(len(grad) // world_size(), *grad.shape[1:])
            dist.reduce_scatter_single(own, grad.contiguous())
            return own
        # gloo reduces all of it for a reduce-scatter too.
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world_size())[rank()]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        total = local.detach().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (grad,) = grads
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad
