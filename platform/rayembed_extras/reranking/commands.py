"""Declare the job that trains rerankers for the `rayembed` command."""

from rayembed.jobs.table import TRAIN, Command

TRAIN_RERANKER = Command(
    TRAIN,
    "Train a reranker on your own pairs, and score it behind its embedder.\n\n"
    "The embedder mines hard negatives; a cross-encoder learns to rank a query's positive above "
    "them. The held-out part of the pairs shows the embedder's order against the reranked one.",
    "rayembed_extras.reranking.job:run_reranker_job",
)
