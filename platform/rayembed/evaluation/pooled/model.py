"""Model for mteb (`EncoderProtocol`, `SearchProtocol`) that embeds and searches with a pool of
workers.

mteb then asks `search` for retrieval and reranking, and `encode` for everything else. Texts go to
the workers in units, each distinct text once; of a corpus, scores come back and no embeddings.

Q queries, N texts, D embedding width.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from mteb._create_dataloaders import create_dataloader
from mteb.types import PromptType
from torch import Tensor

from rayembed.evaluation.model_spec import ContextualSpec, EncodeSpec, ModelSpec
from rayembed.evaluation.pooled.best_documents import BestDocuments
from rayembed.evaluation.pooled.embedding_store import (
    EmbeddingBucket,
    TextUnit,
    hashes_of,
    num_buckets,
    places_by_bucket,
)
from rayembed.evaluation.pooled.encoding_worker import (
    PairScores,
    TopDocuments,
    comparable,
    draw_context,
    packed,
)
from rayembed.evaluation.pooled.pool import Call, Pool
from rayembed.machine.quantisation import quantised
from rayembed.results.costs import Cost

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with the task's name, its texts embedded by now, and all that are known of."""

_ROWS_AT_ONCE = 8192
"""Rows of a corpus that are read at once to be hashed."""


class _Unit(NamedTuple):
    """A unit of distinct texts, with the data set's rows that contain these texts."""

    texts: TextUnit
    row: np.ndarray
    """(R,) rows of the data set, sorted by `place`."""
    place: np.ndarray
    """(R,) place of each row's text in the unit, rising."""


