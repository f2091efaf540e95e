"""Torch implementation of Muon: Newton-Schulz iteration on whole matrices and on ZeRO's shards of
them.

m rows and n columns of a matrix, W workers, S elements of a worker's shard.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayembed.distributed.collectives import gather, rank

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients, with the largest slope at zero: five iterations bring singular
values that are not tiny between 0.7 and 1.2."""


@dataclass(frozen=True)
class Fragment:
    """Location of a part of a matrix within a worker's shard of a parameter group."""

    shape: torch.Size
    """Shape of the whole matrix."""
    start: int
    """First element of the part within the matrix, row after row."""
    length: int
    place: int
    """Offset of the part in the shard."""


class MuonAdamW(torch.optim.AdamW):
    """Optimiser that updates `matrices` groups by Muon and all others by torch's AdamW.

    ZeRO 1 and 2 hand over one shard of a group in place of its matrices: (S,) consecutive elements
    of all of them in a row, an equal number for each worker. The momentum is as large as the shard.
    For an update the workers gather their shards of it, and each orthogonalises the matrices of
    which a part lies in its own: all but those at a border once, and what comes out needs not be
    sent.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float,
        iterations: int,
        betas: tuple[float, float],
        eps: float,
        bfloat16: bool,
    ) -> None:
        super().__init__(groups, betas=betas, eps=eps, fused=True)
        self.fragments: Mapping[Tensor, Sequence[Fragment]] = {}
        """Matrix fragments in each shard; without it parameters are whole matrices."""
        self._momentum = momentum
        self._iterations = iterations
        self._dtype = torch.bfloat16 if bfloat16 else torch.float32

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override] # takes no closure
        """Update all parameters that have a gradient."""
        groups = self.param_groups
        for group in groups:
            if group["matrices"]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group["lr"], group["weight_decay"])
        try:
            self.param_groups = [group for group in groups if not group["matrices"]]
            super().step()
        finally:
            self.param_groups = groups

    def _update(self, parameter: Tensor, rate: float, weight_decay: float) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["step"] += 1
        state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        nesterov = gradient.lerp(state["momentum_buffer"], self._momentum)
        if parameter in self.fragments:
            direction = self._of_shard(nesterov, self.fragments[parameter])
        else:
            direction = self._of_matrix(nesterov)
        parameter.mul_(1 - rate * weight_decay)
        parameter.add_(direction, alpha=-rate)

    def _of_shard(self, shard: Tensor, fragments: Sequence[Fragment]) -> Tensor:
        """(S,) update directions of the elements in this worker's shard."""
        everything = gather(shard)
        found = torch.zeros_like(shard)
        for part in fragments:
            first = rank() * len(shard) + part.place - part.start
            whole = everything[first : first + part.shape.numel()].view(part.shape)
            direction = self._of_matrix(whole).flatten()[part.start : part.start + part.length]
            found[part.place : part.place + part.length] = direction
        return found

    def _of_matrix(self, matrix: Tensor) -> Tensor:
        """Orthogonalise a matrix at the size of AdamW's updates (arXiv 2502.16982, eq. 4)."""
        direction = orthogonal(matrix.to(self._dtype), self._iterations)
        return direction.to(matrix.dtype) * (0.2 * math.sqrt(max(matrix.shape)))


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Approximate the orthogonal factor U·Vᵀ of an (m, n) matrix with the singular value
    decomposition U·S·Vᵀ.

    Newton-Schulz: X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X from X / ‖X‖, which leaves the singular
    vectors and drives the singular values towards 1.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T  # the smaller products
    x: Tensor = wide / wide.norm().clamp(min=1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T
