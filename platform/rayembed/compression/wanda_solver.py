"""Wanda's scores and masks: (F, H) matrices of F outputs and H inputs, N tokens."""

import torch
from torch import Tensor

from rayembed.compression.pruning import share_of
from rayembed.compression.structures import GROUPS, group_mask, smallest_mask
from rayembed.config.compression import Structure


class SquaredNorms:
    """Squared norm of each input over all tokens, in float64."""

    def __init__(self, num_inputs: int, device: torch.device) -> None:
        self.rows = 0
        self.sums = torch.zeros(num_inputs, dtype=torch.float64, device=device)

    def add(self, rows: Tensor) -> None:
        """Count further inputs (N, H)."""
        self.rows += len(rows)
        self.sums += rows.double().square().sum(dim=0)


class WandaSolver:
    """Prunes matrices by the scores |W_ij| · ‖X_j‖."""

    def __init__(self, structure: Structure, sparsity: float) -> None:
        self.structure = structure
        self.sparsity = sparsity

    def begin(self, weight: Tensor) -> SquaredNorms:
        """Empty norms of a matrix's inputs."""
        return SquaredNorms(weight.shape[1], weight.device)

    def solve(self, weight: Tensor, statistic: SquaredNorms, name: str) -> None:
        """Prune the matrix in place."""
        weight.masked_fill_(self.mask(weight, statistic.sums), 0)

    def mask(self, weight: Tensor, squared_norms: Tensor) -> Tensor:
        """(F, H) true where the matrix loses its weights, given the inputs' squared norms (H,)."""
        scores = weight.double().abs() * squared_norms.sqrt()
        if self.structure in GROUPS:
            return group_mask(scores, self.structure)
        return smallest_mask(scores, share_of(scores.shape[1], self.sparsity))
