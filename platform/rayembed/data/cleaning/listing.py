"""Listings of removed rows for review: each row with the row or text that it matched.

folder/removed/*.parquet    the rows of `SCHEMA`; the folder reads as one table
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pyarrow as pa

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic

NEAR_DUPLICATE = "near-duplicate"
OVERLAP = "text of a benchmark"

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("query", pa.string()),
        ("positive", pa.string()),  # the first
        ("origin", pa.list_(pa.string())),  # as of the record
        ("reason", pa.string()),
        ("matched", pa.string()),  # the other row's id, or the benchmark's task or file
        ("matched_text", pa.string()),
        ("similarity", pa.float32()),  # 1: equal
    ]
)

_SHOWN_CHARACTERS = 500
_EXAMPLES = 10
_EXAMPLES_OF_FILE = 3


@dataclass(frozen=True)
class RemovedRows:
    """Rows that a step removes."""

    positions: np.ndarray
    """(n,) int64 positions among all rows, ascending."""
    examples: list[dict[str, Any]]
    """Some of the listed rows, for the manifest."""


def shown(text: str) -> str:
    """Beginning of a text, enough to recognise it in a listing."""
    return text[:_SHOWN_CHARACTERS]


def write_removed(folder: str, name: str, rows: pa.Table) -> list[dict[str, Any]]:
    """Write all removed rows as one listing file; returns some of them.

    Args:
        folder: of the records.
        rows: of `SCHEMA`; no file is written for none.
    """
    if len(rows):
        path = join(folder, "removed", f"{name}.parquet")
        write_atomic(path, parquet_bytes(rows.select(SCHEMA.names).cast(SCHEMA)))
    return list(rows.slice(0, _EXAMPLES_OF_FILE).to_pylist())


def some(examples: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The first examples, up to the number that a manifest shows for each reason."""
    return list(islice(chain.from_iterable(examples), _EXAMPLES))
