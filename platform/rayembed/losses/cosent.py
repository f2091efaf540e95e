"""CoSENT: a loss that orders pairs, so that a higher graded similarity gets a higher
cosine.

G pairs of the global batch, D embedding width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from rayembed.losses.contract import Pairwise

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rayembed.losses.contract import Parameters


class CoSENT(Pairwise):
    """Ranking loss over pairs with different graded similarity (kexue.fm/archives/8847)."""

    kind: Literal["cosent"] = "cosent"
    scale: PositiveFloat = 20.0
    """Factor of cosine similarities."""

    def of_pairs(
        self,
        queries_GD: Float[Tensor, "G D"],
        documents_GD: Float[Tensor, "G D"],
        similarity_G: Float[Tensor, " G"],
        parameters: Parameters,
    ) -> Float[Tensor, ""]:
        """Compute the loss of all pairs; see `cosent`."""
        return cosent(queries_GD, documents_GD, similarity_G, self.scale)


def cosent(
    queries_GD: Float[Tensor, "G D"],
    documents_GD: Float[Tensor, "G D"],
    similarity_G: Float[Tensor, " G"],
    scale: float,
) -> Float[Tensor, ""]:
    """Compute the CoSENT loss of graded pairs.

    log( 1 + Σ_{s_i > s_j} exp(λ (cos_j - cos_i)) )

    Args:
        queries_GD: unit length; cast to float32, as all of the loss.
        documents_GD: unit length.
        similarity_G: s, of which only the order counts.
        scale: λ.
    """
    logits_G = (queries_GD.float() * documents_GD.float()).sum(dim=1) * scale
    excess_GG = logits_G.unsqueeze(0) - logits_G.unsqueeze(1)
    ordered_GG = similarity_G.unsqueeze(1) > similarity_G.unsqueeze(0)
    terms = excess_GG.masked_fill(~ordered_GG, -math.inf).flatten()
    # The zero is the 1 of the formula: without two grades the loss is 0.
    return logits_G.new_zeros(1 + len(terms)).slice_scatter(terms, start=1).logsumexp(dim=0)
