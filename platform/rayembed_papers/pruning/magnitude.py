"""Prune by magnitude: weights close to zero become zero."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rayembed_extras.compression.contract import CalibrationText
from rayembed_papers.pruning.zeros import GROUPS, Pruning, group_mask, smallest_mask

if TYPE_CHECKING:
    from torch import Tensor

    from rayembed.models.transformer_model import TransformerModel
    from rayembed_extras.compression.matrices import Matrix


class Magnitude(Pruning):
    """Pruning of the weights of the smallest absolute value, matrix by matrix.

    The baseline of NV-Embed's Table 6 (arXiv 2405.17428): each matrix loses the same share, as in
    the comparisons of SparseGPT (arXiv 2301.00774) and Wanda (arXiv 2306.11695). Of equal values
    those that come first in the matrix go. It looks at no texts.
    """

    kind: Literal["magnitude"] = "magnitude"

    def zero(
        self,
        model: "TransformerModel",
        matrices: "Sequence[Matrix]",
        texts: Sequence[CalibrationText],
    ) -> None:
        """Prune the matrices in place."""
        for matrix in matrices:
            for weight in matrix.slices:
                weight.masked_fill_(self.mask(weight), 0)

    def mask(self, weight: "Tensor") -> "Tensor":
        """(F, H) bool, true for weights that are pruned."""
        scores = weight.abs()
        if self.structure in GROUPS:
            return group_mask(scores, self.structure)
        number = self.requested_zeros(*weight.shape)
        return smallest_mask(scores.reshape(-1), number).view_as(scores)
