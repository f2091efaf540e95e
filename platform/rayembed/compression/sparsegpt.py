"""Pruning with weights moved to make up for the lost ones (SparseGPT, arXiv 2301.00774)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rayembed.compression.calibrated import Calibrated
from rayembed.compression.contract import CalibrationText
from rayembed.compression.library import check_installed
from rayembed.compression.pruning import Pruning, share_of

if TYPE_CHECKING:
    from rayembed.compression.matrices import Matrix
    from rayembed.models.transformer_model import TransformerModel

BLOCK = 128
"""Inputs among which weights are chosen and moved at once (section 3.3)."""


class SparseGPT(Calibrated, Pruning):
    """Pruning column by column: what a lost weight gave is given by the weights behind it.

    By llm-compressor's function of a layer. Without a structure the weights of 128 inputs at a time
    compete with each other over all rows; it takes one more than the share of each such block, and
    all weights of an input that is always zero.
    """

    kind: Literal["sparsegpt"] = "sparsegpt"

    is_exact: ClassVar[bool] = False

    def check(self, folder: Path) -> None:
        """Check the package too."""
        check_installed(self.kind, "llmcompressor")
        super().check(folder)

    def zero(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> None:
        """Prune the matrices in place, layer after layer."""
        from rayembed.compression.calibration import solve_layers
        from rayembed.compression.sparsegpt_solver import SparseGPTSolver

        check_installed(self.kind, "llmcompressor")
        solve_layers(model, matrices, texts, SparseGPTSolver(self.structure, self.sparsity, BLOCK))

    def zeros_asked(self, num_outputs: int, num_inputs: int) -> int:
        """The share of each block, rounded down."""
        widths = [min(BLOCK, num_inputs - start) for start in range(0, num_inputs, BLOCK)]
        return sum(share_of(num_outputs * width, self.sparsity) for width in widths)
