"""Prune by weights and activations (Wanda, arXiv 2306.11695).

A matrix is (F, H), F outputs and H inputs; N tokens.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rayembed_extras.compression.contract import Calibrated, CalibrationText
from rayembed_papers.pruning.zeros import (
    GROUPS,
    Pruning,
    Structure,
    group_mask,
    share_of,
    smallest_mask,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rayembed.models.transformer_model import TransformerModel
    from rayembed_extras.compression.matrices import Matrix


class Wanda(Calibrated, Pruning):
    """Pruning of the weights with the smallest |W_ij| · ‖X_j‖, row by row (equation 1).

    ‖X_j‖ is the norm of input j over all tokens of the calibration texts. Each row of a matrix
    loses the same share; of equal scores those that come first in the row go.
    """

    kind: Literal["wanda"] = "wanda"

    def zero(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> None:
        """Prune the matrices in place, layer after layer."""
        from rayembed_extras.compression.calibration import solve_layers

        solve_layers(model, matrices, texts, WandaSolver(self.structure, self.sparsity))

    def requested_zeros(self, num_outputs: int, num_inputs: int) -> int:
        """Number of zeros that pruning must produce, the same in each row."""
        return num_outputs * share_of(num_inputs, self.sparsity)


class SquaredNorms:
    """(H,) squared norm of each input over all tokens, in float64."""

    def __init__(self, num_inputs: int, device: "torch.device") -> None:
        import torch

        self.rows = 0
        self.sums = torch.zeros(num_inputs, dtype=torch.float64, device=device)

    def add(self, rows: "Tensor") -> None:
        """Add inputs (N, H) to the squared norms."""
        self.rows += len(rows)
        self.sums += rows.double().square().sum(dim=0)


class WandaSolver:
    """Prunes a matrix by the scores |W_ij| · ‖X_j‖."""

    def __init__(self, structure: Structure, sparsity: float) -> None:
        self.structure = structure
        self.sparsity = sparsity

    def begin(self, weight: "Tensor") -> SquaredNorms:
        """Create zero norms for the inputs of a matrix."""
        return SquaredNorms(weight.shape[1], weight.device)

    def solve(self, weight: "Tensor", statistic: SquaredNorms, name: str) -> None:
        """Prune the matrix in place."""
        weight.masked_fill_(self.mask(weight, statistic.sums), 0)

    def mask(self, weight: "Tensor", squared_norms: "Tensor") -> "Tensor":
        """(F, H) bool, true for weights that are pruned, given the inputs' squared norms (H,)."""
        scores = weight.double().abs() * squared_norms.sqrt()
        if self.structure in GROUPS:
            return group_mask(scores, self.structure)
        return smallest_mask(scores, share_of(scores.shape[1], self.sparsity))
