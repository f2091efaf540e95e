"""ListMLE: the likelihood of the teacher's order of a list.

L lists, M documents of a list.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from rayembed_extras.reranking.losses.contract import ScoredLists, TaughtListLoss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch import Tensor


class ListMLE(TaughtListLoss):
    """Negative log-likelihood of the teacher's order under the Plackett–Luce model of the scores
    (Xia and others, ICML 2008).
    """

    kind: Literal["list_mle"] = "list_mle"

    def of_lists(self, lists: ScoredLists) -> Float[Tensor, " L"]:
        """Compute the mean over the ranks of each list; see `list_mle`."""
        return list_mle(lists.scores_LM, *lists.taught())


def list_mle(
    scores_LM: Float[Tensor, "L M"],
    labels_LM: Float[Tensor, "L M"],
    there_LM: Bool[Tensor, "L M"],
) -> Float[Tensor, " L"]:
    """Mean over ranks i of log Σ_{k ≥ i} exp s_π(k) - s_π(i), where π sorts by falling label; 0
    for a list without documents. Of equal labels the first document comes first.

    The paper sums over ranks; the mean gives lists of all lengths the same weight.
    """
    order_LM = labels_LM.masked_fill(~there_LM, -math.inf).argsort(
        dim=1, descending=True, stable=True
    )
    known_LM = there_LM.gather(1, order_LM)
    sorted_LM = scores_LM.gather(1, order_LM)
    # A finite floor: -inf throughout would give a list without documents NaN as its gradient.
    floor = float("-1e30")
    left_LM = sorted_LM.masked_fill(~known_LM, floor).flip(1).logcumsumexp(dim=1).flip(1)
    terms_LM = (left_LM - sorted_LM).masked_fill(~known_LM, 0.0)
    return terms_LM.sum(dim=1) / known_LM.sum(dim=1).clamp(min=1)
