"""Compare the roads to a new model on one sample of an index: the four cells of old and new
queries and documents, and each map.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rayembed.display.progress import doing
from rayembed.errors import DataError
from rayembed.results.intervals import PairedDifference
from rayembed_extras.index_upgrades.fitting import fit_map, fit_ridge
from rayembed_extras.index_upgrades.maps import MapKind, QueryMap, identity_map
from rayembed_extras.index_upgrades.measure import (
    QueryScores,
    ShareKept,
    as_judgements,
    difference,
    rank_documents,
    score,
    share_kept,
)
from rayembed_extras.index_upgrades.models import UpgradeModel
from rayembed_extras.index_upgrades.sample import TextSample, first_sentence, some_words
from rayembed_extras.index_upgrades.settings import UpgradeRun
from rayembed_extras.indexing.judged_queries import JudgedQueries
from rayembed_extras.indexing.layout import as_compared, as_stored
from rayembed_extras.indexing.settings import NumberType

logger = logging.getLogger(__name__)

MEASUREMENT = 3
"""Number of the way to measure; raise it when the same inputs give other figures."""
FULL = "full re-embedding"
"""Label of the road that embeds all documents again."""
BEFORE, IDENTITY = "before the upgrade", "no map (identity)"
"""Labels of the roads of old queries, and of new queries as they are, on old documents."""
_MOST_FIT_ROWS = 4
"""Fitted rows for each of `fit_documents`: long documents have many chunks."""
_FEWEST_QUERIES = 20


@dataclass(frozen=True)
class MeasuredRoad:
    """Scores of one pair of query vectors and document vectors."""

    label: str
    queries: str
    """Whose query vectors: `old`, `new`, or `new, <map>`."""
    documents: str
    """Whose document vectors: `old` or `new`."""
    scores: QueryScores | None = None
    """None: not comparable, or the old model is not there."""
    share: ShareKept | None = None
    """Share of full re-embedding's recall@10."""
    apart: PairedDifference | None = None
    """Difference of nDCG@10 to full re-embedding."""
    kind: MapKind | None = None
    agreement: float | None = None
    """Share of the new model's own first 10 documents that the map's queries return, for other
    queries: by it the best map is chosen."""
    seconds: float = 0.0
    """Seconds to fit the map."""


@dataclass(frozen=True)
class Measurement:
    """Result of a comparison of roads."""

    roads: tuple[MeasuredRoad, ...]
    best: QueryMap | None
    """Map with the highest agreement; None: none could be fitted."""
    judged: bool
    """Whether queries are judged; otherwise the new model's own results count as right."""
    num_queries: int
    searched: int
    documents: int
    """Documents of the index; fewer than that may be searched."""
    rows: int
    fit_rows: int
    notes: tuple[str, ...] = field(default=())

    @property
    def full(self) -> MeasuredRoad:
        """Full re-embedding."""
        return next(road for road in self.roads if road.label == FULL)

    @property
    def mapped(self) -> MeasuredRoad | None:
        """The best map's road."""
        if self.best is None:
            return None
        return next(road for road in self.roads if road.kind == self.best.kind)


@dataclass(frozen=True)
class _Vectors:
    """Searched rows of a sample, by both models."""

    old: np.ndarray
    """As the store keeps them."""
    new: np.ndarray
    """As the model gives them."""
    owners: np.ndarray
    number_type: NumberType

    def ranked(self, queries: np.ndarray, documents: str) -> np.ndarray:
        """Rank as a store of the number type does."""
        kind = self.number_type
        rows = self.old if documents == "old" else as_stored(self.new, kind)
        return rank_documents(as_compared(queries, kind), rows, self.owners)

    def reference(self, queries: np.ndarray) -> list[dict[int, int]]:
        """Judge by the new model's own results, before a store rounds its vectors."""
        return as_judgements(rank_documents(queries, self.new, self.owners))


