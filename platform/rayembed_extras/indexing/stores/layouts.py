"""Layouts of tables as JSON, and checks of rows and queries, for all stores."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rayembed.errors import ArtifactError, ConfigError
from rayembed_extras.indexing.store import VECTOR, Layout, SearchResults


def layout_values(layout: Layout) -> dict[str, Any]:
    """Values of a layout for a JSON file; see `layout_from`."""
    return {
        "dimensions": layout.dimensions,
        "number_type": layout.number_type,
        "scale": layout.scale,
        "has_text": layout.has_text,
        "metadata": base64.b64encode(pa.schema(layout.metadata).serialize()).decode(),
    }


def layout_from(values: Mapping[str, Any]) -> Layout:
    """Layout of the values that `layout_values` gives.

    Raises:
        ArtifactError: they are incomplete or broken.
    """
    try:
        metadata = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(values["metadata"])))
        return Layout(
            int(values["dimensions"]),
            values["number_type"],
            {field.name: field.type for field in metadata},
            bool(values["has_text"]),
            float(values["scale"]),
        )
    except (KeyError, TypeError, ValueError, pa.ArrowException) as error:
        raise ArtifactError(f"the layout of a table is broken: {error!r}") from error


def check_layout(table: str, present: Layout, wanted: Layout) -> None:
    """Check that an existing table has the wanted columns.

    Raises:
        ConfigError: it has others; the message has the first difference.
    """
    for of, one, two in (
        ("dimensions", present.dimensions, wanted.dimensions),
        ("number type", present.number_type, wanted.number_type),
        ("scale of int8", present.scale, wanted.scale),
        ("text", present.has_text, wanted.has_text),
        ("metadata columns", dict(present.metadata), dict(wanted.metadata)),
    ):
        if one != two:
            raise ConfigError(
                f"the table {table} exists with other columns ({of}: {one}, wanted: {two}); "
                "build a new table"
            )


def checked_rows(table: str, rows: pa.Table, layout: Layout) -> pa.Table:
    """Return rows with exactly the columns and types of a layout.

    Raises:
        ConfigError: names or types differ.
    """
    schema = layout.schema
    wanted = {field.name: field.type for field in schema}
    given = {field.name: field.type for field in rows.schema}
    if wanted == given and len(given) == rows.num_columns:
        return rows.select(schema.names).cast(schema)
    if given.get(VECTOR, wanted[VECTOR]) != wanted[VECTOR]:
        raise ConfigError(
            f"the table {table} has vectors of {layout.dimensions} dimensions as "
            f"{wanted[VECTOR]}, but the rows have {given[VECTOR]}"
        )
    columns = sorted(name for name in {*wanted, *given} if wanted.get(name) != given.get(name))
    raise ConfigError(
        f"the rows for the table {table} have other columns or types: {', '.join(columns)}; "
        f"it has {', '.join(schema.names)}"
    )


def checked_queries(table: str, queries: np.ndarray, dimensions: int) -> np.ndarray:
    """Return (Q, D) queries in float32.

    Raises:
        ConfigError: they have another width than the table's vectors.
    """
    if queries.ndim != 2 or queries.shape[1] != dimensions:
        raise ConfigError(
            f"the table {table} has vectors of {dimensions} dimensions, but the queries have the "
            f"shape {queries.shape}; embed them by the model of the index"
        )
    return np.ascontiguousarray(queries, np.float32)


def padded(found: Sequence[tuple[Sequence[str], np.ndarray]], k: int) -> SearchResults:
    """Results of Q queries, each at most k ids and their scores, best first, as `Found`."""
    scores = np.full((len(found), k), -np.inf, np.float32)
    ids: list[list[str]] = []
    for row, (of_query, values) in enumerate(found):
        scores[row, : len(of_query)] = values
        ids.append([*of_query, *[""] * (k - len(of_query))])
    return SearchResults(ids, scores)
