"""Candidate masks as they were written before there were blocks of rows, for comparison.

b queries of this worker, G of all workers, K negatives a row, N = G·(1 + K) candidate documents:
first the positives of each worker's rows and then their negatives, worker after worker.
Texts and classes are compared by 64-bit hashes; 0 stands for "there is none".
"""

import torch

NONE = 0


def former_batch_candidates(rows, not_negatives, everyone, first_row, rows_per_worker):
    """(b, N) bool mask: candidates of this worker's queries among all documents of the batch.

    True are the row's own positive and own negatives and, for a row that takes part in in-batch
    negatives, the documents of all other rows that do, except: those of a row with the same query,
    texts known to be no negative of the query, the query's own text, positives of a row of the same
    class, and, for a query with a class, the negatives of other rows, whose class is not known.
    Of the documents with the same text the first that is left counts: one that stands in many rows
    would otherwise weigh as much as all of them.

    Args:
        not_negatives: (b, P), as in `own_candidates`; of this worker's rows only.
        first_row: place of this worker's first row among all G rows.
        rows_per_worker: b of every worker.
    """
    num_local, num_all = len(rows.query), len(everyone.query)
    num_negatives = rows.negatives.shape[1]
    local = torch.arange(num_local, device=rows.query.device) + first_row
    owner = torch.arange(num_all, device=rows.query.device)
    own = local.unsqueeze(1) == owner.unsqueeze(0)
    foreign = rows.in_batch.unsqueeze(1) & everyone.in_batch.unsqueeze(0) & ~own
    foreign &= rows.query.unsqueeze(1) != everyone.query.unsqueeze(0)

    no_class = (rows.label == NONE).unsqueeze(1)
    other_class = no_class | (rows.label.unsqueeze(1) != everyone.label.unsqueeze(0))
    allowed = _none_of(not_negatives, everyone.positive)
    positives = own | (foreign & other_class & allowed & _not_the_query(rows, everyone.positive))

    hashes = everyone.negatives.reshape(-1)
    own_negative = own.repeat_interleave(num_negatives, dim=1)
    foreign_negative = foreign.repeat_interleave(num_negatives, dim=1) & no_class
    negatives = own_negative | (foreign_negative & _not_the_query(rows, hashes))
    negatives &= _none_of(not_negatives, hashes)

    texts = torch.cat([everyone.positive, hashes])
    distinct = _once(torch.cat([positives, negatives], dim=1), texts.expand(num_local, -1))
    positives, negatives = distinct[:, :num_all], distinct[:, num_all:]
    blocks = []
    for start in range(0, num_all, rows_per_worker):
        stop = start + rows_per_worker
        blocks.append(positives[:, start:stop])
        blocks.append(negatives[:, start * num_negatives : stop * num_negatives])
    return torch.cat(blocks, dim=1)


def _once(mask, hashes):
    """(b, M) bool mask without repetitions of a hash."""
    # Equal hashes side by side, in their order; a place stays if it is the first of its run.
    ordered, order = hashes.sort(dim=1, stable=True)
    seen = mask.gather(1, order).int()
    before = seen.cumsum(1) - seen
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    before_run = torch.where(starts, before, 0).cummax(1).values
    kept = seen.bool() & (before == before_run)
    return torch.zeros_like(mask).scatter(1, order, kept)


def _none_of(not_negatives, hashes):
    """(b, M) bool mask of existing texts that the row does not exclude.

    Args:
        not_negatives: (b, P).
        hashes: (M) or (b, M).
    """
    # By binary search: comparing all P of a clustered batch takes as many passes over (b, M).
    ordered = not_negatives.sort(dim=1).values
    wanted = hashes.expand(len(not_negatives), -1).contiguous()
    places = torch.searchsorted(ordered, wanted).clamp(max=ordered.shape[1] - 1)
    return (wanted != NONE) & (ordered.gather(1, places) != wanted)


def _not_the_query(rows, hashes):
    """(b, M) bool mask of texts that differ from the row's query."""
    return rows.query.unsqueeze(1) != hashes.unsqueeze(0)
