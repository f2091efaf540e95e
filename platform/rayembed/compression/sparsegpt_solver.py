"""A matrix (F, H) pruned by SparseGPT, through llm-compressor."""

import torch
from torch import Tensor, nn

from rayembed.compression.hessian import Hessian, damping
from rayembed.compression.library import library
from rayembed.compression.structures import GROUPS
from rayembed.config.compression import Structure
from rayembed.errors import ConfigError


class SparseGPTSolver:
    """Prunes matrices, moving the weights that stay."""

    def __init__(self, structure: Structure, sparsity: float, block: int) -> None:
        self.structure = structure
        self.sparsity = sparsity
        self.block = block
        self._solve = library("modifiers.pruning.sparsegpt.sgpt_sparsify").sparsify_weight

    def begin(self, weight: Tensor) -> Hessian:
        """Empty second moments of a matrix's inputs."""
        return Hessian(weight.shape[1], weight.device)

    def solve(self, weight: Tensor, statistic: Hessian, name: str) -> None:
        """Prune the matrix in place.

        Raises:
            ConfigError: it has more zeros than asked for, which would be filled again.
        """
        zeros = (weight == 0).float().mean().item()
        if zeros > self.sparsity:
            raise ConfigError(
                f"sparsegpt: {name} has {zeros:.0%} zeros already, more than sparsity = "
                f"{self.sparsity:g}, and some would become weights again; ask for more, or prune "
                "the model as it was before"
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
                block_size=self.block,
                dampening_frac=damping(hessian, name),
                preserve_sparsity_mask=False,
            )
        weight.copy_(made)
