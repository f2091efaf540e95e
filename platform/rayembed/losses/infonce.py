"""InfoNCE with a candidate mask.

B queries, N candidates, D embedding width.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def info_nce(
    queries_BD: Float[Tensor, "B D"],
    candidates_ND: Float[Tensor, "N D"],
    positive_B: Int[Tensor, " B"],
    mask_BN: Bool[Tensor, "B N"],
    temperature: float,
) -> Float[Tensor, " B"]:
    """Loss of each query: negative log-probability of its positive among its candidates.

    -log( exp(q·d⁺/τ) / Σ_{d in mask} exp(q·d/τ) )   (arXiv 1807.03748, eq. 4)

    Args:
        queries_BD: unit length; cast to float32, as all of the loss.
        candidates_ND: unit length.
        positive_B: place of each query's positive among the candidates; its mask must be True.
        mask_BN: which candidates stand in the denominator.
        temperature: τ.
    """
    logits_BN = queries_BD.float() @ candidates_ND.float().T / temperature
    logits_BN = logits_BN.masked_fill(~mask_BN, -torch.inf)
    picked_B = logits_BN.gather(1, positive_B.unsqueeze(1)).squeeze(1)
    return torch.logsumexp(logits_BN, dim=1) - picked_B


def info_nce_of_own(
    queries_BD: Float[Tensor, "B D"],
    candidates_BMD: Float[Tensor, "B M D"],
    mask_BM: Bool[Tensor, "B M"],
    temperature: float,
) -> Float[Tensor, " B"]:
    """InfoNCE where each query has its own M candidates, the first being its positive; see
    `info_nce`.

    Costs B·M products instead of the B·N over all documents of the batch.
    """
    logits_BM = torch.einsum("bd,bmd->bm", queries_BD.float(), candidates_BMD.float())
    logits_BM = (logits_BM / temperature).masked_fill(~mask_BM, -torch.inf)
    return torch.logsumexp(logits_BM, dim=1) - logits_BM[:, 0]
