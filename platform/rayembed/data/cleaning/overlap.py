"""Remove benchmark texts from converted rows and from the corpus of hard-negative mining.

They are looked up in queries and positives, whose rows go, where settings say so in hard negatives,
which go from their rows, in documents of a corpus of its own, and in what a source draws from.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.config.mining import Overlap
from rayembed.data.cleaning.bm25 import EvaluationIndex, Match, open_index, write_index
from rayembed.data.cleaning.evaluation_texts import (
    GramIndex,
    find_sources,
    open_grams,
    read_texts,
    share_contained,
    write_grams,
)
from rayembed.data.cleaning.rows import (
    CONTAINED,
    OVERLAP,
    SCHEMA,
    SCHEMA_OF_DOCUMENTS,
    RemovedRows,
    RowsOfPart,
    rows_of_parts,
    shown,
    some,
    write_removed,
)
from rayembed.data.engine.parts import Part, PartItem, read_table
from rayembed.data.engine.work_items import Execute, Result, run_resumable
from rayembed.data.hashes import text_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundOverlap:
    """Rows and hard negatives to remove because they are or contain benchmark texts."""

    rows: RemovedRows
    contained: int
    """Number of these rows that contain a benchmark text within a longer one."""
    negatives: np.ndarray
    """(m, 2) int64 position of a row that is kept, and index of a negative to remove from it."""


@dataclass(frozen=True)
class FoundDocuments:
    """Corpus documents that are or contain a benchmark text, each distinct text once."""

    hashes: np.ndarray
    """(m,) int64 hashes of their texts, ascending."""
    counts: dict[str, int]
    """Reason → number of texts, without zeros."""
    examples: list[dict[str, Any]]
    """Examples from the listing, for the manifest."""


def overlap_identity(config: Overlap | None, root: str) -> list[list[str]]:
    """Return names and versions of all sources of evaluation texts, for the fingerprint of the
    cleaned data.

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
) -> FoundOverlap:
    """Find the rows and hard negatives to remove because of evaluation texts, and write a listing
    of the rows.

    Args:
        folder: keeps the tasks' results and the listing.
        working: keeps the index.
        name: of the data set, for the log.
        root: where relative paths of files start.
        keep: (rows,) bool of the rows to look at.

    Raises:
        AssetError, ConfigError, DataError: the evaluation texts cannot be had.
    """
    items = rows_of_parts(parts, keep)
    task = FindOverlap(folder, _write_texts(working, config, root), config)
    results = run_resumable(folder, f"overlap {name}", task, items, execute)
    gone, negatives = [np.empty(0, dtype=np.int64)], [np.empty((0, 2), dtype=np.int64)]
    for item, result in zip(items, results, strict=True):
        gone.append(item.first + np.array(result["overlap"], dtype=np.int64))
        found = np.array(result.get("negatives", []), dtype=np.int64).reshape(-1, 2)
        negatives.append(found + np.array([item.first, 0]))
    positions, removed = np.concatenate(gone), np.concatenate(negatives)
    contained = sum(int(result.get("contained", 0)) for result in results)
    log.info(
        "data set %s: removing %d of %d rows, because they are or contain benchmark texts",
        name,
        len(positions),
        int(keep.sum()),
    )
    if config.negatives:
        log.info(
            "data set %s: removing %d hard negatives from the remaining rows, because they are or "
            "contain benchmark texts",
            name,
            len(removed),
        )
    examples = some(result.get("examples", []) for result in results)
    return FoundOverlap(RemovedRows(positions, examples), contained, removed)


def find_in_documents(
    folder: str,
    working: str,
    name: str,
    config: Overlap,
    root: str,
    parts: Sequence[Part],
    execute: Execute,
) -> FoundDocuments:
    """Find the corpus documents that are or contain an evaluation text, and write a listing of
    them.

    Args:
        folder: keeps the listing.
        working: keeps the index and the tasks' results.
        name: of the data set, for the log.
        root: where relative paths of files start.
        parts: of documents.

    Raises:
        AssetError, ConfigError, DataError: the evaluation texts cannot be had.
    """
    task = FindInDocuments(folder, _write_texts(working, config, root), config)
    items = [PartItem(part) for part in parts]
    results = run_resumable(working, f"overlap of documents {name}", task, items, execute)
    by_reason = {
        reason: np.unique(np.array([h for r in results for h in r["found"][reason]], np.int64))
        for reason in (OVERLAP, CONTAINED)
    }
    counts = {reason: len(hashes) for reason, hashes in by_reason.items() if len(hashes)}
    hashes = np.sort(np.concatenate(list(by_reason.values())))
    log.info(
        "mining corpus of data set %s: %d texts (of %d documents) are or contain benchmark texts "
        "and are excluded from mining",
        *(name, len(hashes), sum(part.rows for part in parts)),
    )
    return FoundDocuments(hashes, counts, some(result["examples"] for result in results))


def drop_overlap(working: str, name: str, config: Overlap, root: str, path: str) -> str:
    """Copy a Parquet file without the rows whose text is or contains an evaluation text.

    Args:
        working: keeps the index and the new file.
        name: of the data set, for the log.
        root: where relative paths of files start.
        path: of a Parquet file with a column `text`.

    Returns:
        Path of the new file.

    Raises:
        AssetError, ConfigError, DataError: the evaluation texts cannot be had.
    """
    index = _index(_write_texts(working, config, root), config)
    table = read_table(path)
    found = index.best([[text] for text in table["text"].to_pylist()])
    left = table.filter(pa.array([match is None for match in found], pa.bool_()))
    gone = len(table) - len(left)
    log.info(
        "data set %s: removing %d of %d example texts of its class labels, because they are or "
        "contain benchmark texts",
        name,
        gone,
        len(table),
    )
    content = parquet_bytes(left)
    new = join(working, f"left-{xxhash.xxh3_128_hexdigest(content)}.parquet")
    write_atomic(new, content)
    return new


