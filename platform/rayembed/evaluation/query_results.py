"""Store the score and the best documents of each query beside mteb's scores of a retrieval
task.

mteb writes a list with one item a line, so a query's documents are one text: ids separated by
spaces, spaces and percent signs within them encoded as in addresses.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from rayembed.results.scores import OF_QUERIES

BEST_OF_QUERIES = "best_10_of_queries"
"""Id of each query and of its ten best documents, in the order of `OF_QUERIES`."""

DEPTH = 10
"""Documents of each query that are kept: those that nDCG@10 reads."""

_BETWEEN = re.compile(r"[%\s]")


@dataclass(frozen=True)
class QueryResult:
    """Score and best documents of one query."""

    score: float
    """nDCG@10."""
    best: tuple[str, ...]
    """Ids of at most `DEPTH` documents, the best first."""

    def rank_of(self, document: str) -> int | None:
        """Rank of a document, counted from 1; None if it is not among the best ones."""
        return self.best.index(document) + 1 if document in self.best else None


def entries(
    scores: Mapping[str, Mapping[str, float]], found: Mapping[str, Mapping[str, float]]
) -> dict[str, Any]:
    """Make the entries of a retrieval task's result that hold its queries' scores and best
    documents.

    Args:
        scores: of each query, by the names of trec_eval.
        found: score of each retrieved document, by query.
    """
    names = sorted(scores)
    return {
        OF_QUERIES: [scores[query]["ndcg_cut_10"] for query in names],
        BEST_OF_QUERIES: [_line(query, found[query]) for query in names],
    }


def _line(query: str, found: Mapping[str, float]) -> str:
    # As trec_eval sorts what it judges: by float32 scores, equal ones by falling id.
    ordered = sorted(found, key=lambda document: (np.float32(found[document]), document))
    return " ".join(_BETWEEN.sub(_encoded, name) for name in (query, *ordered[: -DEPTH - 1 : -1]))


def _encoded(match: re.Match[str]) -> str:
    return quote(match[0])


def query_results(entry: Mapping[str, Any]) -> dict[str, QueryResult]:
    """Read the results of one split's and subset's queries, by query id; empty where none are
    stored.
    """
    if BEST_OF_QUERIES not in entry or OF_QUERIES not in entry:
        return {}
    rows = ([unquote(name) for name in line.split(" ")] for line in entry[BEST_OF_QUERIES])
    return {
        query: QueryResult(float(score), tuple(best))
        for score, (query, *best) in zip(entry[OF_QUERIES], rows, strict=True)
    }
