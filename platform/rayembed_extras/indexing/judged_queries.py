"""Read judged queries of an index's documents, embed them, and score rankings."""

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rayembed.assets.resolver import is_unpacked, resolve
from rayembed.assets.storage import is_remote, list_files
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.files import list_pieces
from rayembed.errors import ConfigError, DataError
from rayembed.evaluation.own_data import Faults, OwnFiles, find_files, read_judged, readable_rows

if TYPE_CHECKING:
    from rayembed_extras.indexing.manifest import MadeBy
    from rayembed_extras.indexing.store import VectorStore


@dataclass(frozen=True)
class JudgedQueries:
    """Queries with the documents that answer them."""

    texts: tuple[str, ...]
    grades: tuple[Mapping[str, int], ...]
    """For each query, grades above 0 by document id."""

    @property
    def documents(self) -> set[str]:
        """Ids of all relevant documents."""
        return {name for grades in self.grades for name in grades}


def find_queries(path: str, split: str) -> OwnFiles:
    """List the files of judged queries, without reading their rows.

    Args:
        path: folder in BEIR's layout (`queries`, `qrels`), or files of rows with `query` and
            `document` (an id) or `positive` (the text of a document), without judgements; a query
            may have several rows.
        split: of the judgements in BEIR's layout.

    Raises:
        DataError: there are none, or a part of BEIR's layout is missing.
    """
    place = str(resolve(path)) if is_unpacked(path) else path
    if not is_remote(place):
        place = str(Path(place).expanduser())
    if is_remote(place) or Path(place).is_dir():
        names = list_files(place, recursive=True)
        if any(name.startswith(("queries.", "queries/", "qrels/")) for name in names):
            return find_files(path, split, with_corpus=False)
    return OwnFiles(path, split, (), tuple(list_pieces(place)), ())


def read_queries(
    files: OwnFiles, store: "VectorStore", table: str, *, has_text: bool
) -> JudgedQueries:
    """Read judged queries; those without a relevant document are left out.

    Args:
        store: with the table of the documents, for rows that name a document by its text.
        has_text: whether it keeps texts.

    Raises:
        DataError: rows without a query or a document, or a text that no document has; all are
            counted, and the first of each kind are shown.
        ConfigError: rows name documents by their text, and the store keeps none.
        ArtifactError: a file cannot be read.
    """
    faults, judged = Faults(), dict[str, dict[str, int]]()
    if files.judgements:
        grades, texts = read_judged(files, faults, {})
        for query, text in texts.items():
            relevant = {name: grade for name, grade in grades[query].items() if grade > 0}
            if relevant:
                judged.setdefault(text, {}).update(relevant)
    else:
        rows = list(_rows(files, faults))
        wanted = {document.strip() for _, document, is_id, _ in rows if not is_id}
        if wanted and not has_text:
            raise ConfigError(
                f"the queries at {files.path!r} name documents by their text, but the store of "
                f"{table!r} keeps no texts; name them by id in a column `document`"
            )
        with_text = documents_by_text(store, table, wanted)
        for query, document, is_id, origin in rows:
            names = [document] if is_id else with_text.get(document.strip(), [])
            if names:
                judged.setdefault(query, {}).update(dict.fromkeys(names, 1))
            else:
                reason = "a positive that no document of the index has as its text"
                faults.add("rows", reason, origin)
    faults.refuse(f"the queries at {files.path!r} cannot be used as they stand")
    if not judged:
        raise DataError(f"the queries at {files.path!r} have none with a relevant document")
    return JudgedQueries(tuple(judged), tuple(judged.values()))


def _rows(files: OwnFiles, faults: Faults) -> Iterable[tuple[str, str, bool, str]]:
    """Yield query, document, whether that is an id, and the origin of each row."""
    for row in readable_rows(files.queries, "rows", faults):
        values, is_id = row.values, "document" in row.values
        try:
            query = text_in(values, "query") if "query" in values else None
            if query is None or not query.strip():
                raise RowError("no query")
            if not is_id and "positive" not in values:
                raise RowError("no column 'document' (id) or 'positive' (text)")
            document = name_in(values, "document") if is_id else text_in(values, "positive")
            if document is None or not document.strip():
                raise RowError("no document" if is_id else "no positive")
        except RowError as problem:
            faults.add("rows", str(problem), row.origin)
        else:
            yield query, document, is_id, row.origin


def documents_by_text(
    store: "VectorStore", table: str, wanted: Collection[str]
) -> dict[str, list[str]]:
    """Stripped text → ids of the documents that have it, for wanted texts."""
    found: dict[str, list[str]] = {}
    for batch in store.scan(table, ["document", "text"]) if wanted else ():
        pairs = zip(batch["document"].to_pylist(), batch["text"].to_pylist(), strict=True)
        for name, text in pairs:
            stripped = (text or "").strip()
            if stripped in wanted:
                found.setdefault(stripped, []).append(name)
    return found


def scores_of(ranked: Iterable[Hashable], grades: Mapping[Any, int], k: int) -> tuple[float, float]:
    """Compute nDCG@k and recall@k of one query, as trec_eval does.

    Args:
        ranked: documents, best first, each once.
        grades: above 0 by relevant document.
    """
    gains = np.array([grades.get(name, 0) for name in ranked][:k], float)
    ideal = np.array(sorted(grades.values(), reverse=True)[:k], float)
    discounts = 1 / np.log2(np.arange(2, k + 2))
    ndcg = float(gains @ discounts[: len(gains)]) / float(ideal @ discounts[: len(ideal)])
    return ndcg, float((gains > 0).sum()) / len(grades)


def query_vectors(
    made_by: "MadeBy", texts: Sequence[str], golden: str, tracking_uri: str | None
) -> np.ndarray:
    """Embed queries by the model of an index to (Q, D) float32 unit vectors.

    Args:
        golden: folder of the index's vectors of proof texts.

    Raises:
        ArtifactError: the model has other weights, or gives other vectors.
    """
    # torch
    from rayembed.models.passes.encoding import encode
    from rayembed_extras.indexing.embed import IndexModelSpec, cut, load

    dtype: Any = made_by.dtype
    spec = IndexModelSpec(
        made_by.reference,
        made_by.weights,
        tracking_uri,
        made_by.instruction,
        made_by.dimensions,
        dtype,
        None,
        golden,
    )
    loaded = load(spec, "cpu")
    instruction = made_by.query_instruction
    with loaded._casting():
        vectors = encode(
            loaded.model, list(texts), role="query", instruction=instruction, finite=True
        )
    return cut(vectors, made_by.dimensions)
