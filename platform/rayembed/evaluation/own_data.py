"""Read and check a user's retrieval set (queries, documents, judgements), and write it for memory
mapping.

BEIR's layout, in a local folder or object storage. Each of the three is one file or a folder of
files; JSONL, TSV, CSV (also with .gz) and Parquet are read, in any mixture:

    corpus.jsonl          _id or id, title (may lack), text
    queries.jsonl         _id or id, text
    qrels/<split>.tsv     query-id, corpus-id, score: a whole number; above 0 is relevant

Documents pass by one at a time; held in memory are 8 bytes of each and all judgements.
"""

import json
import logging
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.resolver import is_unpacked, resolve
from rayembed.assets.storage import is_remote, join, list_files
from rayembed.data.hashes import text_hash
from rayembed.data.sources.beir_join import NO_DOCUMENT, NO_QUERY, id_of
from rayembed.data.sources.cells import RowError, name_in, number_in, text_in
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.rows import Row, read_rows
from rayembed.errors import DataError

logger = logging.getLogger(__name__)

CORPUS, QUERIES, JUDGEMENTS, ABOUT = "corpus.arrow", "queries.arrow", "qrels.arrow", "about.json"
"""Files of a written set."""

_LARGEST_GRADE = 2**31 - 1
_EXAMPLES = 3
_ROWS_PER_BATCH = 10_000
_DOCUMENTS = pa.schema([("id", pa.string()), ("title", pa.string()), ("text", pa.string())])
_QUESTIONS = pa.schema([("id", pa.string()), ("text", pa.string())])
_GRADES = pa.schema([("query-id", pa.string()), ("corpus-id", pa.string()), ("score", pa.int32())])

Judgements = dict[str, dict[str, int]]
"""Query → document → grade."""


@dataclass(frozen=True)
class OwnFiles:
    """Paths of the files of a retrieval set: corpus, queries and judgements."""

    path: str
    split: str
    corpus: tuple[FilePiece, ...]
    queries: tuple[FilePiece, ...]
    judgements: tuple[FilePiece, ...]

    @property
    def key(self) -> str:
        """Hash of the files' contents; in object storage, of their sizes and modification times."""
        parts = (self.corpus, self.queries, self.judgements)
        told = [self.split, [[piece.key for piece in part] for part in parts]]
        return xxhash.xxh3_128_hexdigest(repr(told).encode())


@dataclass(frozen=True)
class About:
    """Statistics of a prepared retrieval set, including rows that were left out."""

    fingerprint: str
    """Hash of the set's ids, texts and grades, in the order of its files."""
    documents: int
    queries: int
    judgements: int
    dropped: dict[str, int]
    """Number of rows that were left out because no score depends on them, by the reason."""


@dataclass
class Faults:
    """Counts of a set's invalid rows by reason, with a few examples of each."""

    found: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    def add(self, part: str, reason: str, example: str) -> None:
        """Count an invalid row, and keep the first examples of each reason."""
        count, examples = self.found.get(f"{part}: {reason}", (0, []))
        kept = examples if len(examples) == _EXAMPLES else [*examples, example]
        self.found[f"{part}: {reason}"] = (count + 1, kept)

    def refuse(self, told: str) -> None:
        """Raise DataError if invalid rows were counted; the message starts with the given text."""
        if not self.found:
            return
        lines = [
            f"  {count:,} × {kind} ({', '.join(examples)}{', …' if count > len(examples) else ''})"
            for kind, (count, examples) in self.found.items()
        ]
        raise DataError(f"{told}:\n" + "\n".join(lines) + "\nCorrect or remove these rows")


def find_files(path: str, split: str, *, with_corpus: bool = True) -> OwnFiles:
    """Locate the files of a retrieval set.

    Args:
        with_corpus: whether the documents are there, too; False: `corpus` is empty.

    Raises:
        DataError: the path is a file, a part is missing, empty or of an unknown kind, or the
            judgements have no such split; the message names those that there are.
        ArtifactError: the storage cannot be read.
    """
    # On this machine, which is the one that reads them.
    place = str(resolve(path)) if is_unpacked(path) else path
    if not is_remote(place) and Path(place).expanduser().is_file():
        raise DataError(
            f"the set at {path!r} is a file; expected a folder with corpus, queries and qrels: "
            f"corpus.jsonl, queries.jsonl and qrels/{split}.tsv (also .csv or .parquet)"
        )
    names = list_files(place, recursive=True)
    if not names:
        raise DataError(f"there is no set at {path!r}: the folder does not exist or has no files")
    splits = sorted({name.split("/")[1].split(".")[0] for name in names if name[:6] == "qrels/"})
    if splits and split not in splits:
        raise DataError(
            f"the set at {path!r} has no judgements of the split {split!r}; qrels/ has "
            f"{', '.join(splits)}"
        )
    return OwnFiles(
        path,
        split,
        _part(place, names, "corpus") if with_corpus else (),
        _part(place, names, "queries"),
        _part(place, names, f"qrels/{split}"),
    )


