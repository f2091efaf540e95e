"""Baselines scored beside a model: BM25, hybrid search of both, and their best documents
reranked.

They are made of what the model's own search finds, so that nothing is embedded or searched twice.
Hybrid search is reciprocal rank fusion, Σ 1 / (60 + rank) over both rankings (Cormack, Clarke and
Büttcher, SIGIR 2009), by mteb's own function.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mteb.models import ModelMeta
from mteb.models.hybrid_wrappers import fuse_rrf

from rayembed.assets.resolver import resolve_model
from rayembed.config.run_evaluation import Reranker
from rayembed.data.mining.rescoring import check_cross_encoder
from rayembed.evaluation.bm25 import Bm25, bm25_meta, bm25_revision
from rayembed.evaluation.model_spec import model_meta
from rayembed.evaluation.pooled.model import document_texts, query_texts
from rayembed.evaluation.pooled.rerank import QueryPairs
from rayembed.models.loading.files import weights_fingerprint
from rayembed.results.costs import Cost
from rayembed.results.scores import BM25_ROW, HYBRID, HYBRID_RERANKED, RERANKED

_RANK_CONSTANT = 60

Rankings = Mapping[str, Mapping[str, float]]
"""Query → document → score."""


@dataclass(frozen=True)
class Baselines:
    """Names and settings of the baselines that are scored beside the model, on some of its
    tasks.
    """

    tasks: tuple[str, ...] = ()
    """Names of the tasks; those that are no retrieval are left out."""
    reranker: Reranker | None = None
    """Cross-encoder of two further rows; None: there are none."""
    reranker_weights: str = ""
    """Fingerprint of the cross-encoder's weights."""

    @property
    def rows(self) -> tuple[str, ...]:
        """Names of the baselines."""
        reranked = () if self.reranker is None else (RERANKED, HYBRID_RERANKED)
        return (BM25_ROW, HYBRID, *reranked)

    def meta(self, row: str, model: ModelMeta) -> ModelMeta:
        """Make mteb's metadata of a baseline: its name ends in the baseline's, its revision names
        everything that affects its scores.

        A revision begins with another word than the model's own, so that nobody takes its scores
        for the model's.
        """
        if row == BM25_ROW:
            return bm25_meta("BM25", bm25_revision())  # as a run names its baseline
        parts = [f"rrf{_RANK_CONSTANT}-{bm25_revision()}"] if row != RERANKED else []
        if self.reranker is not None and row != HYBRID:
            parts.append(f"reranked{self.reranker.top_k}-{self.reranker_weights}")
            parts.append(f"{self.reranker.max_length}")
        revision = "-".join([*parts, str(model.revision)])
        return model_meta(f"{model.name}-{row}", revision, model_type=["hybrid"])


def baselines_of(tasks: Iterable[str], reranker: Reranker | None) -> Baselines:
    """Make the baselines on these tasks, with the fingerprint of the reranker's weights.

    Raises:
        AssetError: the reranker is no cross-encoder, or cannot be had.
    """
    if reranker is None:
        return Baselines(tuple(tasks))
    folder = resolve_model(reranker.model)
    check_cross_encoder(folder, reranker.model)
    return Baselines(tuple(tasks), reranker, weights_fingerprint(folder))


class Recorded:
    """Implements mteb's `SearchProtocol`: wraps a model and keeps the rankings that its searches
    return.

    `found` has them by split and subset, in copies: mteb changes what a search returns.
    """

    def __init__(self, model: Any) -> None:
        self.mteb_model_meta = model.mteb_model_meta
        self.model = model
        self.found: dict[tuple[str, str], Rankings] = {}

    @property
    def cost(self) -> Cost:
        """Measured cost of embedding the model's documents."""
        return getattr(self.model, "cost", Cost())

    def index(self, corpus: Any, **options: Any) -> None:
        """Index the corpus with the wrapped model."""
        self.model.index(corpus, **options)

    def search(self, queries: Any, *, hf_split: str, hf_subset: str, **options: Any) -> Any:
        """Search with the wrapped model; keep and return its ranking."""
        found = self.model.search(queries, hf_split=hf_split, hf_subset=hf_subset, **options)
        self.found[hf_split, hf_subset] = {query: dict(of) for query, of in found.items()}
        return found


