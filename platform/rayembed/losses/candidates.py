"""Candidate masks: which documents of a global batch each query is compared with.

b queries of this worker, G of all workers, K negatives a row, N = G·(1 + K) candidate documents:
first the positives of each worker's rows and then their negatives, worker after worker.
Texts, whose case and white space do not count, and classes are compared by 64-bit hashes; 0 stands
for "there is none".
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NONE = 0


@dataclass(frozen=True)
class Rows:
    """Hashes and flags of a batch's rows, as int64 and bool tensors."""

    query: Tensor
    """(b,) hashes of the queries' texts."""
    positive: Tensor
    """(b,) hashes of the positives' texts."""
    negatives: Tensor
    """(b, K) hashes of the negatives' texts, 0 for missing ones."""
    label: Tensor
    """(b,) hashes of data set and class, 0 without a class."""
    in_batch: Tensor
    """(b,) bool: the row takes part in in-batch negatives, as query and with its documents."""

    def each(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        """Apply a function to each tensor, and return the new `Rows`."""
        return Rows(**{name: change(value) for name, value in vars(self).items()})


def num_repeated(everyone: Rows) -> Tensor:
    """Number of candidate documents whose text occurs several times, as a scalar tensor."""
    text = torch.cat([everyone.positive, everyone.negatives.flatten()])
    ordered = text.sort().values
    return _in_several(ordered, _begins(ordered)).sum()


def own_candidates(rows: Rows, not_negatives: Tensor) -> Tensor:
    """(b, 1 + K) bool mask of each query's positive and of its hard negatives that exist and are
    not excluded.

    Of several negatives with the same text the first one counts.

    Args:
        not_negatives: (b, P) hashes of all texts that are no negatives of the query, its known
            positives and false negatives; 0 where a row has fewer.
    """
    negatives = _none_of(not_negatives, rows.negatives)
    first = torch.ones_like(rows.positive, dtype=torch.bool).unsqueeze(1)
    return torch.cat([first, _once(negatives, rows.negatives)], dim=1)


@dataclass(frozen=True)
class Columns:
    """The N candidate documents of a global batch, with the data from which the candidate mask of
    any row is made.
    """

    owner: Tensor
    """(N,) row of the batch that a document belongs to."""
    is_positive: Tensor
    """(N,) bool."""
    text: Tensor
    """(N,) hashes of the documents' texts, 0 for a missing negative."""
    query: Tensor
    """(N,) hashes of the owners' queries."""
    label: Tensor
    """(N,) hashes of the owners' classes, 0 without a class."""
    in_batch: Tensor
    """(N,) bool: the owner takes part in in-batch negatives."""
    ordered: Tensor
    """(N,) hashes of the documents in ascending order."""
    place: Tensor
    """(N,) first index of a document's hash in `ordered`."""
    repeated: Tensor
    """(R,) columns whose text occurs several times, grouped by text: positives first, then by row.
    """
    begins: Tensor
    """(R,) bool: the first column of its text."""

    @classmethod
    def of(cls, everyone: Rows, rows_per_worker: int, repeated: int | None = None) -> "Columns":
        """Collect the candidate documents from the rows of all workers.

        Args:
            rows_per_worker: b of every worker.
            repeated: what `num_repeated` says; None: the host waits until the device has told it.
        """
        num_rows, num_negatives = everyone.negatives.shape
        row = torch.arange(num_rows, device=everyone.query.device)
        start = row // rows_per_worker * (rows_per_worker * (1 + num_negatives))
        slot = row % rows_per_worker
        negative = torch.arange(num_negatives, device=row.device)
        first_negative = start + rows_per_worker + slot * num_negatives
        # In the order in which a text's columns count: positives before negatives.
        column = torch.cat([start + slot, (first_negative.unsqueeze(1) + negative).flatten()])
        text = torch.cat([everyone.positive, everyone.negatives.flatten()])
        owner = torch.cat([row, row.repeat_interleave(num_negatives)])
        ordered, order = text.sort(stable=True)
        begins = _begins(ordered)
        several = _in_several(ordered, begins)
        if repeated is None:
            repeated = int(several.sum())
        found = several.nonzero_static(size=repeated).squeeze(1)

        def by_column(values: Tensor) -> Tensor:
            return torch.empty_like(values).scatter_(0, column, values)

        owner, text = by_column(owner), by_column(text)
        return cls(
            owner=owner,
            is_positive=by_column(torch.arange(len(column), device=row.device) < num_rows),
            text=text,
            query=everyone.query[owner],
            label=everyone.label[owner],
            in_batch=everyone.in_batch[owner],
            ordered=ordered,
            place=torch.searchsorted(ordered, text),
            repeated=column[order[found]],
            begins=begins[found],
        )

    def without(self, texts: Tensor) -> Tensor:
        """(b, N) bool mask of the documents that exist and whose text is not among the row's (b, P)
        `texts`.
        """
        last = len(self.ordered)
        places = torch.searchsorted(self.ordered, texts).clamp(max=last - 1)
        there = self.ordered[places] == texts
        out = torch.zeros(len(texts), last + 1, dtype=torch.bool, device=texts.device)
        out.scatter_(1, torch.where(there, places, last), True)
        return ~out[:, self.place] & (self.text != NONE)


def batch_candidates(
    rows: Rows,
    not_negatives: Tensor,
    columns: Columns,
    first_row: int,
    allowed: Tensor | None = None,
) -> Tensor:
    """(b, N) bool mask of the documents of the batch that count as candidates of these rows'
    queries.

    True are the row's own positive and own negatives and, for a row that takes part in in-batch
    negatives, the documents of all other rows that do, except: those of a row with the same query,
    texts known to be no negative of the query, the query's own text, positives of a row of the same
    class, and, for a query with a class, the negatives of other rows, whose class is not known.
    Of the documents with the same text the first that is left counts: one that stands in many rows
    would otherwise weigh as much as all of them.

    Args:
        rows: one after the other in the batch.
        not_negatives: (b, P), as in `own_candidates`; of these rows only.
        first_row: place of the first of these rows among all G rows.
        allowed: (b, N) bool, further documents that are left out are False; None: no further ones.
    """
    row = torch.arange(len(rows.query), device=rows.query.device) + first_row
    query, label = rows.query.unsqueeze(1), rows.label.unsqueeze(1)
    own = row.unsqueeze(1) == columns.owner
    others = rows.in_batch.unsqueeze(1) & columns.in_batch & (query != columns.query)
    others &= (label == NONE) | (columns.is_positive & (label != columns.label))
    others &= query != columns.text
    mask = (own | others) & columns.without(not_negatives)
    if allowed is not None:
        mask &= allowed
    mask |= own & columns.is_positive
    if len(columns.repeated):
        mask[:, columns.repeated] = _first_of_run(mask[:, columns.repeated], columns.begins)
    return mask


def listed(lists: Tensor, texts: Tensor) -> Tensor:
    """(L, T) bool mask of the `texts` (T,) that stand in each of the `lists` (L, P) of hashes.

    Of a missing text, whose hash is 0, it is False.
    """
    ordered, last = texts.sort().values, len(texts)
    places = torch.searchsorted(ordered, lists.contiguous()).clamp(max=last - 1)
    there = ordered[places] == lists
    out = torch.zeros(len(lists), last + 1, dtype=torch.bool, device=texts.device)
    out.scatter_(1, torch.where(there, places, last), True)
    return out[:, torch.searchsorted(ordered, texts)] & (texts != NONE)


def hard_negatives(rows: Rows, columns: Columns) -> Tensor:
    """(b, N) bool mask of the documents whose text is a hard negative of the row, in whichever row
    it stands.
    """
    return ~columns.without(rows.negatives) & (columns.text != NONE)


def own_documents(rows: Rows) -> Tensor:
    """(b, 1 + K) bool mask of each row's positive and existing negatives, each text once.

    A negative with the positive's text is left out.
    """
    texts = torch.cat([rows.positive.unsqueeze(1), rows.negatives], dim=1)
    return _once(texts != NONE, texts)


def batch_documents(rows: Rows, columns: Columns, first_row: int) -> Tensor:
    """(b, N) bool mask of the documents that these rows' queries are compared with, each
    text once.

    The row's own, and, for a row that takes part in in-batch negatives, those of all other rows
    that do; positives and false negatives are not left out.

    Args:
        rows, first_row: as in `batch_candidates`.
    """
    row = torch.arange(len(rows.query), device=rows.query.device) + first_row
    mask = rows.in_batch.unsqueeze(1) & columns.in_batch
    mask |= row.unsqueeze(1) == columns.owner
    mask &= columns.text != NONE
    if len(columns.repeated):
        mask[:, columns.repeated] = _first_of_run(mask[:, columns.repeated], columns.begins)
    return mask


def above_positive(
    negatives: Tensor, negative_score: Tensor, positive_score: Tensor, margin: float
) -> Tensor:
    """(b, K) hashes of the negatives that a teacher scores above the positive by more than
    `margin`, 0 elsewhere.

    Beside the texts that are known to be no negatives they keep a text out of all columns of its
    query. A negative without a score is not among them.

    Args:
        negatives: (b, K) hashes.
        negative_score: (b, K); NaN where there is none.
        positive_score: (b,); NaN where there is none.
        margin: by how much a score must exceed the positive's.
    """
    above = negative_score > positive_score.unsqueeze(1) + margin
    return negatives.masked_fill(~above, NONE)


def own_places(num_rows: int, first_row: int, num_negatives: int, device: torch.device) -> Tensor:
    """(b, 1 + K) indices, among the N candidates, of the positive and the negatives of this
    worker's rows.
    """
    worker = first_row // max(num_rows, 1)
    start = worker * num_rows * (1 + num_negatives)
    positives = torch.arange(num_rows, device=device).unsqueeze(1)
    negatives = num_rows + torch.arange(num_rows * num_negatives, device=device)
    return torch.cat([positives, negatives.view(num_rows, num_negatives)], dim=1) + start


def _once(mask: Tensor, hashes: Tensor) -> Tensor:
    """(b, M) bool mask that keeps only the first of equal hashes in each row."""
    # Equal hashes side by side, in their order; a place stays if it is the first of its run.
    ordered, order = hashes.sort(dim=1, stable=True)
    kept = _first_of_run(mask.gather(1, order), _begins(ordered))
    return torch.zeros_like(mask).scatter(1, order, kept)


def _begins(ordered: Tensor) -> Tensor:
    """(…, M) bool mask of the first of each run of equal hashes along the last dimension."""
    begins = torch.ones_like(ordered, dtype=torch.bool)
    begins[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    return begins


def _in_several(ordered: Tensor, begins: Tensor) -> Tensor:
    """(M,) bool mask of sorted hashes that occur more than once."""
    alone = begins.clone()
    alone[:-1] &= begins[1:]
    return ~alone & (ordered != NONE)


def _first_of_run(mask: Tensor, begins: Tensor) -> Tensor:
    """(b, M) bool mask that keeps only the first True in each run of columns.

    Args:
        begins: (M) or (b, M) bool, the first column of each run.
    """
    seen = mask.int()
    before = seen.cumsum(1) - seen
    before_run = torch.where(begins, before, 0).cummax(1).values
    return mask & (before == before_run)


def _none_of(not_negatives: Tensor, hashes: Tensor) -> Tensor:
    """(b, K) bool mask of the texts that exist and are not among the row's `not_negatives`.

    Args:
        not_negatives: (b, P).
        hashes: (b, K).
    """
    # By binary search: comparing all P of a clustered batch takes as many passes over (b, K).
    ordered = not_negatives.sort(dim=1).values
    places = torch.searchsorted(ordered, hashes.contiguous()).clamp(max=ordered.shape[1] - 1)
    return (hashes != NONE) & (ordered.gather(1, places) != hashes)
