"""Cleaning of converted rows: removes exact duplicates and texts of benchmarks.

Other packages add removals (`CLEANERS`), which are done between these two.

Each step looks at the rows that earlier steps left; samples are drawn from the final rows. Removed
rows stay in the parts until all are known, so that parts are rewritten once.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rayembed.config.data import DatasetConfig
from rayembed.data.cleaning.overlap import find_overlap
from rayembed.data.cleaning.rows import (
    BYTES_OF_A_ROW,
    CONTAINED,
    DUPLICATE,
    NO_SCORES,
    NOT_DRAWN,
    OVERLAP,
    KeepRows,
    averaged,
    drawn,
    first_of_each,
    rows_of_parts,
)
from rayembed.data.engine.artifacts import ArtifactWriter, PipelineContext
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import Part
from rayembed.data.engine.work_items import run_resumable
from rayembed.data.plan.scratch import mapped, scratch_folder
from rayembed.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CleanedRows:
    """A data set's Parquet parts after cleaning, with the counts and examples of removed rows."""

    parts: list[list[Any]]
    """Name and row count of each part, in order."""
    dropped: dict[str, int]
    """Reason → number of removed rows."""
    removed: list[dict[str, Any]]
    """Examples from the listing of removed rows."""
    negatives: int = 0
    """Number of hard negatives with benchmark texts that were removed from the rows."""
    averaged: int = 0
    """Number of graded pairs whose rows had different scores."""


def clean(
    context: PipelineContext, dataset: DatasetConfig, writer: ArtifactWriter, parts: Sequence[Part]
) -> CleanedRows:
    """Remove duplicates and benchmark texts, and rewrite the Parquet parts that lose rows.

    All that goes but exact duplicates is listed in the folder `removed`. A bit and a byte of each
    row are in memory here, and the rows that go; hashes are in a file.

    Raises:
        StorageFullError: this machine has too little scratch for so many rows.
        AssetError, ConfigError, DataError: evaluation texts cannot be had.
        DataError: no row stays.
    """
    name, rows = dataset.name, sum(part.rows for part in parts)
    with scratch_folder(f"the cleaning of data set {name!r}", BYTES_OF_A_ROW * rows) as scratch:
        execute = context.execute
        folder, working = writer.folder, writer.working_folder
        id_hash = mapped(scratch / "ids", rows, np.int64)
        read_column(parts, "id_hash", id_hash)
        keep = first_of_each(id_hash, scratch)
        dropped = {DUPLICATE: len(keep) - int(keep.sum())}
        scores = NO_SCORES
        if dataset.source.is_graded and dropped[DUPLICATE]:
            scores = averaged(parts, id_hash, keep)
        if len(scores):
            log.warning(
                "data set %s: %d pairs occur in several rows with different scores; each is kept "
                "once with the mean score",
                *(name, len(scores)),
            )
        removed: list[dict[str, Any]] = []
        negatives = np.empty((0, 2), dtype=np.int64)
        for cleaner in dataset.cleaning.cleaners:
            gone = cleaner.find(writer, parts, keep, id_hash, execute)
            keep[gone.positions] = False
            dropped[cleaner.reason] = len(gone.positions)
            removed += gone.examples
        if (overlap := dataset.cleaning.overlap) is not None:
            found = find_overlap(folder, working, name, overlap, context.root, parts, keep, execute)
            keep[found.rows.positions] = False
            dropped[OVERLAP] = len(found.rows.positions) - found.contained
            dropped[CONTAINED] = found.contained
            removed += found.rows.examples
            negatives = found.negatives
        left = int(keep.sum())
        if not left:
            told = ", ".join(f"{count} × {reason}" for reason, count in dropped.items() if count)
            raise DataError(
                f"data set {name!r}: cleaning removes all of its {len(keep)} rows ({told}); see "
                f"{folder}/removed and loosen data.datasets.{name}.cleaning"
            )
        wanted = dataset.num_samples
        if dataset.sample_share is not None:
            wanted = max(1, round(dataset.sample_share * left))
        keep = drawn(id_hash, keep, wanted, context.seed)
        dropped[NOT_DRAWN] = left - int(keep.sum())
        if dataset.num_samples is not None and left < dataset.num_samples:
            log.warning(
                "data set %s: num_samples is %d, but there are only %d rows; all are used",
                *(name, dataset.num_samples, left),
            )
    dropped = {reason: count for reason, count in dropped.items() if count}
    negatives = negatives[keep[negatives[:, 0]]]
    scores = scores[keep[scores["row"]]]
    if not dropped and not len(negatives):
        return CleanedRows([[part.name, part.rows] for part in parts], {}, [])
    items = rows_of_parts(parts, keep, negatives, scores)
    done = run_resumable(folder, f"select {name}", KeepRows(writer.parts_folder), items, execute)
    made = [item for result in done for item in result["parts"]]
    return CleanedRows(made, dropped, removed, len(negatives), len(scores))
