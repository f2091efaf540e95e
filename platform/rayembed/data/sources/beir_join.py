"""Join judgements with their queries and documents, for a corpus of any size.

    judgements ──► buckets by query          which documents are needed, and in which buckets
    queries    ──► the same buckets
    documents  ──► the buckets of the queries that need them; others are passed over
    a bucket   ──► its queries' records

Memory holds 12 bytes for each judgement, and one bucket.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.array_files import load_array, save_array
from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.data.engine.exchange import Buckets
from rayembed.data.engine.parts import remedy
from rayembed.data.engine.shuffle import Bucket, Scatter, bucket_of
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import text_hash
from rayembed.data.records import reject_reason
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.file_rows import record_of
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.rows import BadRow, read_rows
from rayembed.data.sources.tasks import HeldOut, RecordWriter, converted

NO_QUERY = "query is not among the queries"
NO_DOCUMENT = "document is not in the corpus"
SEVERAL_QUERIES = "several queries have its query's id"
SEVERAL_DOCUMENTS = "several documents have its document's id"

BYTES_OF_JUDGEMENTS_PER_BUCKET = 1 << 20
"""Bytes of judgements in a bucket: about 40,000 of them; their documents are a hundred times as
large."""

LOST_TEXTS = ("texts_unread", "texts_without_id")
"""Counts of corpus and query rows that no judgement can refer to."""

IDS = ("_id", "id")
"""Column names of document and query ids: BEIR's, and mteb's newer one."""

_JUDGEMENTS = pa.schema(
    [("query", pa.string()), ("document", pa.string()), ("origin", pa.string())]
)
_TEXTS = pa.schema([("id", pa.string()), ("text", pa.string()), ("language", pa.string())])
_NEEDED = np.dtype([("hash", np.int64), ("bucket", np.int32)])


@dataclass(frozen=True)
class Scattering:
    """Inputs that all join tasks of one data set share."""

    folder: str
    """Folder of the parts."""
    scattered: str
    dataset: DatasetConfig
    buckets: int
    language: str | None
    """Column of the queries' language."""


@dataclass(frozen=True)
class ScatterJudgements:
    """Task: send each judgement of a piece to the bucket of its query, and list the documents that
    the judgements need.
    """

    shared: Scattering
    columns: tuple[str, ...]
    """Columns to read."""
    judgement: Callable[[Mapping[str, Any]], tuple[str, str]]
    """Function that gives the query and document of a row; raises `RowError`."""

    def __call__(self, item: FilePiece) -> Result:
        """Return names of files with `scattered` rows and `needed` documents; only rejected rows
        are counted here.
        """
        shared = self.shared
        writer = RecordWriter(shared.folder)
        scatter = Scatter(join(shared.scattered, "judgements"), _JUDGEMENTS, shared.buckets)
        needed: set[tuple[int, int]] = set()
        for row, judged in converted(item, self.columns, lambda row: self.judgement(row.values)):
            if isinstance(judged, str):
                writer.reject(judged, row.shown)
                continue
            query, document = judged
            bucket = bucket_of(query, shared.buckets)
            needed.add((text_hash(document), bucket))
            told = {"query": query, "document": document, "origin": row.origin}
            scatter.add(bucket, told)
        name = f"needed-{item.key}.npy"
        save_array(join(shared.scattered, name), np.array(sorted(needed), dtype=_NEEDED))
        return {**writer.finish(), "scattered": scatter.finish(), "needed": name}


@dataclass(frozen=True)
class ScatterTexts:
    """Task: send each query of a piece to the bucket of its id, or each document to the buckets of
    the queries that need it.
    """

    shared: Scattering
    column: str
    """Column of the text."""
    needed: str | None = None
    """Path of the list of needed documents; None if the rows are queries."""

    def __call__(self, item: FilePiece) -> Result:
        """Return names of files with `scattered` rows, and the numbers of rows unreadable
        (`texts_unread`) and without id (`texts_without_id`).
        """
        shared, language = self.shared, self.shared.language
        of = "queries" if self.needed is None else "documents"
        scatter = Scatter(join(shared.scattered, of), _TEXTS, shared.buckets)
        unread = without_id = 0
        columns = [*IDS, self.column, *([language] if language and not self.needed else [])]
        for row in read_rows(item, columns):
            if isinstance(row, BadRow):
                unread += 1
                continue
            try:
                name = id_of(row.values)
                if not name:
                    without_id += 1
                    continue
                buckets = list(self._buckets(name))
                if not buckets:
                    continue
                told = {"id": name, "text": text_in(row.values, self.column)}
                if language and not self.needed:
                    told["language"] = text_in(row.values, language)
            except RowError:
                unread += 1
                continue
            for bucket in buckets:
                scatter.add(bucket, told)
        counts = {"texts_unread": unread, "texts_without_id": without_id}
        return {"scattered": scatter.finish(), **counts}

    def _buckets(self, name: str) -> Iterator[int]:
        if self.needed is None:
            yield bucket_of(name, self.shared.buckets)
            return
        hashes, buckets = _read_needed(self.needed)
        wanted = text_hash(name)
        place = int(np.searchsorted(hashes, wanted))
        while place < len(hashes) and hashes[place] == wanted:
            yield int(buckets[place])
            place += 1