def _part(path: str, names: list[str], part: str) -> tuple[FilePiece, ...]:
    found = [name for name in names if name.startswith((f"{part}.", f"{part}/"))]
    if not found:
        shown = ", ".join(names[:8])
        raise DataError(
            f"the set at {path!r} has no {part} (expected: {part}.jsonl, .tsv, .csv or .parquet, "
            f"or a folder {part}/ of such files); it contains {shown}"
        )
    return tuple(piece for name in found for piece in list_pieces(join(path, name)))


def write_set(files: OwnFiles, folder: Path) -> About:
    """Write a retrieval set as three Arrow files and `about.json`, and return the
    statistics.

    Left out are queries that nobody judged or that no document is relevant to, judgements that
    are there twice, and documents without any text that nobody judged.

    Raises:
        DataError: rows without an id, with one that another row has, without a text, with a grade
            that is no whole number, or judgements of what is not there; all are counted, and the
            first of each kind are shown.
        ArtifactError: a file cannot be read.
    """
    faults = Faults()
    dropped: dict[str, int] = {}
    digest = xxhash.xxh3_128()
    judged, queries = read_judged(files, faults, dropped)
    wanted = {document for found in judged.values() for document in found}
    seen, num_documents = _write_corpus(files, folder, wanted, faults, dropped, digest)
    for query, found in judged.items():
        for document in found:
            if document not in seen:
                pair = f"query {query!r}, document {document!r}"
                faults.add(f"qrels/{files.split}", NO_DOCUMENT, pair)
    faults.refuse(
        f"the set at {files.path!r}, split {files.split!r}, cannot be scored as it stands"
    )
    grades = {q: found for q, found in judged.items() if max(found.values()) > 0}
    _drop(dropped, "queries that no document is relevant to", len(judged) - len(grades))
    if not grades:
        raise DataError(
            f"the set at {files.path!r}, split {files.split!r}, has no query with a relevant "
            "document (score above 0); nothing can be scored"
        )
    with ArrowFile(folder / QUERIES, _QUESTIONS) as table:
        for query, found in grades.items():
            table.add(query, queries[query])
            digest.update(repr((query, queries[query], sorted(found.items()))).encode())
    num_grades = 0
    with ArrowFile(folder / JUDGEMENTS, _GRADES) as table:
        for query, found in grades.items():
            for document, grade in found.items():
                table.add(query, document, grade)
                num_grades += 1
    about = About(digest.hexdigest(), num_documents, len(grades), num_grades, dropped)
    (folder / ABOUT).write_text(json.dumps(asdict(about), indent=1), encoding="utf-8")
    for reason, count in dropped.items():
        logger.warning("%s: left out %d %s", files.path, count, reason)
    return about


def read_about(folder: Path) -> About:
    """Read the statistics that `write_set` wrote."""
    return About(**json.loads((folder / ABOUT).read_text(encoding="utf-8")))


def read_judged(
    files: OwnFiles, faults: Faults, dropped: dict[str, int]
) -> tuple[Judgements, dict[str, str]]:
    """Read the judgements, and the texts of the judged queries by id.

    Args:
        faults: invalid rows are counted in it.
        dropped: numbers of rows that are left out are added to it, by the reason.
    """
    judged = _read_judgements(files, faults, dropped)
    queries = _read_queries(files, judged, faults, dropped)
    for query in judged:
        if query not in queries:
            faults.add(f"qrels/{files.split}", NO_QUERY, repr(query))
    return judged, queries


def _read_judgements(files: OwnFiles, faults: Faults, dropped: dict[str, int]) -> Judgements:
    part, repeated = f"qrels/{files.split}", 0
    judged: Judgements = {}
    _check_header(files)
    for row in readable_rows(files.judgements, part, faults):
        try:
            query, document = name_in(row.values, "query-id"), name_in(row.values, "corpus-id")
            grade = number_in(row.values, "score")
            if query is None or document is None:
                raise RowError("query-id or corpus-id is missing")
            if not grade.is_integer():
                raise RowError("score is not a whole number")
            if abs(grade) > _LARGEST_GRADE:
                raise RowError("score does not fit into 32 bits")
            known = judged.get(query, {}).get(document)
            if known not in (None, int(grade)):
                raise RowError("a second, different score for the same query and document")
        except RowError as problem:
            faults.add(part, str(problem), row.origin)
        else:
            repeated += known is not None
            judged.setdefault(query, {})[document] = int(grade)
    _drop(dropped, "judgements that are there twice", repeated)
    return judged


