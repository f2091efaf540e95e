"""Rows that a caller has in memory, as a file of the storage that is named by what it holds."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.credentials import check_address
from rayembed.errors import DataError

Rows = Any
"""Pairs of a caller: a path or address of files, a pandas DataFrame, a `datasets.Dataset`, or an
iterable of tuples (query, positive), (query, positive, negatives) or (text, text, score), or of
dicts."""

_PLACE = "given"


def rows_file(rows: Rows, storage: str) -> str:
    """Path of the rows: that of files as it is, of rows in memory a Parquet file below `storage`.

    Columns keep their names; of tuples they are `query`, `positive` and `negatives`, or
    `sentence1`, `sentence2` and `score`. Equal rows are one file.

    Raises:
        ConfigError: the path is an address with a password, key or token.
        DataError: no rows, or rows that are not alike; the message names the first.
    """
    if isinstance(rows, str | Path):
        text = str(rows)
        check_address(text, "the path of the rows")
        return text if "://" in text else str(Path(text).expanduser().absolute())
    table = table_of_rows(rows)
    data = parquet_bytes(table)
    path = join(storage, "data", _PLACE, f"{hashlib.sha256(data).hexdigest()[:16]}.parquet")
    # What it should be is at hand: a file that has changed since is written anew.
    if not exists(path) or read_bytes(path) != data:
        write_atomic(path, data)
    return path


def table_of_rows(rows: Rows) -> pa.Table:
    """The rows as a table; see `rows_file`."""
    if isinstance(rows, Mapping) and hasattr(rows, "with_format"):  # datasets.DatasetDict
        names = ", ".join(map(repr, rows))
        raise DataError(f"rows has several splits ({names}); give one of them, as in rows['train']")
    if hasattr(rows, "column_names") and hasattr(rows, "with_format"):  # datasets.Dataset
        table = rows.with_format("arrow")[:] if hasattr(rows, "__len__") else None
        table = pa.Table.from_pylist(list(rows)) if table is None else table
    elif hasattr(rows, "columns") and hasattr(rows, "iloc"):  # pandas
        table = pa.Table.from_pandas(rows, preserve_index=False)
    elif isinstance(rows, Iterable):
        table = _of_python(list(rows))
    else:
        raise DataError(
            f"rows are a path, a DataFrame, a datasets.Dataset, or a list of tuples or dicts, not "
            f"{type(rows).__name__}"
        )
    if not table.num_rows:
        raise DataError("there are no rows: the list or table is empty")
    plain = [
        field.with_type(pa.string()) if pa.types.is_large_string(field.type) else field
        for field in table.schema  # pandas' texts, for equal rows to be one file
    ]
    return table.cast(pa.schema(plain))


def _of_python(rows: Sequence[Any]) -> pa.Table:
    for number, row in enumerate(rows):
        kinds = Mapping if isinstance(rows[0], Mapping) else (tuple, list)
        if not isinstance(row, kinds) or isinstance(row, str):
            raise DataError(
                f"row {number} is {_shown(row)}; rows are tuples such as (query, positive), or all "
                "of them dicts with the same keys"
            )
    if not rows or isinstance(rows[0], Mapping):
        try:
            return pa.Table.from_pylist([dict(row) for row in rows])
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"a column holds values of several kinds: {error}") from None
    width = len(rows[0])
    graded = width == 3 and isinstance(rows[0][2], int | float)
    names = ("sentence1", "sentence2", "score") if graded else ("query", "positive", "negatives")
    values: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        scored = len(row) == 3 and isinstance(row[2], int | float)
        if len(row) < 2 or (graded and not scored) or (not graded and scored) or len(row) != width:
            wanted = "(text, text, score)" if graded else f"as long as the first one, {width}"
            raise DataError(f"row {number} is {_shown(row)}, but the first row asks for {wanted}")
        if graded:
            values.append(dict(zip(names, (row[0], row[1], float(row[2])), strict=True)))
            continue
        negatives = [text for item in row[2:] for text in _texts(item)]
        # Numbers count as texts, as in files.
        query, positive = (str(one) if _is_number(one) else one for one in row[:2])
        given = {"query": query, "positive": positive}
        values.append({**given, "negatives": negatives} if width > 2 else given)
    for number, row in enumerate(values):
        for name in names[:2]:
            if row[name] is not None and not isinstance(row[name], str):
                raise DataError(f"row {number}: {name} is {_shown(row[name])}, not a text")
    return pa.Table.from_pylist(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(item: Any) -> list[str]:
    texts = [item] if isinstance(item, str) else item
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise DataError(f"negatives are texts or a list of texts, not {_shown(item)}")
    return list(texts)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}…"
