"""Cleaning of converted rows: exact duplicates, near-duplicates and benchmark texts are removed.

Each step looks at the rows that earlier steps left; samples are drawn from the final rows. Removed
rows stay in the parts until all are known, so that parts are rewritten once. Texts of benchmarks
are looked up in queries and positives.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.mining import Overlap
from rayembed.data.artifacts import ArtifactWriter, PipelineContext
from rayembed.data.cleaning.bm25 import EvaluationIndex, Match, open_index, write_index
from rayembed.data.cleaning.evaluation_texts import find_sources, read_texts
from rayembed.data.cleaning.near_duplicates import find_near_duplicates
from rayembed.data.cleaning.rows import (
    BYTES_OF_A_ROW,
    DUPLICATE,
    NEAR_DUPLICATE,
    NOT_DRAWN,
    OVERLAP,
    SCHEMA,
    KeepRows,
    RemovedRows,
    RowsOfPart,
    drawn,
    first_of_each,
    rows_of_parts,
    shown,
    some,
    write_removed,
)
from rayembed.data.index import read_column
from rayembed.data.parts import Part, read_table
from rayembed.data.plan.scratch import mapped, scratch_folder
from rayembed.data.work_items import Execute, Result, run_resumable
from rayembed.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CleanedRows:
    """Rows of a data set after cleaning."""

    parts: list[list[Any]]
    """Name and row count of each part, in order."""
    dropped: dict[str, int]
    """Reason → number of removed rows."""
    removed: list[dict[str, Any]]
    """Examples from the listing of removed rows."""


def clean(
    context: PipelineContext, dataset: DatasetConfig, writer: ArtifactWriter, parts: Sequence[Part]
) -> CleanedRows:
    """Remove duplicates and benchmark texts; parts that lose rows are rewritten.

    Near-duplicates and texts of benchmarks are listed in the folder `removed`. A bit and a byte of
    each row are in memory here, and the rows that go; hashes are in a file.

    Raises:
        StorageFullError: this machine has too little scratch for so many rows.
        AssetError, ConfigError, DataError: evaluation texts cannot be had.
        DataError: no row stays.
    """
    size = BYTES_OF_A_ROW * sum(part.rows for part in parts)
    with scratch_folder(f"the cleaning of data set {dataset.name!r}", size) as scratch:
        return _clean(context, dataset, writer, parts, scratch)


def _clean(
    context: PipelineContext,
    dataset: DatasetConfig,
    writer: ArtifactWriter,
    parts: Sequence[Part],
    scratch: Path,
) -> CleanedRows:
    name, execute = dataset.name, context.execute
    folder, working = writer.folder, writer.working_folder
    id_hash = mapped(scratch / "ids", sum(part.rows for part in parts), np.int64)
    read_column(parts, "id_hash", id_hash)
    keep = first_of_each(id_hash, scratch)
    dropped = {DUPLICATE: len(keep) - int(keep.sum())}
    removed: list[dict[str, Any]] = []
    if (near := dataset.cleaning.near_duplicates) is not None:
        gone = find_near_duplicates(folder, working, name, near, parts, keep, id_hash, execute)
        keep[gone.positions] = False
        dropped[NEAR_DUPLICATE] = len(gone.positions)
        removed += gone.examples
    if (overlap := dataset.cleaning.overlap) is not None:
        gone = find_overlap(folder, working, name, overlap, context.root, parts, keep, execute)
        keep[gone.positions] = False
        dropped[OVERLAP] = len(gone.positions)
        removed += gone.examples
    left = int(keep.sum())
    if not left:
        told = ", ".join(f"{count} × {reason}" for reason, count in dropped.items() if count)
        raise DataError(
            f"data set {name!r}: cleaning leaves none of its {len(keep)} rows ({told}); see "
            f"{folder}/removed and loosen its settings cleaning.near_duplicates or cleaning.overlap"
        )
    wanted = dataset.num_samples
    if dataset.sample_share is not None:
        wanted = max(1, round(dataset.sample_share * left))
    keep = drawn(id_hash, keep, wanted, context.seed)
    dropped[NOT_DRAWN] = left - int(keep.sum())
    if dataset.num_samples is not None and left < dataset.num_samples:
        log.warning(
            "data set %s: num_samples is %d, but there are only %d rows; all are taken",
            *(name, dataset.num_samples, left),
        )
    dropped = {reason: count for reason, count in dropped.items() if count}
    if not dropped:
        return CleanedRows([[part.name, part.rows] for part in parts], {}, [])
    items = rows_of_parts(parts, keep)
    done = run_resumable(folder, f"select {name}", KeepRows(writer.parts_folder), items, execute)
    return CleanedRows([item for result in done for item in result["parts"]], dropped, removed)


def overlap_identity(config: Overlap | None, root: str) -> list[list[str]]:
    """Names and versions of all sources of evaluation texts; part of the cleaning's fingerprint.

    Empty if rows are not compared.

    Raises:
        ConfigError: a name that is neither a task nor a benchmark nor a file.
        ArtifactError: a file cannot be read.
    """
    if config is None:
        return []
    return [[source.name, source.version] for source in find_sources(config.tasks, root)]


def find_overlap(
    folder: str,
    working: str,
    name: str,
    config: Overlap,
    root: str,
    parts: Sequence[Part],
    keep: np.ndarray,
    execute: Execute,
) -> RemovedRows:
    """Find rows with evaluation texts and list them.

    Args:
        folder: keeps the tasks' results and the listing.
        working: keeps the index.
        name: of the data set, for the log.
        root: where relative paths of files start.
        keep: (rows,) bool of the rows to look at.

    Raises:
        AssetError, ConfigError, DataError: the evaluation texts cannot be had.
    """
    index = join(working, "evaluation-texts")
    sources = find_sources(config.tasks, root)
    write_index(index, ((source.name, read_texts(source)) for source in sources))
    items = rows_of_parts(parts, keep)
    task = FindOverlap(folder, index, config.max_similarity)
    results = run_resumable(folder, f"overlap {name}", task, items, execute)
    found = [
        item.first + np.array(result["overlap"], dtype=np.int64)
        for item, result in zip(items, results, strict=True)
    ]
    gone = np.concatenate([np.empty(0, dtype=np.int64), *found])
    log.info("overlap %s: %d of %d rows go", name, len(gone), int(keep.sum()))
    return RemovedRows(gone, some(result["listed"] for result in results))


@dataclass(frozen=True)
class FindOverlap:
    """Task: find the rows of a part whose query or a positive is an evaluation text."""

    folder: str
    index: str
    max_similarity: float | None

    def __call__(self, item: RowsOfPart) -> Result:
        """Report `overlap` (ascending rows within the part) and `listed` examples."""
        index = _index(self.index, self.max_similarity)
        columns = ["id", "query", "positives", "origin"]
        records = read_table(item.part.path, columns).take(pa.array(item.rows)).to_pylist()
        texts = [[row["query"], *row["positives"]] for row in records]
        matches = index.match([text for some in texts for text in some])
        first = np.cumsum([0, *(len(some) for some in texts)])
        gone, listed = [], []
        for i, row in enumerate(records):
            best = _best(matches[first[i] : first[i + 1]])
            if best is not None:
                gone.append(int(item.rows[i]))
                listed.append(_listed(row, best, index))
        table = pa.Table.from_pylist(listed, SCHEMA)
        examples = write_removed(self.folder, f"overlap-{item.key}", table)
        rows = len(item.rows)
        counts = {"rows_in": rows, "rows_out": rows, "rejected": {}}
        return {**counts, "overlap": gone, "listed": examples}


def _best(matches: Sequence[Match | None]) -> Match | None:
    found = [match for match in matches if match is not None]
    return max(found, key=lambda match: match.similarity, default=None)


def _listed(row: dict[str, object], match: Match, index: EvaluationIndex) -> dict[str, object]:
    query, positives = row["query"], row["positives"]
    assert isinstance(query, str)
    assert isinstance(positives, list)
    return {
        "id": row["id"],
        "query": shown(query),
        "positive": shown(positives[0]),
        "origin": row["origin"],
        "reason": OVERLAP,
        "matched": index.texts["source"][match.place].as_py(),
        "matched_text": shown(index.texts["text"][match.place].as_py()),
        "similarity": match.similarity,
    }


@lru_cache(maxsize=1)
def _index(folder: str, max_similarity: float | None) -> EvaluationIndex:
    return open_index(folder, max_similarity)
