"""SigLIP: classify every candidate by itself, as positive or negative, with a sigmoid.

B queries, N candidates, D embedding width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveFloat

from rayembed.losses.contract import Candidates, Contrastive, scalar, similarities

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from torch import Tensor

    from rayembed.config.loss import Widths
    from rayembed.losses.contract import Parameters


class SigLIP(Contrastive):
    """Sigmoid loss of each candidate, with learnt scale and bias (arXiv 2303.15343)."""

    kind: Literal["siglip"] = "siglip"
    scale: PositiveFloat = 10.0
    """Initial factor of cosine similarities; its logarithm is trained."""
    bias: float = -10.0
    """Initial bias. At the start nearly all candidates are negatives, which it allows for."""

    parameter_names: ClassVar[tuple[str, ...]] = ("log_scale", "bias")

    def initial_parameters(self, widths: Widths) -> dict[str, Any]:
        """Return the initial trained parameters, T' (logarithm of the scale) and b (bias) of the
        paper.
        """
        return {"log_scale": scalar(math.log(self.scale)), "bias": scalar(self.bias)}

    def of_rows(
        self, queries_BD: Float[Tensor, "B D"], candidates: Candidates, parameters: Parameters
    ) -> Float[Tensor, " B"]:
        """Compute the loss of each query; see `siglip`."""
        return siglip(
            queries_BD,
            candidates.vectors,
            candidates.positive_B,
            candidates.mask_BN,
            parameters["log_scale"],
            parameters["bias"],
        )


def siglip(
    queries_BD: Float[Tensor, "B D"],
    candidates: Float[Tensor, "N D"] | Float[Tensor, "B N D"],
    positive_B: Int[Tensor, " B"],
    mask_BN: Bool[Tensor, "B N"],
    log_scale: Float[Tensor, ""],
    bias: Float[Tensor, ""],
) -> Float[Tensor, " B"]:
    """Compute the sigmoid loss of each query, summed over its candidates.

    -Σ_{d in mask} log σ( z (exp(t')·q·d + b) ), z = 1 for the positive and -1 for all others
    (arXiv 2303.15343, section 3.2). The mean over queries is the paper's division by |B|.

    Args:
        queries_BD: unit length; cast to float32, as all of the loss.
        candidates: unit length, the same for all queries or each query's own.
        positive_B: place of each query's positive among the candidates; its mask must be True.
        mask_BN: which candidates count.
        log_scale: t'.
        bias: b.
    """
    from torch.nn.functional import logsigmoid

    logits_BN = similarities(queries_BD, candidates) * log_scale.exp() + bias
    signs_BN = logits_BN.new_full(logits_BN.shape, -1.0).scatter(1, positive_B.unsqueeze(1), 1.0)
    return -logsigmoid(signs_BN * logits_BN).masked_fill(~mask_BN, 0.0).sum(dim=1)
