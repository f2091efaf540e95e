"""Negatives from the rows themselves as the only candidates (`pool = given`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rayembed.config.mining import Teacher
from rayembed.data.parts import read_records
from rayembed.data.records import Record
from rayembed.data.vectors.embed import PartItem, Vectors, finite
from rayembed.data.vectors.teacher import Encoder, load_teacher
from rayembed.data.work_items import Result
from rayembed.search.order import NO_RESULT

_PAIRS_AT_A_TIME = 8192


@dataclass(frozen=True)
class EmbedGiven:
    """Task: embed the distinct negatives that a part's rows bring."""

    vectors: Vectors
    config: Teacher
    load: Callable[[Teacher, str, str], Encoder] = load_teacher

    def __call__(self, item: PartItem, device: str = "cpu") -> Result:
        """Report counts of rows; existing vectors are not recomputed."""
        rows = item.part.rows
        if not self.vectors.has_given(item.part):
            texts = given_texts(read_records(item.part.path))
            encoder = self.load(self.config, self.vectors.weights, device)
            made = finite(self.config, texts, encoder(texts, "document"))
            self.vectors.save_given(item.part, made)
        return {"rows_in": rows, "rows_out": rows, "rejected": {}}


def given_texts(records: Sequence[Record]) -> list[str]:
    """Distinct negatives of the records, in order of first occurrence."""
    return list(dict.fromkeys(n.text for record in records for n in record.negatives))


def given_lists(
    records: Sequence[Record], queries: np.ndarray, given: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and ids of each row's own negatives, best first, in the format of
    `search.exact.top_k`.

    Args:
        queries: (Q, D) of unit length.
        given: (G, D) in the order of `given_texts`, whose places are the ids.
    """
    place_of = {text: place for place, text in enumerate(given_texts(records))}
    own = [list(dict.fromkeys(place_of[n.text] for n in record.negatives)) for record in records]
    row = np.repeat(np.arange(len(own)), np.array([len(places) for places in own], dtype=np.int64))
    column = np.array([c for places in own for c in range(len(places))], dtype=np.int64)
    document = np.array([place for places in own for place in places], dtype=np.int64)
    shape = (len(own), max(map(len, own), default=0))
    scores = np.full(shape, -np.inf, dtype=np.float32)
    ids = np.full(shape, NO_RESULT, dtype=np.int64)
    ids[row, column] = document
    for start in range(0, len(row), _PAIRS_AT_A_TIME):
        some = slice(start, start + _PAIRS_AT_A_TIME)
        of_queries = queries[row[some]].astype(np.float32)
        found = (of_queries * given[document[some]].astype(np.float32)).sum(1)
        scores[row[some], column[some]] = found
    order = np.argsort(-scores, axis=1, kind="stable")
    return np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