def compare_roads(
    run: UpgradeRun,
    sample: TextSample,
    old: UpgradeModel | None,
    new: UpgradeModel,
    judged: JudgedQueries | None,
) -> Measurement:
    """Embed the sample by the new model, fit the maps, choose the best one and score all roads.

    Args:
        old: None: the index's model is not there; its queries are not measured.
        judged: None: first sentences of documents, with the new model's results as reference.

    Raises:
        DataError: too few texts to fit or to choose by.
    """
    logger.info("embedding %s texts of the sample by the new model", f"{len(sample.texts):,}")
    new_rows = new.documents(sample.texts)
    searched = sample.rows_of(sample.searched)
    rows = sample.old[searched], new_rows[searched], sample.owners[searched]
    vectors = _Vectors(*rows, sample.number_type)
    choosing, measuring = _sentences(sample, run, None if judged is None else judged.documents)
    new_choosing = new.queries(choosing)
    reference = vectors.reference(new_choosing)
    maps, seconds, fit_rows = _fitted(run, sample, old, new, new_rows)
    agreements = {
        kind: float(score(vectors.ranked(made(new_choosing), "old"), reference).recall.mean())
        for kind, made in maps.items()
    }
    best = maps[max(agreements, key=lambda kind: agreements[kind])] if agreements else None
    texts: Sequence[str] = measuring if judged is None else judged.texts
    new_queries = new.queries(texts)
    if judged is None:
        relevant = vectors.reference(new_queries)
    else:
        numbers = {name: number for number, name in enumerate(sample.names)}
        relevant = [{numbers[name]: grade for name, grade in one.items()} for one in judged.grades]
    full = score(vectors.ranked(new_queries, "new"), relevant)
    roads = [MeasuredRoad(FULL, "new", "new", full)]
    roads += _old_roads(old, texts, vectors, relevant, full)
    for kind, made in maps.items():
        scores = score(vectors.ranked(made(new_queries), "old"), relevant)
        label = IDENTITY if kind == "identity" else f"map: {kind}"
        roads.append(
            MeasuredRoad(
                label,
                "new" if kind == "identity" else f"new, {kind}",
                "old",
                scores,
                share_kept(scores, full),
                difference(scores.ndcg, full.ndcg),
                kind,
                agreements[kind],
                seconds[kind],
            )
        )
    return Measurement(
        tuple(roads),
        best,
        judged is not None,
        len(texts),
        int(sample.searched.sum()),
        sample.documents,
        sample.rows,
        fit_rows,
        tuple(_notes(roads, best, new, sample, is_judged=judged is not None)),
    )


def _fitted(
    run: UpgradeRun,
    sample: TextSample,
    old: UpgradeModel | None,
    new: UpgradeModel,
    new_rows: np.ndarray,
) -> tuple[dict[MapKind, QueryMap], dict[MapKind, float], int]:
    """Fit all maps; return them with their seconds, and the number of fitted texts."""
    rows = sample.rows_of(sample.fits)[: _MOST_FIT_ROWS * run.fit_documents]
    given = [(new_rows[rows], sample.old[rows])]
    if run.fits_maps and run.fit_on != "documents" and old is not None:
        _, first = np.unique(sample.owners[rows], return_index=True)
        texts = [sample.texts[row] for row in rows[first].tolist()]
        made = (cut(text) for cut in (first_sentence, some_words) for text in texts)
        sentences = [sentence for sentence in made if sentence is not None]
        if sentences:
            targets = old.queries(sentences)
            if sample.number_type == "bits":
                # Of documents the store has signs alone: as near as these tell their vectors.
                vectors = fit_ridge(as_compared(targets, "bits"), targets)
                given = [(given[0][0], given[0][1] @ vectors.weight + vectors.bias)]
            kept = given if run.fit_on == "both" else []
            given = [*kept, (new.queries(sentences), targets)]
    news, olds = (np.concatenate(parts) for parts in zip(*given, strict=True))
    maps: dict[MapKind, QueryMap] = {}
    seconds: dict[MapKind, float] = {}
    for kind in run.maps:
        began = time.perf_counter()
        if kind == "identity":
            same = identity_map(new_rows.shape[1], sample.old.shape[1])
            if same is not None:
                maps[kind] = same
        else:
            with doing(f"fitting the map {kind} on {len(news):,} texts"):
                maps[kind] = fit_map(kind, news, olds, seed=run.seed)
        seconds[kind] = time.perf_counter() - began
        logger.info("fitted %s in %.1f s", kind, seconds[kind])
    return maps, seconds, len(news)


