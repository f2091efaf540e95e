"""Measure what a store returns: recall of its search against exact search over the same vectors,
scores on judged queries, latency and size, by number type, index and settings of a search.

Settings that the current table does not have are measured on a copy of it in the same store, which
is removed afterwards.
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, get_args

import numpy as np
import pyarrow as pa

from rayembed.assets.storage import join
from rayembed.config.settings import parse
from rayembed.errors import ConfigError
from rayembed.evaluation.own_data import OwnFiles
from rayembed.registry.tracking_uri import resolve_tracking_uri
from rayembed.search.exact import top_k
from rayembed_extras.indexing.judged_queries import (
    JudgedQueries,
    query_vectors,
    read_queries,
    scores_of,
)
from rayembed_extras.indexing.layout import (
    as_compared,
    as_stored,
    layout_of,
    loaded_vectors,
    scale_of,
    stored_vectors,
)
from rayembed_extras.indexing.lock import locked_index
from rayembed_extras.indexing.manifest import MadeBy, folder_of, read_manifest
from rayembed_extras.indexing.score_copies import trial_of, trial_table
from rayembed_extras.indexing.settings import STORES, NumberType
from rayembed_extras.indexing.store import VECTOR, Layout, VectorStore

logger = logging.getLogger(__name__)

AS_BUILT = "as built"
"""Label of the current table's own index."""

_ORDER: tuple[NumberType, ...] = get_args(NumberType)
"""Number types, each of which can be made of those before it."""

_TIMED = 100
"""Number of queries whose search is timed, one at a time."""

_ROWS_AT_ONCE = 16_384
"""Number of rows that are copied or searched at a time."""

_EQUAL = 1e-6
"""Difference of scores below which two rows are equally near."""

_DEEPER = 4
"""Number of rows for each wanted one that are searched: of documents in several pieces only the
first piece counts, and rows equally near to the last one count as it."""


@dataclass(frozen=True)
class ScoresRequest:
    """What to measure."""

    storage: str
    """Folder or address with the record of the index."""
    name: str
    number_types: tuple[NumberType, ...] = ()
    """Number types of further tables; empty: that of the index."""
    indexes: tuple[Mapping[str, Any], ...] = ()
    """Index settings of further tables; empty with number types: none."""
    searches: tuple[Mapping[str, Any], ...] = ()
    """Settings of searches, each measured on every copy, or without copies on the index as it is
    built; empty: the store's defaults."""
    k: int = 10
    sample: int = 500
    """Number of stored rows that are queries where there are no judged ones."""
    tracking_uri: str | None = None
    """MLflow's address for a model of the registry."""


@dataclass(frozen=True)
class StoreScores:
    """Measurements of one way to store and search: a row of the report."""

    number_type: NumberType
    index: str
    search: str
    recall: float
    """Share of the k rows nearest by exact search over the same stored vectors."""
    recall_of_table: float
    """Share of the k rows nearest by exact search over the index's own vectors."""
    ndcg: float | None = None
    judged_recall: float | None = None
    milliseconds: float | None = None
    """Median time of a query; None: no search of the store."""
    slow_milliseconds: float | None = None
    """Time that 95 % of the queries stay below."""
    bytes_a_row: float | None = None
    """Bytes of the table with texts, metadata and index, for each row; None: the store does not
    say."""
    build_seconds: float | None = None
    """Time to write the copy and build its index."""


@dataclass(frozen=True)
class ScoresReport:
    """All measurements of an index."""

    name: str
    kind: str
    """Kind of the store."""
    rows: int
    queries: int
    judged: bool
    k: int
    scores: list[StoreScores] = field(default_factory=list)


class _Exact(NamedTuple):
    """Results of exact search in one number type."""

    ids: list[list[str]]
    """Q lists of at most depth ids, best first."""
    scores: np.ndarray
    """(Q, depth) float32."""


def measure(request: ScoresRequest, files: OwnFiles | None = None) -> ScoresReport:
    """Measure the current table of an index, and copies of it with other settings.

    Args:
        files: of judged queries.

    Raises:
        ConfigError: no such index, or settings that the store refuses.
        ArtifactError: the model is not the one that made the index.
    """
    with locked_index(request.storage, request.name):
        manifest = read_manifest(request.storage, request.name)
        if manifest is None or manifest.current is None:
            raise ConfigError(
                f"there is no finished index {request.name!r} in {request.storage!r}; build it "
                "with rayembed index, or give --storage-path"
            )
        record = manifest.tables[manifest.current]
        work = _Work(request, manifest.store, manifest.current, layout_of(record))
        for index, number_type in work.copies:
            work.check(index, number_type)
        if files is not None:
            work.read(files, record.made_by)
        return work.report()


