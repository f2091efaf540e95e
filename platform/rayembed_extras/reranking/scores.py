"""Scores of a reranker behind an embedder: both orders of the same documents."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rayembed.config.evaluation import EvaluationPlacement, EvaluationRun, ModelUnderTest
from rayembed.config.own_sets import RetrievalSet
from rayembed.config.run import Run
from rayembed.config.run_evaluation import Reranker
from rayembed.evaluation.score import ModelScores, gain
from rayembed.pipeline.evaluate.evaluate import evaluate
from rayembed.results.intervals import PairedDifference
from rayembed.results.scores import BM25_ROW, HYBRID, HYBRID_RERANKED, RERANKED

EMBEDDER = "embedder"

TOP_K = 50
"""Best documents of the embedder that are reranked."""


@dataclass(frozen=True)
class RerankedScores:
    """Scores of the held-out sets by row (the embedder, BM25, both fused, and these reranked)."""

    by_row: Mapping[str, Mapping[str, float]]
    """nDCG@10 by row and set."""
    mrr: Mapping[str, Mapping[str, float]]
    """MRR@10 by row and set."""
    gain: PairedDifference
    """Reranked less the embedder's own order, nDCG@10, with its interval."""

    @property
    def labels(self) -> dict[str, str]:
        """Map each row to its name for readers."""
        names = {
            EMBEDDER: "the embedder's",
            RERANKED: f"its best {TOP_K} reranked",
            BM25_ROW: "BM25",
            HYBRID: "hybrid with BM25",
            HYBRID_RERANKED: f"best {TOP_K} of the hybrid reranked",
        }
        return {row: name for row, name in names.items() if row in self.by_row}

    def mean(self, row: str) -> float:
        """Mean nDCG@10 of a row over the sets."""
        return fmean(self.by_row[row].values())

    def mean_mrr(self, row: str) -> float:
        """Mean MRR@10 of a row over the sets."""
        return fmean(self.mrr[row].values())


def score_behind(
    embedder: str, reranker: str, sets: Sequence[RetrievalSet], run: Run
) -> RerankedScores:
    """Score the embedder's order of retrieval sets, and the order of its best documents by the
    reranker.

    Args:
        embedder: reference of an embedding model.
        reranker: folder of a cross-encoder.
        run: whose storage keeps the results, and on whose hardware they are computed.

    Raises:
        RayembedError: a model or a set cannot be used.
    """
    placement = run.placement
    length = run.model.document_max_length
    evaluation = EvaluationRun(
        model=ModelUnderTest(reference=embedder),
        own_sets=tuple(sets),
        reranker=Reranker(model=reranker, top_k=TOP_K, max_length=length),
        placement=EvaluationPlacement(
            storage_path=placement.storage_path,
            workers=placement.fewest_workers,
            use_gpu=placement.use_gpu,
            cpus_per_worker=placement.cpus_per_worker,
            tracking_uri=placement.tracking_uri,
            runtime=placement.runtime,
        ),
    )
    scored = evaluate(evaluation).scored
    for _, error in scored.failed:
        raise error
    rows = {EMBEDDER: scored, **scored.further}
    for one in rows.values():
        for _, error in one.failed:
            raise error
    return RerankedScores(
        by_row={row: dict(of.scores) for row, of in rows.items()},
        mrr={row: _mrr(of) for row, of in rows.items()},
        gain=gain(scored.further[RERANKED], scored, sorted(scored.scores)),
    )


def _mrr(scored: ModelScores) -> dict[str, float]:
    """Read MRR@10 of each task from mteb's result files."""
    found = {}
    for task in scored.scores:
        values = json.loads((scored.local / f"{task}.json").read_text(encoding="utf-8"))
        splits = values["scores"].values()
        found[task] = fmean(float(one["mrr_at_10"]) for split in splits for one in split)
    return found
