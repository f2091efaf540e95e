"""Read judged queries, and make unjudged ones of documents' first sentences."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rayembed.assets.resolver import is_unpacked, resolve
from rayembed.assets.storage import is_remote, join, list_files
from rayembed.data.sources.beir_join import id_of
from rayembed.data.sources.cells import RowError, name_in, number_in, text_in
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.errors import DataError
from rayembed.evaluation.own_data import Faults, readable_rows

_SENTENCE = re.compile(r"(?<=[.!?。！？])\s+|\n+")
_LONGEST, _SHORTEST = 200, 12
"""Characters of a sentence that is taken as a query."""


@dataclass(frozen=True)
class UpgradeQueries:
    """Queries with the documents that answer them."""

    texts: tuple[str, ...]
    relevant: tuple[Mapping[str, int], ...]
    """For each query, grades above 0 by document id."""

    @property
    def documents(self) -> set[str]:
        """Ids of all relevant documents."""
        return {name for judged in self.relevant for name in judged}


@dataclass(frozen=True)
class QueryFiles:
    """Files of judged queries."""

    path: str
    queries: tuple[FilePiece, ...]
    judgements: tuple[FilePiece, ...] = ()
    """Empty: each row of `queries` names its document."""


def find_queries(path: str, split: str) -> QueryFiles:
    """List the files of judged queries, without reading their rows.

    Raises:
        DataError: there are none, or a part of BEIR's layout is missing.
    """
    place = str(resolve(path)) if is_unpacked(path) else path
    if not is_remote(place):
        place = str(Path(place).expanduser())
    if not is_remote(place) and Path(place).is_file():
        return QueryFiles(path, tuple(list_pieces(place)))
    names = list_files(place, recursive=True)
    if not names:
        raise DataError(f"there are no queries at {path!r}: no such file or folder")
    parts: dict[str, list[str]] = {}
    for part in ("queries", f"qrels/{split}"):
        parts[part] = [name for name in names if name.startswith((f"{part}.", f"{part}/"))]
    queries, judgements = parts.values()
    if not queries and not judgements:
        return QueryFiles(path, tuple(list_pieces(place)))
    if missing := [part for part, found in parts.items() if not found]:
        raise DataError(
            f"the queries at {path!r} have no {missing[0]} (expected {missing[0]}.jsonl, .tsv, "
            f".csv or .parquet); the folder has {', '.join(names[:8])}"
        )
    return QueryFiles(path, *(tuple(_pieces(place, found)) for found in (queries, judgements)))


def _pieces(place: str, names: Sequence[str]) -> list[FilePiece]:
    return [piece for name in names for piece in list_pieces(join(place, name))]


def read_queries(files: QueryFiles, with_text: Mapping[str, Sequence[str]]) -> UpgradeQueries:
    """Read judged queries; queries without a relevant document are left out.

    Args:
        with_text: document ids by stripped text, for rows that name their document by its text.

    Raises:
        DataError: rows without a query or a document, or a text that no document has; all are
            counted, and the first of each kind are shown.
    """
    faults = Faults()
    judged: dict[str, dict[str, int]] = {}
    if files.judgements:
        texts = _beir_texts(files, faults)
        for row in readable_rows(files.judgements, "qrels", faults):
            try:
                query, document = name_in(row.values, "query-id"), name_in(row.values, "corpus-id")
                grade = number_in(row.values, "score")
                if query is None or document is None:
                    raise RowError("no query-id or no corpus-id")
                if query not in texts:
                    raise RowError("a query that is not there")
            except RowError as problem:
                faults.add("qrels", str(problem), row.origin)
                continue
            if grade > 0:
                judged.setdefault(texts[query], {})[document] = int(grade)
    else:
        for row in readable_rows(files.queries, "rows", faults):
            try:
                text = text_in(row.values, "query") if "query" in row.values else None
                if text is None or not text.strip():
                    raise RowError("no query")
                found = _documents(row.values, with_text)
            except RowError as problem:
                faults.add("rows", str(problem), row.origin)
                continue
            judged.setdefault(text, {}).update(dict.fromkeys(found, 1))
    faults.refuse(f"the queries at {files.path!r} cannot be used as they stand")
    if not judged:
        raise DataError(f"the queries at {files.path!r} have none with a relevant document")
    return UpgradeQueries(tuple(judged), tuple(judged.values()))


def positive_texts(files: QueryFiles) -> set[str]:
    """Stripped texts by which rows name their documents; empty if they name ids."""
    found: set[str] = set()
    for row in () if files.judgements else readable_rows(files.queries, "rows", None):
        with suppress(RowError):
            if "document" not in row.values and "positive" in row.values:
                found.add((text_in(row.values, "positive") or "").strip())
    return found - {""}


def _beir_texts(files: QueryFiles, faults: Faults) -> dict[str, str]:
    texts: dict[str, str] = {}
    for row in readable_rows(files.queries, "queries", faults):
        try:
            name, text = id_of(row.values), text_in(row.values, "text")
            if not name:
                raise RowError("no id")
            if text is None or not text.strip():
                raise RowError("no text")
        except RowError as problem:
            faults.add("queries", str(problem), row.origin)
        else:
            texts[name] = text
    return texts


def _documents(row: Mapping[str, object], with_text: Mapping[str, Sequence[str]]) -> Sequence[str]:
    if "document" in row:
        name = name_in(row, "document")
        if name is None:
            raise RowError("no document")
        return [name]
    if "positive" not in row:
        raise RowError("no column 'document' (id) or 'positive' (text)")
    text = text_in(row, "positive")
    if text is None or not text.strip():
        raise RowError("no positive")
    if text.strip() not in with_text:
        raise RowError("a positive that no document of the index has as its text")
    return with_text[text.strip()]


def first_sentence(text: str) -> str | None:
    """First sentence of a document, cut to 200 characters; None if it is too short for a query, or
    the whole text.
    """
    stripped = text.strip()
    sentence = next((part for part in _SENTENCE.split(stripped) if len(part) >= _SHORTEST), None)
    if sentence is None:
        return None
    if len(sentence) > _LONGEST:
        sentence = sentence[:_LONGEST].rsplit(" ", 1)[0]
    return sentence if len(sentence) < len(stripped) else None
