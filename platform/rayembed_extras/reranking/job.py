"""Run the reranker job: train a cross-encoder, and score it behind its embedder."""

import argparse

from rayembed.config.run import Run
from rayembed.pipeline.job import JobContext, option
from rayembed.pipeline.run.training_job import PAIRS, checked_at_hand, take_pairs, training_job

RERANKER = "reranker"
"""Name of the recipe for the user's own pairs."""

_EMBEDDER = option(
    "--embedder REFERENCE",
    "the embedding model that the reranker will serve behind: it mines the hard negatives, and its "
    "order of the held-out documents is reranked; default: all-MiniLM-L6-v2",
)


def _take(args: argparse.Namespace) -> None:
    """Convert `--pairs` and `--embedder` to assignments, which later ones may override."""
    if args.pairs is not None:
        take_pairs(args, RERANKER)
    if args.embedder is not None:
        setting = "data.datasets.pairs.mining.teacher"
        args.assignments = [f"{setting}={args.embedder}", *args.assignments]


def _train(run: Run, context: JobContext) -> None:
    run = checked_at_hand(run)  # in a second; what follows imports torch, and perhaps Ray
    from rayembed_extras.reranking.train import print_trained, train

    print_trained(train(run), context.out)


run_reranker_job = training_job(RERANKER, own=(PAIRS, _EMBEDDER), take=_take, work=_train)
"""The job that trains rerankers."""