@dataclass(frozen=True)
class ConvertJudged:
    """Task: make one record for each query of a bucket, with all its relevant documents as
    positives.
    """

    shared: Scattering
    judgements: Buckets
    queries: Buckets
    documents: Buckets
    held_out: HeldOut

    def __call__(self, item: Bucket) -> Result:
        """Run the task; its result has `parts`, counts and examples of rejected judgements."""
        queries = _by_id(self.queries.records(item.number))
        documents = _by_id(self.documents.records(item.number))
        by_query: dict[str, list[dict[str, Any]]] = {}
        for row in self.judgements.records(item.number):
            by_query.setdefault(row["query"], []).append(row)
        writer = RecordWriter(self.shared.folder, self.held_out)
        for name, rows in by_query.items():
            query = queries.get(name)
            if query is None:
                why = SEVERAL_QUERIES if name in queries else NO_QUERY
                writer.reject(why, rows[0], len(rows))
                continue
            known = []
            for row in rows:
                problem = _problem(query, row["document"], documents)
                if problem is None:
                    known.append(row)
                else:
                    writer.reject(problem, row)
            if known:
                self._take(writer, query, known, documents)
        return writer.finish()

    def _take(
        self,
        writer: RecordWriter,
        query: Mapping[str, Any],
        rows: Sequence[Mapping[str, Any]],
        documents: "_ById",
    ) -> None:
        found = dict.fromkeys(row["document"] for row in rows)
        texts = [document["text"] for name in found if (document := documents[name])]
        origin = [row["origin"] for row in rows]
        origin += [f"query {query['id']}", *(f"document {name}" for name in found)]
        try:
            made = record_of(
                self.shared.dataset,
                query["text"],
                texts,
                origin=origin,
                language=query["language"],
            )
        except RowError as problem:
            writer.reject(str(problem), rows[0], len(rows))
        else:
            writer.take([made], rows[0], len(rows))


def merge_needed(folder: str, names: Sequence[str]) -> str:
    """Merge the lists of needed documents into one file of pairs (document hash, bucket), and
    return its path.
    """
    found = [_read(join(folder, name)) for name in names]
    merged = np.unique(np.concatenate([np.empty(0, dtype=_NEEDED), *found]))
    path = join(folder, f"needed-of-all-{xxhash.xxh3_64_hexdigest(merged.tobytes())}.npy")
    save_array(path, merged)
    return path


def id_of(row: Mapping[str, Any]) -> str | None:
    """Return the id of a document or query row; None if the row has no id.

    Raises:
        RowError: it is neither a text nor a number.
    """
    return next((name for column in IDS if (name := name_in(row, column)) is not None), None)


_ById = Mapping[str, Mapping[str, Any] | None]
"""Id → its row; None: several rows have it, with different texts."""


def _by_id(rows: Sequence[Mapping[str, Any]]) -> _ById:
    found: dict[str, Mapping[str, Any] | None] = {}
    for row in rows:
        same = found.setdefault(row["id"], row)
        if same != row:
            found[row["id"]] = None
    return found


def _problem(query: Mapping[str, Any], document: str, documents: _ById) -> str | None:
    """Return the reason why a judgement gives no positive; None if it gives one."""
    if document not in documents:
        return NO_DOCUMENT
    found = documents[document]
    if found is None:
        return SEVERAL_DOCUMENTS
    return reject_reason({"query": query["text"], "positives": [found["text"]]})


def _read(path: str) -> np.ndarray:
    return load_array(path, remedy(path))


@lru_cache(maxsize=1)
def _read_needed(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Read the sorted document hashes and their buckets, as two arrays because searching a struct
    field would copy it.
    """
    needed = _read(path)
    return np.ascontiguousarray(needed["hash"]), np.ascontiguousarray(needed["bucket"])
