"""Prune weights and adjust the remaining ones to compensate (SparseGPT, arXiv 2301.00774)."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from rayembed.errors import ConfigError, require_packages
from rayembed_extras.compression.contract import Calibrated, CalibrationText
from rayembed_extras.compression.gptq import Hessian, damping, library
from rayembed_papers.pruning.zeros import GROUPS, Pruning, Structure, share_of

if TYPE_CHECKING:
    from torch import Tensor

    from rayembed.models.transformer_model import TransformerModel
    from rayembed_extras.compression.matrices import Matrix

BLOCK = 128
"""Number of inputs among which weights are chosen and adjusted at once (section 3.3)."""


class SparseGPT(Calibrated, Pruning):
    """Prune column by column and adjust the later columns to compensate.

    By llm-compressor's function of a layer. Without a structure the weights of 128 inputs at a time
    compete with each other over all rows; it takes one more than the share of each such block, and
    all weights of an input that is always zero.
    """

    kind: Literal["sparsegpt"] = "sparsegpt"

    is_exact: ClassVar[bool] = False

    def check(self, folder: Path) -> None:
        """Check the model, and that llm-compressor is installed."""
        require_packages(self.kind, "compress", "llmcompressor")
        super().check(folder)

    def zero(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> None:
        """Prune the matrices in place, layer after layer."""
        from rayembed_extras.compression.calibration import solve_layers

        require_packages(self.kind, "compress", "llmcompressor")
        solve_layers(model, matrices, texts, SparseGPTSolver(self.structure, self.sparsity))

    def requested_zeros(self, num_outputs: int, num_inputs: int) -> int:
        """Number of zeros that pruning must produce: the share of each block, rounded down."""
        widths = [min(BLOCK, num_inputs - start) for start in range(0, num_inputs, BLOCK)]
        return sum(share_of(num_outputs * width, self.sparsity) for width in widths)


class SparseGPTSolver:
    """Prunes a matrix and adjusts its remaining weights."""

    def __init__(self, structure: Structure, sparsity: float) -> None:
        self.structure = structure
        self.sparsity = sparsity
        self._solve = library("modifiers.pruning.sparsegpt.sgpt_sparsify").sparsify_weight

    def begin(self, weight: "Tensor") -> Hessian:
        """Create an empty Hessian for the inputs of a matrix."""
        return Hessian(weight.shape[1], weight.device)

    def solve(self, weight: "Tensor", statistic: Hessian, name: str) -> None:
        """Prune the matrix in place.

        Raises:
            ConfigError: it has more zeros than asked for, which would be filled again.
        """
        import torch
        from torch import nn

        zeros = (weight == 0).float().mean().item()
        if zeros > self.sparsity:
            raise ConfigError(
                f"sparsegpt: {zeros:.0%} of the weights of {name} are zero already, more than "
                f"sparsity = {self.sparsity:g}, so some of them would become nonzero; raise "
                "sparsity, or prune the original model"
            )
        group = GROUPS.get(self.structure)
        # It takes linear layers alone, and looks at no more of them than their weight.
        layer = nn.Linear(1, 1, bias=False, device="meta")
        layer.weight = nn.Parameter(weight.float(), requires_grad=False)
        hessian = statistic.mean()
        with torch.no_grad():
            _, made = self._solve(
                layer,
                {layer: hessian},
                sparsity=self.sparsity,
                prune_n=group.zeros if group else 0,
                prune_m=group.size if group else 0,
                block_size=BLOCK,
                dampening_frac=damping(hessian, name),
                preserve_sparsity_mask=False,
            )
        weight.copy_(made)
