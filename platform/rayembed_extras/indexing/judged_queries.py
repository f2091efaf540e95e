"""Read, embed and score judged queries for an index."""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rayembed.assets.arrow_files import read_stream
from rayembed.assets.storage import is_remote
from rayembed.data.sources.cells import RowError, name_in, text_in
from rayembed.data.sources.files import list_pieces
from rayembed.evaluation.own_data import (
    JUDGEMENTS,
    QUERIES,
    Faults,
    find_files,
    readable_rows,
    write_set,
)
from rayembed.models.passes.encoding import encode
from rayembed_extras.indexing.embed import IndexModelSpec, cut, load
from rayembed_extras.indexing.manifest import MadeBy


@dataclass(frozen=True)
class JudgedQueries:
    """Queries, and the grades of documents for each."""

    texts: tuple[str, ...]
    grades: tuple[Mapping[str, int], ...]
    """Document id → grade, above 0 where relevant; for each query."""


def read_queries(path: str, split: str) -> JudgedQueries:
    """Read judged queries.

    Args:
        path: folder in BEIR's layout (corpus, queries, qrels), or a file of rows with `query` and
            `document`, the id of a document that answers it; a query may have several rows.
        split: of the judgements in BEIR's layout.

    Raises:
        DataError: rows that cannot be scored; the first of each kind are shown.
        ArtifactError: a file cannot be read.
    """
    if is_remote(path) or Path(path).expanduser().is_dir():
        with tempfile.TemporaryDirectory() as folder:
            write_set(find_files(path, split), Path(folder))
            queries, judged = (_arrow(Path(folder) / name) for name in (QUERIES, JUDGEMENTS))
        grades: dict[str, dict[str, int]] = {name: {} for name in queries["id"].to_pylist()}
        for row in judged.to_pylist():
            grades[row["query-id"]][row["corpus-id"]] = row["score"]
        return JudgedQueries(tuple(queries["text"].to_pylist()), tuple(grades.values()))
    faults, found = Faults(), dict[str, dict[str, int]]()
    for row in readable_rows(tuple(list_pieces(path)), "queries", faults):
        try:
            query, document = text_in(row.values, "query"), name_in(row.values, "document")
            if query is None or document is None:
                raise RowError("no query or no document")
        except RowError as problem:
            faults.add("queries", str(problem), row.origin)
        else:
            found.setdefault(query, {})[document] = 1
    faults.refuse(f"the rows at {path!r} cannot be scored as they stand")
    return JudgedQueries(tuple(found), tuple(found.values()))


def scores_of(ranked: Iterable[str], grades: Mapping[str, int], k: int) -> tuple[float, float]:
    """Compute nDCG@k and recall@k of one query, as trec_eval does.

    Args:
        ranked: ids of documents, best first, each once.
    """
    gains = np.array([max(0, grades.get(name, 0)) for name in ranked][:k], float)
    ideal = np.sort([max(0, grade) for grade in grades.values()])[::-1][:k].astype(float)
    relevant = sum(grade > 0 for grade in grades.values())
    if not relevant:
        return 0.0, 0.0
    discounts = 1 / np.log2(np.arange(2, k + 2))
    best = float(ideal @ discounts[: len(ideal)])
    ndcg = float(gains @ discounts[: len(gains)]) / best
    return ndcg, float((gains > 0).sum()) / relevant


def query_vectors(
    made_by: MadeBy, texts: Sequence[str], golden: str, tracking_uri: str | None
) -> np.ndarray:
    """Embed queries by the model of an index to (Q, D) float32 unit vectors.

    Args:
        golden: folder of the index's vectors of proof texts.

    Raises:
        ArtifactError: the model has other weights, or gives other vectors.
    """
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


def _arrow(path: Path) -> pa.Table:
    with pa.OSFile(str(path)) as file:
        return read_stream(file)