class PooledModel:
    """Model for mteb whose texts are embedded by a pool of workers.

    Retrieval scores are those of mteb's own search up to float32 rounding. Which of several texts
    with the same score stand last among the best is decided by their hashes.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pool: Pool,
        *,
        progress: Progress = lambda _task, _done, _of: None,
    ) -> None:
        self.mteb_model_meta = spec.meta
        self._spec, self.pool, self._progress = spec, pool, progress
        self.cost = Cost()
        """Cost of the corpora that were searched."""
        self._corpus: Any = None
        self._contexts: dict[tuple[str, str, str], tuple[str, Any]] = {}
        """Name of each task's, split's and subset's context, and what the pool made of it."""
        self._done, self._known = 0, 0

    def encode(
        self,
        inputs: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        prompt_type: PromptType | None = None,
        **_options: Any,
    ) -> np.ndarray:
        """Embed all texts of the loader `inputs`: (N, D) float32, in the loader's order.

        Where vectors are stored small, the numbers that the stored ones stand for. A contextual
        model embeds all texts of a subset in the context of the first ones.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        key = task_metadata.name, hf_split, hf_subset
        encode_spec, context = self._in_context(
            self._spec.encode_spec(task_metadata, prompt_type), key, lambda: iter(texts)
        )
        vectors = self._embed(texts, encode_spec, task_metadata.name, context)
        if self._spec.stored.precision == "float32":
            return vectors
        return quantised(comparable(vectors, self._spec.similarity), self._spec.stored.precision)

    def index(self, corpus: Any, **_options: Any) -> None:
        """Keep the corpus until `search`, which embeds it."""
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        encode_kwargs: Any = None,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        num_proc: int | None = None,
        **_options: Any,
    ) -> dict[str, dict[str, float]]:
        """Return the scores of each query's `top_k` best documents by their ids.

        Args:
            top_ranked: the documents of each query to choose from; None: the whole corpus.
        """
        del encode_kwargs
        if self._corpus is None:
            raise ValueError("search needs a corpus, but index was not called; call index first")
        corpus, self._corpus = self._corpus, None
        ids = list(queries["id"])
        texts = query_texts(queries, task_metadata, num_proc)
        key, task = (task_metadata.name, hf_split, hf_subset), task_metadata.name
        query_spec, document_spec = (
            self._spec.encode_spec(task_metadata, side)
            for side in (PromptType.query, PromptType.document)
        )
        query_spec, context = self._in_context(query_spec, key, lambda: all_documents(corpus))
        document_spec = replace(document_spec, context=query_spec.context)
        vectors = self._embed(texts, query_spec, task, context)
        self.cost += Cost(bytes_per_document=self._spec.stored.bytes_of(vectors.shape[1]))
        asked = self.pool.share(comparable(vectors, self._spec.similarity))
        if top_ranked is not None:
            found = self._rerank(corpus, ids, asked, document_spec, top_ranked, task, context)
        else:
            found = self._best(corpus, len(ids), asked, document_spec, top_k, task, context)
        return _by_id(corpus, ids, top_k, *found)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Similarities (N1, N2) float32 of all pairs from two sets of vectors."""
        return self._comparable(embeddings1) @ self._comparable(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Tensor:
        """Similarities (N,) float32 between the two vectors of each row."""
        return (self._comparable(embeddings1) * self._comparable(embeddings2)).sum(dim=-1)

    def _comparable(self, embeddings: Any) -> Tensor:
        vectors = np.asarray(torch.as_tensor(embeddings).cpu(), dtype=np.float32)
        return torch.from_numpy(
            comparable(vectors.reshape(-1, vectors.shape[-1]), self._spec.similarity)
        )

    def _in_context(
        self, encode_spec: EncodeSpec, key: tuple[str, str, str], texts: Callable[[], Iterator[str]]
    ) -> tuple[EncodeSpec, Any]:
        """Add the name of the task's context to the encode spec; also return the context's
        documents as the pool shares them.

        Args:
            key: what has one context.
            texts: those that it is drawn from, the first time.
        """
        spec = self._spec
        if not isinstance(spec, ContextualSpec) or not spec.num_context:
            return encode_spec, None
        if key not in self._contexts:
            drawn = draw_context(texts(), spec.num_context, seed=spec.context_seed)
            self._contexts[key] = "", None
            if drawn.documents:
                self._contexts[key] = drawn.name, self.pool.share(packed(drawn.documents))
        name, shared = self._contexts[key]
        return replace(encode_spec, context=name), shared

    def _embed(
        self, texts: Sequence[str], encode_spec: EncodeSpec, task: str, context: Any = None
    ) -> np.ndarray:
        """(N, D) float32 embeddings of the texts, computed by the pool."""
        assert texts, f"{task}: no texts to embed"
        vectors: np.ndarray | None = None
        units = self._units(
            hashes_of(texts), encode_spec, lambda rows: [texts[row] for row in rows], task
        )
        self._known += len(texts)
        for unit, made in self._run(units, lambda unit: unit.texts, task, None, context):
            if vectors is None:
                vectors = np.empty((len(texts), made.shape[1]), np.float32)
            vectors[unit.row] = made[unit.place]
        assert vectors is not None
        return vectors

    def _best(
        self,
        corpus: Any,
        num_queries: int,
        queries: Any,
        encode_spec: EncodeSpec,
        k: int,
        task: str,
        context: Any,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Search the corpus; return query indices, corpus rows and scores, by query, best first."""
        rescore = self._spec.stored.rescore
        best = BestDocuments(num_queries, k, rescore.candidates if rescore else 0)
        units = self._units(
            _hashed(corpus), encode_spec, lambda rows: document_texts(corpus, rows), task
        )

        def call(unit: _Unit) -> TopDocuments:
            return TopDocuments(unit.texts, k, best.lowest)

        self._known += len(corpus)
        for unit, found in self._run(units, call, task, queries, context):
            self.cost += Cost(found.embedded, found.seconds)
            entry, row = _rows_of(unit, found.document)
            again = None if found.again is None else found.again[entry]
            best.add(found.query[entry], row, found.score[entry], again)
        return best.results()

    def _rerank(
        self,
        corpus: Any,
        ids: Sequence[str],
        queries: Any,
        encode_spec: EncodeSpec,
        top_ranked: Mapping[str, Sequence[str]],
        task: str,
        context: Any,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Score the given documents of each query; return query indices, corpus rows and scores, by
        query and decreasing score.
        """
        row_of = {document: row for row, document in enumerate(corpus["id"])}
        query = [number for number, name in enumerate(ids) for _ in top_ranked.get(name, ())]
        pairs_query = np.array(query, dtype=np.int32)
        pairs_row = np.array(
            [row_of[document] for name in ids for document in top_ranked.get(name, ())],
            dtype=np.int64,
        )
        if lost := [name for name in ids if not top_ranked.get(name)]:
            logger.warning("%s: %d queries have no documents to rank", task, len(lost))
        wanted = np.unique(pairs_row)
        hashes = _hashed(corpus, wanted)
        units = self._units(
            hashes, encode_spec, lambda rows: document_texts(corpus, wanted[rows]), task
        )
        place_of_pair = np.searchsorted(wanted, pairs_row)
        pairs_of = places_of(place_of_pair, len(wanted))
        pairs: dict[int, np.ndarray] = {}

        def call(unit: _Unit) -> PairScores:
            own = [pairs_of(row) for row in unit.row]
            pairs[id(unit)] = np.concatenate(own)
            document = np.repeat(unit.place, list(map(len, own))).astype(np.int32)
            return PairScores(unit.texts, pairs_query[pairs[id(unit)]], document)

        scores = np.empty(len(pairs_row), np.float32)
        self._known += len(wanted)
        for unit, found in self._run(units, call, task, queries, context):
            self.cost += Cost(found.embedded, found.seconds)
            scores[pairs.pop(id(unit))] = found.score
        order = np.lexsort((pairs_row, -scores, pairs_query))
        return pairs_query[order], pairs_row[order], scores[order]

    def _units(
        self,
        hashes: np.ndarray,
        encode_spec: EncodeSpec,
        texts_at: Callable[[np.ndarray], list[str]],
        task: str,
    ) -> Iterator[_Unit]:
        """Divide the texts with these (N, 16) hashes into units; texts are looked up only when a
        unit is needed.

        The same for any number of workers, and each distinct text in one unit alone. Each task
        begins elsewhere: two that embed the same corpus beside each other take different texts
        first, and find the rest in the store.
        """
        of = num_buckets(len(hashes))
        by_bucket = list(places_by_bucket(hashes, of).items())
        first_bucket = xxhash.xxh3_64_intdigest(task.encode()) % max(1, len(by_bucket))
        for number, rows in by_bucket[first_bucket:] + by_bucket[:first_bucket]:
            _, first, place = np.unique(
                hashes[rows], axis=0, return_index=True, return_inverse=True
            )
            place = place.reshape(-1)
            texts = tuple(texts_at(rows[first]))
            order = np.argsort(place, kind="stable")
            yield _Unit(
                TextUnit(EmbeddingBucket(encode_spec, number, of), texts), rows[order], place[order]
            )

    def _run(
        self,
        units: Iterator[_Unit],
        call_of: Callable[[_Unit], Call],
        task: str,
        queries: Any,
        context: Any,
    ) -> Iterator[tuple[_Unit, Any]]:
        """Yield each unit with the result of its call as it finishes, and then report
        progress.

        Calls are made only when the pool takes them.
        """
        by_call: dict[int, _Unit] = {}

        def calls() -> Iterator[Call]:
            for unit in units:
                call = call_of(unit)
                by_call[id(call)] = unit
                yield call

        for call, found in self.pool.run(calls(), queries, context):
            unit = by_call.pop(id(call))
            yield unit, found
            self._done += len(unit.row)
            self._progress(task, self._done, self._known)


def query_texts(queries: Any, task_metadata: Any, num_proc: int | None = None) -> list[str]:
    """Texts of a task's queries; instructions and conversation turns are joined as in mteb.

    By a private function: mteb has no public way from queries to texts, and its own search takes
    this one, too.
    """
    loader = create_dataloader(
        queries,
        task_metadata=task_metadata,
        prompt_type=PromptType.query,
        batch_size=1024,
        num_proc=num_proc,
    )
    return [text for batch in loader for text in batch["text"]]


def all_documents(corpus: Any) -> Iterator[str]:
    """Texts of all documents of a corpus, in its order; see `document_texts`."""
    for start in range(0, len(corpus), _ROWS_AT_ONCE):
        yield from document_texts(corpus, range(start, min(start + _ROWS_AT_ONCE, len(corpus))))


def document_texts(corpus: Any, rows: Sequence[int] | np.ndarray) -> list[str]:
    """Texts of the corpus's documents; title and text are joined as in mteb."""
    found = corpus[rows]
    bodies = found["text"]
    titles = found.get("title") or [None] * len(bodies)
    return [
        f"{title} {body}".strip() if title else body.strip()
        for title, body in zip(titles, bodies, strict=True)
    ]


def places_of(groups: np.ndarray, count: int) -> Callable[[int], np.ndarray]:
    """Return a function from a group number below `count` to the group's indices in `groups`."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(count + 1))

    def places(number: int) -> np.ndarray:
        found: np.ndarray = order[starts[number] : starts[number + 1]]
        return found

    return places


def _hashed(corpus: Any, rows: np.ndarray | None = None) -> np.ndarray:
    """(N, 16) hashes of the corpus's documents, of the given rows or of all."""
    count = len(corpus) if rows is None else len(rows)
    parts = []
    for start in range(0, count, _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, count)
        some = range(start, end) if rows is None else rows[start:end]
        parts.append(hashes_of(document_texts(corpus, some)))
    return np.concatenate(parts) if parts else np.empty((0, 16), np.uint8)


def _rows_of(unit: _Unit, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Map (R,) text indices in the unit to all data set rows with that text; return index into (R,)
    and row.
    """
    first = np.searchsorted(unit.place, places, side="left")
    counts = np.searchsorted(unit.place, places, side="right") - first
    entry = np.repeat(np.arange(len(places)), counts)
    within = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
    return entry, unit.row[np.repeat(first, counts) + within]


def _by_id(
    corpus: Any,
    ids: Sequence[str],
    top_k: int,
    query: np.ndarray,
    row: np.ndarray,
    score: np.ndarray,
) -> dict[str, dict[str, float]]:
    """Map query ids to the scores of their first `top_k` documents, by document id."""
    rows, inverse = np.unique(row, return_inverse=True)
    names: list[str] = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        names += corpus[rows[start : start + _ROWS_AT_ONCE]]["id"]
    found: dict[str, dict[str, float]] = {name: {} for name in ids}
    for number, place, value in zip(query.tolist(), inverse.tolist(), score.tolist(), strict=True):
        of_query = found[ids[number]]
        if len(of_query) < top_k:
            of_query[names[place]] = value
    return found
