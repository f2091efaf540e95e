"""Sort search results by falling score, then by rising id; entries without a result come last."""

import torch
from torch import Tensor

NO_RESULT = -1
"""Id in empty result slots when the corpus has fewer than k documents."""


def in_order(scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sort scores and ids (Q, k) by falling score, then by rising id with `NO_RESULT` last."""
    place = torch.where(ids == NO_RESULT, torch.iinfo(torch.int64).max, ids)
    order = torch.argsort(place, dim=1, stable=True)
    scores, ids = scores.gather(1, order), ids.gather(1, order)
    order = torch.argsort(scores, dim=1, descending=True, stable=True)
    return scores.gather(1, order), ids.gather(1, order)


def best_in_order(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the k best of (Q, n) scores with their ids, n ≥ k, sorted as by `in_order`."""
    values, columns = scores.sort(dim=1, descending=True)
    found = ids.gather(1, columns)
    # Equal scores are rare; only their rows are put in order by id.
    reach = min(k + 1, values.shape[1])
    tied = (values[:, 1:reach] == values[:, : reach - 1]).any(1)
    if tied.any():
        values[tied], found[tied] = in_order(values[tied], found[tied])
    return values[:, :k], found[:, :k]


def merged(kept: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two lists of results of the same queries; keep as many results of each query as `kept`
    has.
    """
    scores, ids = torch.cat([kept[0], found[0]], 1), torch.cat([kept[1], found[1]], 1)
    return best_in_order(scores, ids, kept[0].shape[1])


def best_columns(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Select the min(k, n) best of (Q, n) scores, sorted; return scores and columns.

    Of the columns that tie for the last places, the lowest.
    """
    k = min(k, scores.shape[1])
    values, columns = torch.topk(scores, min(k + 1, scores.shape[1]), dim=1)
    if values.shape[1] > k:
        # topk takes any of the columns that tie for the last places: put in the lowest ones.
        last, beyond = values[:, k - 1], values[:, k]
        values, columns = values[:, :k].contiguous(), columns[:, :k].contiguous()
        for row in torch.nonzero(last == beyond).flatten().tolist():
            taken = int((values[row] == last[row]).sum())
            lowest = torch.nonzero(scores[row] == last[row]).flatten()[:taken]
            columns[row, k - taken :] = lowest
    return best_in_order(values, columns, k)