def _old_roads(
    old: UpgradeModel | None,
    texts: Sequence[str],
    vectors: _Vectors,
    relevant: Sequence[Mapping[int, int]],
    full: QueryScores,
) -> list[MeasuredRoad]:
    cells = [(BEFORE, "old", "old"), ("old queries", "old", "new")]
    made = None if old is None else old.queries(texts)
    roads = []
    for label, queries, documents in cells:
        width = (vectors.old if documents == "old" else vectors.new).shape[1]
        if made is None or made.shape[1] != width:
            roads.append(MeasuredRoad(label, queries, documents))
            continue
        scores = score(vectors.ranked(made, documents), relevant)
        share, apart = share_kept(scores, full), difference(scores.ndcg, full.ndcg)
        roads.append(MeasuredRoad(label, queries, documents, scores, share, apart))
    return roads


def _sentences(
    sample: TextSample, run: UpgradeRun, judged: set[str] | None
) -> tuple[list[str], list[str]]:
    """First sentences of documents that no map is fitted on: to choose the map by, and to measure
    by if no query is judged.
    """
    free = np.flatnonzero(sample.searched & ~sample.fits)
    firsts = np.searchsorted(sample.owners, free)
    found = []
    for document, row in zip(free.tolist(), firsts.tolist(), strict=True):
        if judged is not None and sample.names[document] in judged:
            continue
        sentence = first_sentence(sample.texts[row])
        if sentence is not None:
            found.append(sentence)
        if len(found) == (1 if judged is not None else 2) * run.sampled_queries:
            break
    found = list(dict.fromkeys(found))
    if judged is not None and len(found) < _FEWEST_QUERIES:
        # Judged documents are all that there is to search.
        made = (first_sentence(sample.texts[row]) for row in firsts.tolist())
        found = [sentence for sentence in made if sentence is not None][: run.sampled_queries]
    half = len(found) if judged is not None else len(found) // 2
    if min(half, len(found) - half if judged is None else half) < _FEWEST_QUERIES:
        raise DataError(
            f"only {len(found)} documents of the sample have a first sentence that can stand as a "
            f"query (at least {2 * _FEWEST_QUERIES}); name judged queries (--queries), or embed "
            "the documents again: --road backfill"
        )
    return found[:half], found[half:]


def sample_notes(sample: TextSample) -> list[str]:
    """Note that a part of the index is searched; none if all of it is."""
    searched = int(sample.searched.sum())
    if searched == sample.documents:
        return []
    return [
        f"measured on {searched:,} of {sample.documents:,} documents: those that queries are "
        "judged on, and a random sample, among which all roads find more"
    ]


def _notes(
    roads: Sequence[MeasuredRoad],
    best: QueryMap | None,
    new: UpgradeModel,
    sample: TextSample,
    *,
    is_judged: bool,
) -> list[str]:
    notes = sample_notes(sample)
    before = next(road for road in roads if road.label == BEFORE)
    full = roads[0].scores
    if before.scores is None:
        notes.append("the index's model was not loaded, so its own queries are not measured")
    elif full is not None and is_judged:
        mapped = next((road.scores for road in roads if best and road.kind == best.kind), None)
        kind = "" if best is None else best.kind
        for scores, what in ((full, "after full re-embedding"), (mapped, f"with the map {kind}")):
            if scores is None:
                continue
            apart = difference(scores.ndcg, before.scores.ndcg)
            if apart.interval is not None and apart.interval[0] <= 0:
                notes.append(
                    f"on these queries {new.reference} {what} is not clearly better than the "
                    f"index's own model, which needs no upgrade: nDCG@10 {apart.shown()}"
                )
    return notes
