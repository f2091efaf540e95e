"""Collect the top-k documents of each query while parts of the corpus are searched.

Q queries, k results, R entries.
"""

import numpy as np

_BEHIND = 4.0
"""Taken off the score of a document that is not looked at again. Products of unit vectors are from
-1 to 1, of quantised ones hardly more."""


class BestDocuments:
    """Collector of each query's k best documents among all (query, document, score) entries
    added.

    Ties go to the lower document, so that the outcome does not depend on the order of the pieces.

    Args:
        candidates: of each query's best, so many are put in the order of a second look, and the
            others stay behind them; 0: there is none.
    """

    def __init__(self, num_queries: int, k: int, candidates: int = 0) -> None:
        self._num_queries, self._k = num_queries, max(k, candidates)
        self._candidates = candidates
        self._query = np.empty(0, np.int32)
        self._document = np.empty(0, np.int64)
        self._score = np.empty(0, np.float32)
        self._again = np.empty(0, np.float32)
        self._waiting: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self._num_waiting = 0
        self.lowest: np.ndarray | None = None
        """(Q,) float32: a document below has no place among the k best of what was collected;
        `-inf` for a query with fewer than k. None: nothing is known of any query."""

    def add(
        self,
        query: np.ndarray,
        document: np.ndarray,
        score: np.ndarray,
        again: np.ndarray | None = None,
    ) -> None:
        """Add (R,) entries, with their rescored similarities if the search rescores."""
        self._waiting.append((query, document, score, score if again is None else again))
        self._num_waiting += len(query)
        # Sorting costs as much as what it sorts; as many new ones as old keep it rare.
        if self._num_waiting >= self._num_queries * self._k:
            self._sort_out()

    def results(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, documents and scores (R,) of the best documents, by increasing query, then
        decreasing score.
        """
        self._sort_out()
        if not self._candidates:
            return self._query, self._document, self._score
        first = np.searchsorted(self._query, np.arange(self._num_queries))
        looked_at = np.arange(len(self._query)) - first[self._query] < self._candidates
        score = np.where(looked_at, self._again, self._score - _BEHIND).astype(np.float32)
        order = _best_first(self._query, score, self._document)
        return self._query[order], self._document[order], score[order]

    def _sort_out(self) -> None:
        if not self._waiting:
            return
        query = np.concatenate([self._query, *(entry[0] for entry in self._waiting)])
        document = np.concatenate([self._document, *(entry[1] for entry in self._waiting)])
        score = np.concatenate([self._score, *(entry[2] for entry in self._waiting)])
        again = np.concatenate([self._again, *(entry[3] for entry in self._waiting)])
        self._waiting, self._num_waiting = [], 0
        order = _best_first(query, score, document)
        query = query[order]
        first = np.searchsorted(query, np.arange(self._num_queries))
        rank = np.arange(len(query)) - first[query]
        kept = order[rank < self._k]
        self._query = query[rank < self._k]
        self._document, self._score, self._again = document[kept], score[kept], again[kept]
        self.lowest = np.full(self._num_queries, -np.inf, np.float32)
        last = rank == self._k - 1
        self.lowest[query[last]] = score[order[last]]


def _best_first(query: np.ndarray, score: np.ndarray, document: np.ndarray) -> np.ndarray:
    """Indices that sort (R,) entries by increasing query, decreasing score, increasing
    document.

    One key of 64 bits is sorted, several times faster than three keys; few scores are equal.
    """
    # Bits of floats rise with them, but for the sign; a zero has one sign only.
    bits = (score + np.float32(0)).view(np.uint32)
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    key = (query.astype(np.uint64) << np.uint64(32)) | (~rising).astype(np.uint64)
    order = np.argsort(key)
    same = key[order[1:]] == key[order[:-1]]
    if same.any():
        tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
        among = order[tied]
        order[tied] = among[np.lexsort((document[among], key[among]))]
    return order
