"""Save rows from the caller's memory as a Parquet file that is named by its content."""

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import pyarrow as pa

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.config.credentials import check_address
from rayembed.data.sources.cells import looks_like_list
from rayembed.errors import DataError

Rows = Any
"""Pairs of a caller: a path or address of files, a pandas DataFrame, a `datasets.Dataset`, or an
iterable of tuples (query, positive), (query, positive, negatives) or (text, text, score), or of
dicts."""

_PLACE = "given"


def rows_file(rows: Rows, storage: str) -> str:
    """Return the path of the rows: the given path itself, or a Parquet file below `storage` written
    from rows in memory.

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
    """Convert the rows to a table with every column that any row has; see `rows_file`."""
    if isinstance(rows, Mapping) and hasattr(rows, "with_format"):  # datasets.DatasetDict
        names = ", ".join(map(repr, rows))
        raise DataError(
            f"rows is a data set with several splits ({names}); pass one of them, such as "
            "rows['train']"
        )
    if hasattr(rows, "column_names") and hasattr(rows, "with_format"):  # datasets.Dataset
        table = rows.with_format("arrow")[:] if hasattr(rows, "__len__") else None
        table = _of_python(list(rows)) if table is None else table
    elif hasattr(rows, "columns") and hasattr(rows, "iloc"):  # pandas
        table = _of_pandas(rows)
    elif isinstance(rows, Iterable) and not isinstance(rows, Mapping | bytes):
        table = _of_python(list(rows))
    else:
        raise DataError(
            "rows must be a path, a DataFrame, a datasets.Dataset, or a list of tuples or dicts, "
            f"not {type(rows).__name__}"
        )
    if not table.num_rows:
        raise DataError("there are no rows: the list or table is empty")
    _check_lists(table)
    plain = [
        field.with_type(pa.string()) if pa.types.is_large_string(field.type) else field
        for field in table.schema  # pandas' texts, for equal rows to be one file
    ]
    return table.cast(pa.schema(plain))


def _of_pandas(rows: Any) -> pa.Table:
    names = [str(name) for name in rows.columns]
    _check_names(names)
    columns = {}
    for place, name in enumerate(names):
        cells = rows.iloc[:, place]

        def convert(start: int, stop: int, cells: Any = cells) -> pa.Array:
            return pa.array(cells.iloc[start:stop], from_pandas=True)

        columns[name] = _column(name, cells.iloc, len(cells), convert)
    return pa.table(columns)


def _of_python(rows: Sequence[Any]) -> pa.Table:
    for number, row in enumerate(rows):
        kinds = Mapping if isinstance(rows[0], Mapping) else (tuple, list)
        if not isinstance(row, kinds) or isinstance(row, str):
            raise DataError(
                f"row {number} is {_shown(row)}; either all rows must be tuples such as (query, "
                "positive), or all must be dicts"
            )
    if not rows or isinstance(rows[0], Mapping):
        return _of_dicts(rows)
    width = len(rows[0])
    graded = width == 3 and isinstance(rows[0][2], Real)
    names = ("sentence1", "sentence2", "score") if graded else ("query", "positive", "negatives")
    values: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        scored = len(row) == 3 and isinstance(row[2], Real)
        if width < 2:
            raise DataError(
                f"row {number} is {_shown(row)}; a row must be (query, positive), (query, "
                "positive, negatives) or (text, text, score)"
            )
        if (graded and not scored) or (not graded and scored) or len(row) != width:
            wanted = "(text, text, score)" if graded else f"a tuple of {width} items"
            raise DataError(
                f"row {number} is {_shown(row)}, but it must be {wanted}, like the first row"
            )
        if graded:
            values.append(dict(zip(names, (row[0], row[1], float(row[2])), strict=True)))
            continue
        negatives = [text for item in row[2:] for text in _texts(item, number)]
        # Numbers count as texts, as in files.
        query, positive = (str(one) if _is_number(one) else one for one in row[:2])
        given = {"query": query, "positive": positive}
        values.append({**given, "negatives": negatives} if width > 2 else given)
    for number, row in enumerate(values):
        for name in names[:2]:
            if row[name] is not None and not isinstance(row[name], str):
                raise DataError(f"row {number}: {name} is {_shown(row[name])}, not a text")
    return _of_dicts(values)


def _of_dicts(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    names = list(dict.fromkeys(name for row in rows for name in row))
    other = next((name for name in names if not isinstance(name, str)), None)
    if other is not None:
        raise DataError(f"the column name {other!r} is not a string; use strings as column names")
    columns = {}
    for name in names:
        cells = [row.get(name) for row in rows]

        def convert(start: int, stop: int, cells: list[Any] = cells) -> pa.Array:
            return pa.array(cells[start:stop])

        columns[name] = _column(name, cells, len(cells), convert)
    return pa.table(columns)


def _column(name: str, cells: Any, rows: int, convert: Callable[[int, int], pa.Array]) -> pa.Array:
    """Convert the cells of one column to an Arrow array.

    Args:
        cells: gives the cell of a row.
        convert: makes an array of the rows from a first one to before a last one.

    Raises:
        DataError: it cannot; the message names the first row that does not go with those before.
    """
    try:
        name.encode()
        return convert(0, rows)
    except _NOT_ARROW as error:
        stops = range(1, rows + 1)
        row = bisect_left(stops, True, key=lambda stop: not _goes(convert, 0, stop))
        told = f"row {row}: {name!r} is {_shown(cells[row])}" if row < rows else f"column {name!r}"
        if isinstance(error, UnicodeError):
            raise DataError(
                f"{told}: it contains half of a surrogate pair, which is not valid Unicode; "
                "repair or remove it"
            ) from None
        why = "does not go with the rows above; a column holds values of one kind"
        if row < rows and not _goes(convert, row, row + 1):
            why = f"is no text, number or list of them ({error})"
        raise DataError(f"{told}, which {why}") from None


_NOT_ARROW = (pa.ArrowException, UnicodeError, OverflowError, TypeError, ValueError)
"""Errors of Arrow for values that it cannot convert."""


def _goes(convert: Callable[[int, int], pa.Array], start: int, stop: int) -> bool:
    try:
        convert(start, stop)
    except _NOT_ARROW:
        return False
    return True


def _check_names(names: Sequence[str]) -> None:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise DataError(f"two columns are named {twice!r}; rename or remove one")


def _check_lists(table: pa.Table) -> None:
    """Raise if a list of negatives is a text such as "['a', 'b']", as pandas reads it from a CSV
    file.
    """
    cells = table["negatives"].to_pylist() if "negatives" in table.column_names else []
    for number, text in enumerate(cells):
        _check_is_no_list(text, number)


def _check_is_no_list(item: Any, number: int) -> None:
    if isinstance(item, str) and looks_like_list(item):
        raise DataError(
            f"row {number}: the negatives are {_shown(item)}, a list that was written as a text; "
            "convert it to a list first, with json.loads or ast.literal_eval"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _texts(item: Any, number: int) -> list[str]:
    _check_is_no_list(item, number)
    texts = [item] if isinstance(item, str) else item
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise DataError(
            f"row {number}: negatives must be texts or a list of texts, not {_shown(item)}"
        )
    return list(texts)


def _shown(value: Any) -> str:
    text = repr(value).encode("utf-8", "replace").decode()
    return text if len(text) < 80 else f"{text[:77]}…"