def _check_header(files: OwnFiles) -> None:
    """Raise if the judgements lack the expected header line, as TREC files do."""
    wanted = set(_GRADES.names)
    piece = files.judgements[0]
    first = next((row for row in read_rows(piece) if isinstance(row, Row)), None)
    if first is None or wanted & first.values.keys():
        return
    seen = "\t".join(map(str, first.values))
    advice = (
        "printf 'query-id\\tcorpus-id\\tscore\\n' > FILE.tsv, and "
        'awk \'{print $1 "\\t" (NF > 3 ? $3 : $2) "\\t" $NF}\' FILE >> FILE.tsv'
    )
    raise DataError(
        f"the relevance judgements {piece.path!r} begin with {seen!r:.80}, but the first line "
        f"must hold the names {', '.join(_GRADES.names)}. To convert a file without this line, "
        f"such as TREC's (query, 0, document, grade): {advice}"
    )


def _read_queries(
    files: OwnFiles, judged: Judgements, faults: Faults, dropped: dict[str, int]
) -> dict[str, str]:
    """Read the texts of the judged queries, by id."""
    queries: dict[str, str] = {}
    passed: set[str] = set()
    for row in readable_rows(files.queries, "queries", faults):
        try:
            name, text = _named(row), _text(row, "text")
            if name in queries or name in passed:
                raise RowError("id already used by another query")
            if name not in judged:
                passed.add(name)
                continue
            if not text.strip():
                raise RowError("the query has no text")
        except RowError as problem:
            faults.add("queries", str(problem), row.origin)
        else:
            queries[name] = text
    _drop(dropped, "queries without judgements", len(passed))
    return queries


def _write_corpus(
    files: OwnFiles,
    folder: Path,
    wanted: set[str],
    faults: Faults,
    dropped: dict[str, int],
    digest: xxhash.xxh3_128,
) -> tuple[set[str], int]:
    """Write the documents; return the ids of judged documents that exist, and the number of written
    documents.
    """
    hashes = array("q")
    seen: set[str] = set()
    without_text = 0
    with ArrowFile(folder / CORPUS, _DOCUMENTS) as table:
        for row in readable_rows(files.corpus, "corpus", faults):
            try:
                name, title, text = _named(row), _text(row, "title"), _text(row, "text")
            except RowError as problem:
                faults.add("corpus", str(problem), row.origin)
                continue
            hashes.append(text_hash(name))
            if name in wanted:
                seen.add(name)
            if title.strip() or text.strip():
                table.add(name, title, text)
                digest.update(repr((name, title, text)).encode())
            elif name in wanted:
                faults.add("corpus", "judged, but has no text", f"{row.origin}: {name!r}")
            else:
                without_text += 1
        num_written = table.num_rows
    _drop(dropped, "documents without text", without_text)
    _find_repeated(files, hashes, faults)
    return seen, num_written


def _find_repeated(files: OwnFiles, hashes: "array[int]", faults: Faults) -> None:
    """Count documents that share their id with another one; the corpus is read again only if id
    hashes collide.
    """
    ordered = np.sort(np.frombuffer(hashes, dtype=np.int64)) if hashes else np.empty(0, np.int64)
    suspects = set(ordered[1:][ordered[1:] == ordered[:-1]].tolist())
    if not suspects:
        return
    known: set[str] = set()
    for row in readable_rows(files.corpus, "corpus", None):
        try:
            name = _named(row)
        except RowError:
            continue
        if text_hash(name) in suspects and name in known:
            faults.add("corpus", "id already used by another document", f"{row.origin}: {name!r}")
        elif text_hash(name) in suspects:
            known.add(name)


def readable_rows(pieces: tuple[FilePiece, ...], part: str, faults: Faults | None) -> Iterator[Row]:
    """Yield the readable rows of files, and count the others as invalid."""
    for piece in pieces:
        for row in read_rows(piece):
            if isinstance(row, Row):
                yield row
            elif faults is not None:
                faults.add(part, row.reason, row.origin)


def _named(row: Row) -> str:
    name = id_of(row.values)
    if not name:
        raise RowError("the row has no id")
    return name


def _text(row: Row, column: str) -> str:
    """Text in a row's cell; empty if the cell or the column is missing."""
    return (text_in(row.values, column) if column in row.values else None) or ""


def _drop(dropped: dict[str, int], reason: str, count: int) -> None:
    if count:
        dropped[reason] = count


class ArrowFile:
    """Writer of a file in Arrow's stream format, which writes rows in batches."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.num_rows = 0
        self._schema = schema
        self._waiting: list[tuple[Any, ...]] = []
        self._writer = pa.ipc.new_stream(str(path), schema)

    def __enter__(self) -> "ArrowFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._flush()
        self._writer.close()

    def add(self, *row: Any) -> None:
        """Append a row; its cells must be in the order of the schema."""
        self.num_rows += 1
        self._waiting.append(row)
        if len(self._waiting) == _ROWS_PER_BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            columns = zip(*self._waiting, strict=True)
            arrays = [
                pa.array(cells, kind)
                for cells, kind in zip(columns, self._schema.types, strict=True)
            ]
            self._writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
            self._waiting.clear()
