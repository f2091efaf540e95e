"""Lineage: traces a batch back to source rows, with the processing steps in between.

A plan names the folder that each data set's rows came from, and each folder names its parent, up to
the converted records; see `prepare` for their locations.
"""

import posixpath
from dataclasses import dataclass
from typing import Any

from rayembed.assets.storage import exists, join
from rayembed.data.artifacts import MANIFEST, DatasetArtifact, open_artifact
from rayembed.data.plan.audit import negatives_warning
from rayembed.data.plan.batch_plan import BatchPlan
from rayembed.data.records import Negative
from rayembed.data.sources.unread import unread_warning
from rayembed.errors import ArtifactError

_TOLD = (
    *("kind", "fingerprint", "inputs"),
    *("rows_in", "rejected", "records_made", "dropped", "rows_out"),
)

_KINDS = ("clustered", "mined", "filtered", "records", "synthetic")


@dataclass(frozen=True)
class RowLineage:
    """Origin of one row of a batch."""

    slot: int
    dataset: str
    record: str
    """Record id."""
    origin: tuple[str, ...]
    """Source rows that the record was made from."""
    negatives: tuple[Negative, ...]
    """Negatives that the plan kept, each with rank, score, rule and teacher."""
    chain: tuple[DatasetArtifact, ...]
    """Folders of the data set, from the one that the plan read back to the converted records. Their
    manifests have settings, teachers, counts and rejections."""


def lineage(plan: BatchPlan, step: int) -> list[RowLineage]:
    """Lineage of each row of a global batch, in slot order.

    Raises:
        DataError: no such step.
        ArtifactError: the plan was made of other parts than those of `prepare`, or a folder that it
            was made of is not there any more.
    """
    records = plan.read(step)
    chains = folders_of(plan)
    return [
        RowLineage(slot, r.dataset, r.id, r.origin, r.negatives, chains[r.dataset])
        for slot, r in enumerate(records)
    ]


def folders_of(plan: BatchPlan) -> dict[str, tuple[DatasetArtifact, ...]]:
    """Data set → its folders, from the one that the plan read back to the converted records.

    Raises:
        ArtifactError: as `lineage`.
    """
    inputs = dict(plan.manifest["inputs"])
    missing = sorted(set(plan.manifest["datasets"]) - set(inputs))
    if missing:
        raise ArtifactError(
            f"the batch plan {plan.folder!r} does not tell what its data set {missing[0]!r} was "
            "made of; only plans that `prepare` wrote do"
        )
    base, question, query = plan.folder.partition("?")
    storage = posixpath.dirname(posixpath.dirname(base.rstrip("/"))) + question + query
    return {name: _chain(storage, name, str(found)) for name, found in inputs.items()}


def _chain(storage: str, dataset: str, fingerprint: str) -> tuple[DatasetArtifact, ...]:
    found: list[DatasetArtifact] = []
    wanted: str | None = fingerprint
    while wanted is not None:
        folders = [join(storage, "data", kind, f"{dataset}-{wanted}") for kind in _KINDS]
        folder = next((f for f in folders if exists(join(f, MANIFEST))), None)
        if folder is None:
            raise ArtifactError(
                f"there is no folder of the records {dataset}-{wanted} below "
                f"{join(storage, 'data')!r}; it was removed, or the plan was copied without it"
            )
        found.append(open_artifact(folder))
        wanted = found[-1].manifest["inputs"].get("records")
    return tuple(found)


def data_warnings(plan_folder: str) -> list[str]:
    """Warnings that preparation ended with: data that the stage's settings request and the rows
    lack, and columns that no setting reads.

    Raises:
        ArtifactError: as `lineage`.
    """
    plan = BatchPlan.open(plan_folder)
    lines = [unread_warning(chain[-1].manifest) for chain in folders_of(plan).values()]
    return [line for line in [*lines, negatives_warning(plan)] if line is not None]


def data_provenance(plan_folder: str) -> dict[str, list[dict[str, Any]]]:
    """Data set → its folders in order, with the inputs and row counts of their manifests.

    Stored with a model's run: plain values that remain when the folders are deleted.

    Raises:
        ArtifactError: as `lineage`.
    """
    return {
        name: [
            {"folder": one.folder, **{key: one.manifest[key] for key in _TOLD}}
            for one in reversed(chain)
        ]
        for name, chain in folders_of(BatchPlan.open(plan_folder)).items()
    }
