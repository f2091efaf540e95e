"""Second moments of a matrix's inputs, which SparseGPT and GPTQ solve with: (H, H), H inputs."""

import logging

import torch
from torch import Tensor

from rayembed.errors import ArtifactError

logger = logging.getLogger(__name__)

DAMPING = 0.01
"""Share of the mean diagonal that is added to the diagonal, as both papers' code does."""

_DAMPINGS = (DAMPING, 0.1, 1.0)


class Hessian:
    """2 · X Xᵀ / N over the N inputs of the calibration texts, float32."""

    def __init__(self, num_inputs: int, device: torch.device) -> None:
        self.rows = 0
        self._sums = torch.zeros(num_inputs, num_inputs, device=device)

    def add(self, rows: Tensor) -> None:
        """Count further inputs (N, H)."""
        self.rows += len(rows)
        given = rows.float()
        self._sums += given.T @ given

    def mean(self) -> Tensor:
        """The matrix; a copy."""
        return self._sums * (2 / self.rows)


def damping(hessian: Tensor, name: str) -> float:
    """Smallest damping with which the Hessian has a Cholesky factor.

    llm-compressor takes the identity for one that has none, and goes on: the layer would be solved
    without looking at any text.

    Raises:
        ArtifactError: it has none at all.
    """
    live = hessian.clone()
    diagonal = live.diagonal()
    diagonal[diagonal == 0] = 1
    mean = float(diagonal.mean())
    for share in _DAMPINGS:
        damped = live + share * mean * torch.eye(len(live), device=live.device)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed) and not bool(
            torch.linalg.cholesky_ex(torch.cholesky_inverse(factor))[1]
        ):
            if share != DAMPING:
                logger.warning("%s: inputs nearly dependent, damped by %g", name, share)
            return share
    raise ArtifactError(
        f"the inputs of {name} have no second moments to solve with; are the model's weights or "
        "the calibration texts damaged?"
    )