def _write_texts(working: str, config: Overlap, root: str) -> str:
    """Write the index and the n-grams of the evaluation texts unless they exist; return their
    folder.
    """
    index = join(working, "evaluation-texts")
    sources = find_sources(config.tasks, root)
    write_index(index, ((source.name, read_texts(source)) for source in sources))
    if config.contained is not None:
        write_grams(index, open_index(index, None).texts["text"].to_pylist(), config.contained)
    return index


@dataclass(frozen=True)
class FindOverlap:
    """Task: find the rows of a part to remove because of evaluation texts, and the hard negatives
    to remove from its other rows.
    """

    folder: str
    index: str
    config: Overlap

    def __call__(self, item: RowsOfPart) -> Result:
        """Return `overlap` (row numbers to remove, ascending), how many of these only `contained` a
        benchmark text, `negatives` to remove (row, index) and `examples`.
        """
        index = _index(self.index, self.config)
        columns = ["id", "query", "positives", "origin"]
        columns += ["negatives.list.element.text"] if self.config.negatives else []
        chosen = item.rows
        records = read_table(item.part.path, columns).take(pa.array(chosen)).to_pylist()
        gone, listed = [], []
        for row, best in enumerate(index.best([[r["query"], *r["positives"]] for r in records])):
            if best is not None:
                gone.append(row)
                listed.append(_listed(records[row], best, index))
        table = pa.Table.from_pylist(listed, SCHEMA)
        examples = write_removed(self.folder, f"overlap-{item.key}", table)
        rows = len(chosen)
        result: Result = {
            "rows_in": rows,
            "rows_out": rows,
            "rejected": {},
            "overlap": chosen[gone].tolist(),
            "examples": examples,
        }
        if self.config.contained is not None:
            result["contained"] = sum(row["reason"] == CONTAINED for row in listed)
        if self.config.negatives:
            rest = sorted(set(range(rows)).difference(gone))
            given = [
                (row, place, negative["text"])
                for row in rest
                for place, negative in enumerate(records[row]["negatives"] or ())
            ]
            matches = index.best([[text] for *_, text in given])
            result["negatives"] = [
                [int(chosen[row]), place]
                for (row, place, _), match in zip(given, matches, strict=True)
                if match is not None
            ]
        return result


@dataclass(frozen=True)
class FindInDocuments:
    """Task: find the documents of a part that are or contain an evaluation text."""

    folder: str
    index: str
    config: Overlap

    def __call__(self, item: PartItem) -> Result:
        """Return the hashes of the texts `found`, grouped by reason, and `examples` of them."""
        index = _index(self.index, self.config)
        texts = read_table(item.part.path, ["text"])["text"].to_pylist()
        found: dict[str, list[int]] = {OVERLAP: [], CONTAINED: []}
        listed = []
        for text, best in zip(texts, index.best([[text] for text in texts]), strict=True):
            if best is not None:
                found[best[0]].append(text_hash(text))
                listed.append({"document": shown(text), **_told(best, index)})
        table = pa.Table.from_pylist(listed, SCHEMA_OF_DOCUMENTS)
        name = f"documents-{item.key}"
        examples = write_removed(self.folder, name, table, SCHEMA_OF_DOCUMENTS)
        return {"found": found, "examples": examples}


@dataclass(frozen=True)
class _Index:
    texts: EvaluationIndex
    grams: GramIndex | None
    settings: Overlap

    def best(self, rows: Sequence[Sequence[str]]) -> list[tuple[str, Match] | None]:
        """Return for each row the reason to remove it and the closest evaluation text; None for a
        row to keep.
        """
        flat = [text for texts in rows for text in texts]
        found: list[tuple[str, Match] | None] = [
            None if match is None else (OVERLAP, match) for match in self.texts.match(flat)
        ]
        if self.grams is not None and self.settings.contained is not None:
            rest = [i for i, match in enumerate(found) if match is None]
            places = self.grams.find([flat[i] for i in rest]).tolist()
            for i, place in zip(rest, places, strict=True):
                if place >= 0:
                    text = self.texts.texts["text"][place].as_py()
                    share = share_contained(flat[i], text, self.settings.contained)
                    found[i] = CONTAINED, Match(place, share)
        ends = np.cumsum([0, *map(len, rows)])
        return [_closest(found[a:b]) for a, b in pairwise(ends.tolist())]


def _closest(found: Sequence[tuple[str, Match] | None]) -> tuple[str, Match] | None:
    matches = [match for match in found if match is not None]
    return max(matches, key=lambda m: (m[0] == OVERLAP, m[1].similarity), default=None)


def _listed(row: dict[str, object], found: tuple[str, Match], index: _Index) -> dict[str, object]:
    query, positives = row["query"], row["positives"]
    assert isinstance(query, str)
    assert isinstance(positives, list)
    return {
        "id": row["id"],
        "query": shown(query),
        "positive": shown(positives[0]),
        "origin": row["origin"],
        **_told(found, index),
    }


def _told(found: tuple[str, Match], index: _Index) -> dict[str, object]:
    """Return the columns of a listing that explain why a text is removed: reason, matched text and
    similarity.
    """
    reason, match = found
    return {
        "reason": reason,
        "matched": index.texts.texts["source"][match.place].as_py(),
        "matched_text": shown(index.texts.texts["text"][match.place].as_py()),
        "similarity": match.similarity,
    }


@lru_cache(maxsize=1)
def _index(folder: str, config: Overlap) -> _Index:
    texts = open_index(folder, config.max_similarity)
    return _Index(texts, open_grams(folder) if config.contained is not None else None, config)
