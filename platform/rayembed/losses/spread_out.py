"""The spread-out regulariser (GOR): makes vectors of texts that do not match as dissimilar as
random vectors.

Of two independent, uniformly distributed unit vectors of width D the product has the mean 0 and the
mean square 1/D. The regulariser is the squared mean of the products of queries with documents that
do not match, plus what their mean square exceeds 1/D by (arXiv 1708.06320).
Vectors that fill the space lose less when they are cut and quantised.

B queries of this worker, N candidates, D embedding width.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rayembed.distributed.collectives import sum_with_gradient
from rayembed.losses.contract import Candidates, similarities


def product_sums(queries_BD: Float[Tensor, "B D"], candidates: Candidates) -> Float[Tensor, "B 3"]:
    """(B, 3) sum, sum of squares and number of each query's inner products with its unmasked
    negatives.
    """
    others_BN = non_matching(candidates)
    products_BN = similarities(queries_BD, candidates.vectors).masked_fill(~others_BN, 0.0)
    number_B = others_BN.sum(dim=1).float()
    return torch.stack([products_BN.sum(dim=1), products_BN.square().sum(dim=1), number_B], dim=1)


def non_matching(candidates: Candidates) -> Bool[Tensor, "B N"]:
    """(B, N) bool mask of each query's candidates without its positive."""
    return candidates.mask_BN.scatter(1, candidates.positive_B.unsqueeze(1), False)


def spread_out(sums_B3: Float[Tensor, "B 3"], width: int) -> Float[Tensor, ""]:
    """Compute the regulariser over all workers' inner products; every worker gets the same
    value.

    Args:
        sums_B3: what `product_sums` gives for this worker's queries.
        width: D.
    """
    total, squares, number = sum_with_gradient(sums_B3.sum(dim=0))
    number = number.detach().clamp(min=1.0)
    found: Tensor = (total / number).square() + torch.relu(squares / number - 1 / width)
    return found
