"""Tabulate the contents of a storage."""

import time
from collections.abc import Sequence

from rayembed.display.tables import MISSING, Table
from rayembed_extras.clean_runs.contents import PARTS, StoredRun
from rayembed_extras.clean_runs.inventory import Inventory

_NAMED = 3
"""Maximum number of run names in a cell."""


def runs_table(runs: Sequence[StoredRun], artifacts: Sequence[int | None]) -> Table:
    """Tabulate runs and sweeps: state, date and bytes of their parts.

    Args:
        artifacts: bytes of each in MLflow; None: not known here.
    """
    parts = [part for part in PARTS if any(run.parts[part] for run in runs)]
    rows = []
    for run, in_mlflow in zip(runs, artifacts, strict=True):
        name = run.name if run.kind == "runs" else f"{run.name} (sweep)"
        rows.append(
            [
                name,
                run.state,
                time.strftime("%Y-%m-%d %H:%M", time.localtime(run.written)),
                *(shown_size(run.parts[part]) for part in parts),
                MISSING if in_mlflow is None else shown_size(in_mlflow),
                shown_size(run.num_bytes + (in_mlflow or 0)),
            ]
        )
    heads = ["run", "state", "date", *parts, "MLflow", "all"]
    return Table(heads, rows, align="lllr", look="open")


def data_table(inventory: Inventory) -> Table:
    """Tabulate plans, data folders and folders of teachers' vectors: bytes and the runs that use
    them.
    """
    used, new = inventory.used(inventory.runs), inventory.new()
    rows = []
    for one in inventory.prepared:
        users = used.get(one.place, [])
        state = {"unfinished": "unfinished", "removed": "half removed"}.get(one.state)
        if one.place in new:
            state = "no run yet"
        rows.append([one.place, shown_size(one.num_bytes), state or _names(users)])
    sizes: dict[str, list[int]] = {}
    users_of: dict[str, list[str]] = {}
    for path, size in inventory.vectors.items():
        folder, users = path.rpartition("/")[0], used.get(path, [])
        number = sizes.setdefault(folder, [0, 0])
        number[0] += size
        number[1] += 0 if users else size
        users_of.setdefault(folder, []).extend(users)
    for folder, (size, unused) in sorted(sizes.items()):
        names = list(dict.fromkeys(users_of[folder]))
        rest = f"; {shown_size(unused)} of no run" if unused and names else ""
        rows.append([folder, shown_size(size), _names(names) + rest])
    heads = ["prepared data", "size", "used by"]
    return Table(heads, rows, align="lrl", look="open", folds=True)


def _names(users: Sequence[str]) -> str:
    more = f" and {len(users) - _NAMED} more" if len(users) > _NAMED else ""
    return ", ".join(users[:_NAMED]) + more if users else "no run"


def shown_size(num_bytes: int) -> str:
    """Format a number of bytes with a decimal unit prefix and at most three digits before the
    point.
    """
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
