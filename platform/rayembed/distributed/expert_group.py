"""Group of workers that share the experts of a mixture-of-experts model, and their
communication.

P workers of a group, each with E / P experts, in the order of their ranks; H width of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ExpertGroup:
    """Group of workers that together hold all experts; all workers must make each call together."""

    process_group: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of workers P."""
        return dist.get_world_size(self.process_group)

    @property
    def place(self) -> int:
        """Index of this worker in the group, from 0."""
        return dist.get_rank(self.process_group)

    def exchange_counts(self, counts: Tensor) -> Tensor:
        """(P, E / P) number of rows that each worker will send for each expert of this
        worker.

        Args:
            counts: (E,) how many rows this worker has for each expert.
        """
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts.contiguous(), group=self.process_group)
        return received.view(self.size, -1)

    def exchange_rows(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send rows to the workers, and return the (sum of `received`, H) rows received from them,
        with gradient.

        Args:
            rows: (sum of `sent`, H) what each worker is to get, one after the other.
            sent: rows for each worker.
            received: rows from each worker.
        """
        exchanged: Tensor = _ExchangeRows.apply(  # type: ignore[no-untyped-call]
            rows, list(sent), list(received), self.process_group
        )
        return exchanged

    def gather(self, share: Tensor) -> Tensor:
        """Concatenate all workers' tensors along the first dimension, without gradient."""
        share = share.detach().contiguous()
        parts = [torch.empty_like(share) for _ in range(self.size)]
        dist.all_gather(parts, share, group=self.process_group)
        return torch.cat(parts)

    def share_of(self, whole: Tensor) -> Tensor:
        """Return this worker's part of a tensor that `gather` returned."""
        return whole.chunk(self.size)[self.place]

    def sum(self, value: Tensor) -> Tensor:
        """Sum a tensor over the workers, without gradient."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self.process_group)
        return total


class _ExchangeRows(torch.autograd.Function):
    """Differentiable all-to-all exchange of rows; gradients return to the worker that sent
    the row.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.exchange = (sent, received, group)
        return _exchanged(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = grads
        sent, received, group = ctx.exchange
        return _exchanged(grad, received, sent, group), None, None, None


def _exchanged(
    rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output