class _Fused:
    """Implements mteb's `SearchProtocol`: fuses the recorded rankings of the model and of BM25."""

    def __init__(self, meta: ModelMeta, model: Recorded, words: Recorded) -> None:
        self.mteb_model_meta = meta
        self._model, self._words = model, words

    @property
    def cost(self) -> Cost:
        return self._model.cost.with_index(self._words.cost)

    def index(self, corpus: Any, **_options: Any) -> None:
        """Do nothing, because both models have searched already."""

    def search(
        self, queries: Any, *, hf_split: str, hf_subset: str, top_k: int, **_options: Any
    ) -> dict[str, dict[str, float]]:
        rankings = (self._model.found[hf_split, hf_subset], self._words.found[hf_split, hf_subset])
        return {
            query: fused([ranking.get(query, {}) for ranking in rankings], top_k)
            for query in queries["id"]
        }


def fused(rankings: Sequence[Mapping[str, float]], top_k: int) -> dict[str, float]:
    """Fuse rankings of one query; in the last one, BM25's, documents that share no word with the
    query have no rank.

    Of equal scores the greater id is first, as mteb's scores have it.
    """
    *others, words = rankings
    with_words = {document: score for document, score in words.items() if score > 0}
    found = fuse_rrf([*others, with_words], [1.0] * len(rankings), rrf_k=_RANK_CONSTANT)
    best = sorted(found.items(), key=lambda entry: (entry[1], entry[0]), reverse=True)
    return dict(best[:top_k])


class _Reranked:
    """Implements mteb's `SearchProtocol`: a cross-encoder orders the best documents of a recorded
    ranking again, before all others.
    """

    def __init__(self, meta: ModelMeta, first: Recorded, baselines: Baselines, pool: Any) -> None:
        assert baselines.reranker is not None
        self.mteb_model_meta = meta
        self.cost = Cost()
        self._first, self._reranker, self._pool = first, baselines.reranker, pool
        self._weights = baselines.reranker_weights
        self._corpus: Any = None

    def index(self, corpus: Any, **_options: Any) -> None:
        """Keep the corpus for `search`."""
        self._corpus = corpus

    def search(
        self,
        queries: Any,
        *,
        task_metadata: Any,
        hf_split: str,
        hf_subset: str,
        top_k: int,
        num_proc: int | None = None,
        **_options: Any,
    ) -> dict[str, dict[str, float]]:
        found = self._first.found[hf_split, hf_subset]
        row_of = {document: row for row, document in enumerate(self._corpus["id"])}
        ranked = {query: _best_first(found.get(query, {})) for query in queries["id"]}
        texts = dict(zip(queries["id"], query_texts(queries, task_metadata, num_proc), strict=True))

        def calls() -> Iterator[QueryPairs]:
            for number, (query, documents) in enumerate(ranked.items()):
                rows = [row_of[document] for document in documents[: self._reranker.top_k]]
                if rows:
                    read = tuple(document_texts(self._corpus, rows))
                    yield QueryPairs(number, texts[query], read, self._reranker, self._weights)

        results: dict[str, dict[str, float]] = {
            query: {
                document: -float(rank) for rank, document in enumerate(documents[:top_k], start=1)
            }
            for query, documents in ranked.items()
        }
        names = list(ranked)
        for call, scores in self._pool.run(calls()):
            query = names[call.number]
            # From 0 to 1, so above all ranks taken as negative scores.
            of_best = zip(ranked[query], scores.tolist(), strict=False)
            results[query] |= dict(of_best)
        return results


def _best_first(found: Mapping[str, float]) -> list[str]:
    return sorted(found, key=lambda document: (found[document], document), reverse=True)


def further_searches(model: Recorded, baselines: Baselines) -> Iterator[tuple[str, Any]]:
    """Yield each baseline's name and search; each uses the rankings of earlier ones, which must
    have searched first.
    """

    def meta(row: str) -> ModelMeta:
        return baselines.meta(row, model.mteb_model_meta)

    words = Recorded(Bm25(meta(BM25_ROW)))
    yield BM25_ROW, words
    both = Recorded(_Fused(meta(HYBRID), model, words))
    yield HYBRID, both
    if baselines.reranker is not None:
        pool = model.model.pool
        yield RERANKED, _Reranked(meta(RERANKED), model, baselines, pool)
        yield HYBRID_RERANKED, _Reranked(meta(HYBRID_RERANKED), both, baselines, pool)
