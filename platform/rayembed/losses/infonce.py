"""InfoNCE: softmax cross-entropy of the positive among the candidates that a mask allows.

B queries, N candidates, D embedding width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed.losses.contract import Candidates, Contrastive, similarities

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from rayembed.losses.contract import Parameters


class InfoNCE(Contrastive):
    """Softmax cross-entropy of the positive among all candidates under the mask."""

    kind: Literal["infonce"] = "infonce"
    temperature: PositiveFloat = 0.02
    """Temperature that divides cosine similarities. NV-Embed does not state its own."""

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute the loss of each query; see `info_nce`."""
        return info_nce(
            queries_BD,
            candidates.vectors,
            candidates.positive_B,
            candidates.mask_BN,
            self.temperature,
        )


def info_nce(
    queries_BD: Float[Tensor, "B D"],
    candidates: Float[Tensor, "N D"] | Float[Tensor, "B N D"],
    positive_B: Int[Tensor, " B"],
    mask_BN: Bool[Tensor, "B N"],
    temperature: float,
) -> Float[Tensor, " B"]:
    """Loss of each query: negative log-probability of its positive among its candidates.

    -log( exp(q·d⁺/τ) / Σ_{d in mask} exp(q·d/τ) )   (arXiv 1807.03748, eq. 4)

    Args:
        queries_BD: unit length; cast to float32, as all of the loss.
        candidates: unit length, the same for all queries or each query's own.
        positive_B: place of each query's positive among the candidates; its mask must be True.
        mask_BN: which candidates stand in the denominator.
        temperature: τ.
    """
    logits_BN = similarities(queries_BD, candidates) / temperature
    logits_BN = logits_BN.masked_fill(~mask_BN, -math.inf)
    picked_B = logits_BN.gather(1, positive_B.unsqueeze(1)).squeeze(1)
    return logits_BN.logsumexp(dim=1) - picked_B
