"""How many rows a source may lose: counts of rejected rows, and whether they are too many."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rayembed.config.data import DatasetConfig
from rayembed.data.sources.tasks import NOT_BAD
from rayembed.data.work_items import Result, add_up
from rayembed.errors import DataError

_EXAMPLES_SHOWN = 5


def told_of(results: Sequence[Result]) -> dict[str, Any]:
    """Manifest entries on rows and records, from results."""
    rows_in, made, rejected = add_up(results)
    examples = [example for result in results for example in result["examples"]]
    return {
        "rows_in": rows_in,
        "records_made": made,
        "rejected": rejected,
        "examples": examples[:_EXAMPLES_SHOWN],
    }


def accept(dataset: DatasetConfig, told: Mapping[str, Any]) -> None:
    """Raise when there are too few rows or too many bad ones.

    The share in the settings is not part of the folder's name, so that raising it needs no new
    conversion.

    Args:
        told: a manifest, or as much of it as `told_of` gives.
    """
    rows_in, rows_out, rejected = told["rows_in"], told["records_made"], told["rejected"]
    path, tolerated = dataset.source.place, NOT_BAD | dataset.source.tolerated
    shown = "".join(f"\n  {e['reason']}: {e['row']}" for e in told["examples"][:_EXAMPLES_SHOWN])
    counts = counts_of(rejected)
    if rows_out == 0:
        raise DataError(
            f"data set {dataset.name!r} is empty: {path!r} has {rows_in} rows, none usable "
            f"({counts or 'no rows at all'}){shown}"
        )
    bad = sum(count for reason, count in rejected.items() if reason not in tolerated)
    share = getattr(dataset.source, "max_rejected_share", 1.0)
    if bad > share * rows_in:
        raise DataError(
            f"data set {dataset.name!r}: {bad} of {rows_in} rows of {path!r} were rejected "
            f"({counts}), more than the share {share:g} that may be. Mend them, or set "
            f"data.datasets.{dataset.name}.source.max_rejected_share to "
            f"{math.ceil(100 * bad / rows_in) / 100:g} or more. For instance:{shown}"
        )


def counts_of(rejected: Mapping[str, int]) -> str:
    """Counts of rejected rows by reason, in words."""
    return ", ".join(f"{count:,} × {reason}" for reason, count in rejected.items())