class _Work:
    """Measurement of one index."""

    def __init__(
        self, request: ScoresRequest, store: Mapping[str, Any], table: str, layout: Layout
    ) -> None:
        self._request, self._values = request, dict(store)
        self._table, self._layout = table, layout
        self._judged: JudgedQueries | None = None
        self.queries = np.empty((0, layout.dimensions), np.float32)
        self._base = _Exact([], np.empty((0, 0)))
        self._own: list[str] = []
        """Ids of the rows that are queries; empty: queries are judged ones."""
        self._documents: dict[str, str] = {}
        """Row → document, where they differ."""

    def read(self, files: OwnFiles, made_by: MadeBy) -> None:
        """Read and embed judged queries."""
        layout, request = self._layout, self._request
        with closing(self._open({}, layout.number_type)) as store:
            self._judged = read_queries(files, store, self._table, has_text=layout.has_text)
        golden = join(folder_of(request.storage, request.name), self._table, "golden")
        uri = request.tracking_uri
        if made_by.reference.startswith("models:/"):
            uri = resolve_tracking_uri(uri, request.storage, make_folder=False)
        self.queries = query_vectors(made_by, self._judged.texts, golden, uri)

    @property
    def copies(self) -> list[tuple[Mapping[str, Any], NumberType]]:
        """Index settings and number type of each copy to make.

        Raises:
            ConfigError: a number type that cannot be made of the stored one.
        """
        request, own = self._request, self._layout.number_type
        if not request.number_types and not request.indexes:
            return []
        for number_type in request.number_types:
            if _ORDER.index(number_type) < _ORDER.index(own):
                raise ConfigError(
                    f"--number-type {number_type}: the index {request.name} stores {own}, of which "
                    f"no {number_type} can be made; build it with store.number_type=float32"
                )
        return [
            (index, number_type)
            for number_type in request.number_types or (own,)
            for index in request.indexes or ({},)
        ]

    def check(self, index: Mapping[str, Any], number_type: NumberType) -> None:
        """Raise unless the store takes a copy."""
        with closing(self._open(index, number_type)) as store:
            trial = trial_of(self._request.name)
            store.check(self._layout_in(number_type), trial)
            if store.pointed(trial) is not None:
                raise ConfigError(
                    f"copies are named {trial}_1, but another index has the name {trial}; measure "
                    "without --number-type and --index, or build this index under another --name"
                )

    def report(self) -> ScoresReport:
        """Measure all ways to store and search."""
        request, own = self._request, self._layout.number_type
        with closing(self._open({}, own)) as store:
            rows = store.count(self._table)
            if self._judged is None:
                self._draw_queries(store, rows)
            number_types = dict.fromkeys([own, *(number_type for _, number_type in self.copies)])
            exact = {number_type: self._exact(store, number_type) for number_type in number_types}
            self._base = exact[own]
            report = ScoresReport(
                request.name,
                self._values["kind"],
                rows,
                len(self.queries),
                self._judged is not None,
                request.k,
                [self._exact_scores(number_type, exact[number_type]) for number_type in exact],
            )
            size = _bytes_a_row(store, self._table, rows)
            report.scores.extend(
                self._searched(store, self._table, AS_BUILT, own, exact[own], size)
            )
        for index, number_type in self.copies:
            with closing(self._open(index, number_type)) as store:
                report.scores.extend(
                    self._of_copy(store, index, number_type, exact[number_type], rows)
                )
        return report

    def _open(self, index: Mapping[str, Any], number_type: NumberType) -> Any:
        values = {**self._values, "index": dict(index), "number_type": number_type}
        settings: Any = parse(STORES.classes()[values["kind"]], values)
        return settings.open()

    def _layout_in(self, number_type: NumberType) -> Layout:
        own = self._layout
        scale = scale_of(own.dimensions, number_type)
        is_own = number_type == own.number_type
        return own if is_own else replace(own, number_type=number_type, scale=scale)

    def _draw_queries(self, store: VectorStore, rows: int) -> None:
        """Take stored rows as queries, evenly by their places."""
        wanted = np.linspace(0, max(rows - 1, 0), min(self._request.sample, rows)).round()
        drawn: list[np.ndarray] = []
        first = 0
        for batch in store.scan(self._table, ["id", VECTOR]):
            inside = wanted[(wanted >= first) & (wanted < first + len(batch))] - first
            taken = batch.take(pa.array(inside.astype(np.int64)))
            self._own.extend(taken["id"].to_pylist())
            drawn.append(loaded_vectors(taken[VECTOR], self._layout))
            first += len(batch)
        vectors = np.concatenate([self.queries, *drawn])
        self.queries = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    @property
    def _depth(self) -> int:
        """Number of results of each search: k, and more where some do not count."""
        k = self._request.k
        if self._documents and self._judged is not None:
            return _DEEPER * k
        return k + bool(self._own)

    def _exact(self, store: VectorStore, number_type: NumberType) -> _Exact:
        """Search the current table's vectors, as a number type keeps them, exactly."""
        names: list[pa.ChunkedArray] = []

        def shards() -> Iterator[np.ndarray]:
            for batch in store.scan(self._table, ["id", "document", VECTOR]):
                names.append(batch["id"])
                pairs = zip(batch["id"].to_pylist(), batch["document"].to_pylist(), strict=True)
                self._documents.update(pair for pair in pairs if pair[0] != pair[1])
                vectors = loaded_vectors(batch[VECTOR], self._layout)
                is_own = number_type == self._layout.number_type
                yield vectors if is_own else as_stored(vectors, number_type)

        asked = as_compared(self.queries, number_type)
        scores, places = top_k(asked, shards(), _DEEPER * self._request.k + 50)
        ids = pa.chunked_array([c for name in names for c in name.chunks], pa.string())
        found = [
            ids.take(pa.array(row[np.isfinite(of_query)])).to_pylist()
            for row, of_query in zip(places, scores, strict=True)
        ]
        return _Exact(found, scores)

    def _exact_scores(self, number_type: NumberType, exact: _Exact) -> StoreScores:
        recall = self._recall([ids[: self._depth] for ids in exact.ids], self._base)
        ndcg, judged = self._judged_scores(exact.ids)
        return StoreScores(number_type, "exact search", "", 1.0, recall, ndcg, judged)

    def _of_copy(
        self,
        store: VectorStore,
        index: Mapping[str, Any],
        number_type: NumberType,
        exact: _Exact,
        rows: int,
    ) -> list[StoreScores]:
        """Copy the current table by the store's settings, measure the copy and remove it."""
        layout, began = self._layout_in(number_type), time.monotonic()
        with trial_table(self._request.storage, self._request.name, store) as copy:
            store.create(copy, layout)
            for batch in store.scan(self._table):
                for first in range(0, len(batch), _ROWS_AT_ONCE):
                    store.upsert(copy, self._converted(batch.slice(first, _ROWS_AT_ONCE), layout))
            store.finish(copy, layout)
            seconds = time.monotonic() - began
            size = _bytes_a_row(store, copy, rows)
            label = settings_text(index) or "none"
            logger.info("copied the table with index %s in %s", label, number_type)
            return self._searched(store, copy, label, number_type, exact, size, seconds)

    def _converted(self, rows: pa.Table, layout: Layout) -> pa.Table:
        if layout.number_type == self._layout.number_type:
            return rows
        vectors = stored_vectors(loaded_vectors(rows[VECTOR], self._layout), layout.number_type)
        place = rows.schema.get_field_index(VECTOR)
        return rows.set_column(place, VECTOR, vectors).cast(layout.schema)

    def _searched(
        self,
        store: VectorStore,
        table: str,
        index: str,
        number_type: NumberType,
        exact: _Exact,
        size: float | None,
        seconds: float | None = None,
    ) -> list[StoreScores]:
        made = []
        searches = self._request.searches or ({},)
        if self.copies and index == AS_BUILT:
            searches = ({},)  # they are settings of the copies' index
        for options in searches:
            found = store.search(table, self.queries, self._depth, options)
            ids = [[name for name in of_query if name] for of_query in found.ids]
            ndcg, judged = self._judged_scores(ids)
            times = []
            for query in self.queries[:_TIMED]:
                began = time.perf_counter()
                store.search(table, query[None], self._request.k, options)
                times.append(1000 * (time.perf_counter() - began))
            made.append(
                StoreScores(
                    number_type,
                    index,
                    settings_text(options),
                    self._recall(ids, exact),
                    self._recall(ids, self._base),
                    ndcg,
                    judged,
                    float(np.median(times)) if times else None,
                    float(np.quantile(times, 0.95)) if times else None,
                    size,
                    seconds,
                )
            )
        return made

    def _recall(self, ids: Sequence[Sequence[str]], exact: _Exact) -> float:
        """Mean share of the k nearest rows among the first k results; rows as near as the last of
        them count as it.
        """
        k, shares = self._request.k, []
        for query, of_query in enumerate(ids):
            own = self._own[query] if self._own else None
            near = [
                (name, score)
                for name, score in zip(exact.ids[query], exact.scores[query], strict=False)
                if name != own
            ]
            wanted = min(k, len(near))
            if wanted:
                least = near[wanted - 1][1] - _EQUAL
                right = {name for name, score in near if score >= least}
                first = [name for name in of_query if name != own][:k]
                shares.append(min(wanted, len(right.intersection(first))) / wanted)
        return float(np.mean(shares)) if shares else float("nan")

    def _judged_scores(self, ids: Sequence[Sequence[str]]) -> tuple[float | None, float | None]:
        """Mean nDCG@k and recall@k over the judged queries; None without them."""
        if self._judged is None:
            return None, None
        made = []
        for of_query, grades in zip(ids, self._judged.grades, strict=True):
            documents = dict.fromkeys(self._documents.get(name, name) for name in of_query)
            made.append(scores_of(documents, grades, self._request.k))
        ndcg, recall = np.mean(made, axis=0)
        return float(ndcg), float(recall)


def _bytes_a_row(store: Any, table: str, rows: int) -> float | None:
    size = getattr(store, "bytes_of", None)
    return None if size is None or not rows else size(table) / rows


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings in one line, as `settings_in` reads them."""
    return ",".join(f"{name}={value}" for name, value in settings.items())
