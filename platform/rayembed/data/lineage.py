"""From a batch plan to the folders that its rows went through, kept beside the plan."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rayembed.assets.storage import exists, join, read_bytes, write_atomic
from rayembed.data.prepared import Prepared

LINEAGE = "lineage.json"

_KEPT = ("kind", "fingerprint", "inputs", "rows_in", "rejected", "records_made", "dropped")


def write_lineage(plan_folder: str, steps: Mapping[str, Sequence[Prepared]]) -> None:
    """Write `lineage.json` where it is not there yet: each data set's folders, first to last.

    Of each folder its address and what its manifest says of inputs and rows.
    """
    path = join(plan_folder, LINEAGE)
    if exists(path):
        return
    found = {
        name: [
            {
                "folder": prepared.folder,
                **{key: prepared.manifest[key] for key in _KEPT},
                "rows_out": prepared.manifest["rows_out"],
            }
            for prepared in folders
        ]
        for name, folders in sorted(steps.items())
    }
    content = json.dumps(found, indent=1, ensure_ascii=False).encode()
    write_atomic(path, content)


def read_lineage(plan_folder: str) -> dict[str, list[dict[str, Any]]]:
    """What `write_lineage` wrote.

    Raises:
        ArtifactError: the plan has none.
    """
    found: dict[str, list[dict[str, Any]]] = json.loads(read_bytes(join(plan_folder, LINEAGE)))
    return found
