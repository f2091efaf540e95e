"""Negatives of directions besides query to document, from the rows of all workers.

b rows of this worker or of a block, G of all workers, N candidate documents, P known texts of a
row, D embedding width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from rayembed.distributed.collectives import gather, gather_with_gradient, largest
from rayembed.losses.candidates import NONE, Columns, Rows, batch_candidates, listed
from rayembed.losses.contract import Direction, FurtherNegatives, similarities


@dataclass(frozen=True)
class OtherRows:
    """Queries of all workers, and the data that says which rows may be pushed apart."""

    queries: Tensor
    """(G, D) with gradient."""
    documents: Columns
    """The N candidate documents."""
    as_documents: Columns
    """The G queries in the place of documents."""
    known: Tensor
    """(G, P) hashes of the texts that are no negatives of each query, padded with 0."""

    @classmethod
    def of(
        cls, everyone: Rows, not_negatives: Tensor, queries: Tensor, documents: Columns
    ) -> "OtherRows":
        """Gather what the directions need; workers wait for each other.

        Args:
            everyone: rows of all workers.
            not_negatives: (b, P') hashes of this worker's rows, as in `own_candidates`.
            queries: (b, D) of this worker's rows.
        """
        rows, known = not_negatives.shape
        missing = largest(known, not_negatives.device) - known
        return cls(
            gather_with_gradient(queries),
            documents,
            Columns.of(_exchanged(everyone), rows),
            gather(functional.pad(not_negatives, (0, missing), value=NONE)),
        )

    def negatives(
        self,
        directions: Sequence[Direction],
        rows: Rows,
        not_negatives: Tensor,
        first_row: int,
        queries: Tensor,
        positives: Tensor,
        documents: Tensor,
    ) -> list[FurtherNegatives]:
        """Return the negatives of each direction for a block of rows.

        Rows are never pushed apart if the query or the trained positive of one is among the known
        texts of the other. All else is as among the candidates: rows without in-batch negatives,
        with an equal query or positive or of the same class are left out, an equal text counts
        once, and the row's own documents do not count.

        Args:
            rows, not_negatives, first_row: as in `batch_candidates`.
            queries, positives: (b, D) of these rows.
            documents: (N, D) of all workers.
        """
        known = torch.cat([rows.query.unsqueeze(1), not_negatives], dim=1)
        related = listed(self.known, rows.positive).T | listed(self.known, rows.query).T
        related |= listed(known, self.as_documents.query) | listed(known, self.as_documents.text)
        row = torch.arange(len(queries), device=queries.device).unsqueeze(1) + first_row

        def of_queries(anchors: Tensor) -> FurtherNegatives:
            mask = batch_candidates(
                _exchanged(rows), known, self.as_documents, first_row, allowed=~related
            )
            return FurtherNegatives(anchors, self.queries, mask.scatter(1, row, False))

        def of_documents() -> FurtherNegatives:
            # A negative of a related row answers neither query.
            apart = ~(related[:, self.documents.owner] & self.documents.is_positive)
            own = torch.cat([known, rows.negatives], dim=1)
            mask = batch_candidates(rows, own, self.documents, first_row, allowed=apart)
            return FurtherNegatives(positives, documents, mask & (row != self.documents.owner))

        made: dict[Direction, Callable[[], FurtherNegatives]] = {
            "document_to_query": lambda: of_queries(positives),
            "query_to_query": lambda: of_queries(queries),
            "document_to_document": of_documents,
        }
        return [made[direction]() for direction in directions]


def not_above(negatives: FurtherNegatives, limit: Tensor) -> FurtherNegatives:
    """Leave out the negatives whose cosine exceeds the row's limit (b, 1)."""
    with torch.no_grad():
        below = similarities(negatives.anchors_BD, negatives.others_ND) <= limit
    return replace(negatives, mask_BN=negatives.mask_BN & below)


def _exchanged(rows: Rows) -> Rows:
    """Rows whose queries stand in the place of their positives, and the reverse."""
    return Rows(rows.positive, rows.query, rows.negatives[:, :0], rows.label, rows.in_batch)
