"""Pruning by weights and activations (Wanda, arXiv 2306.11695)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rayembed.compression.calibrated import Calibrated
from rayembed.compression.contract import CalibrationText
from rayembed.compression.pruning import Pruning, share_of

if TYPE_CHECKING:
    from rayembed.compression.matrices import Matrix
    from rayembed.models.transformer_model import TransformerModel


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
        from rayembed.compression.calibration import solve_layers
        from rayembed.compression.wanda_solver import WandaSolver

        solve_layers(model, matrices, texts, WandaSolver(self.structure, self.sparsity))

    def zeros_asked(self, num_outputs: int, num_inputs: int) -> int:
        """The same number in each row."""
        return num_outputs * share_of(num_inputs, self.sparsity)
