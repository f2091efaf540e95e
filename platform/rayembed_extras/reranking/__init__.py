"""Train cross-encoders that rerank what an embedding model finds."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rayembed.training.trainer import Callback
    from rayembed_extras.reranking.train import TrainedReranker


def train_reranker(
    model: "str | Path",
    pairs: Any,
    *,
    embedder: "str | Path | None" = None,
    loss: Any = None,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    name: str | None = None,
    output: "str | Path" = "outputs",
    workers: int = 1,
    callbacks: "Sequence[Callback]" = (),
    settings: Mapping[str, Any] | None = None,
) -> "TrainedReranker":
    """Train a cross-encoder on pairs, and score it behind the embedder whose results it reranks.

    The embedder mines hard negatives among the positives of all pairs; the model learns to score a
    query's positive above them. A tenth of the documents is held out: the result has nDCG@10 and
    MRR@10 of the embedder's order and of the reranked one. The same call goes on where a former
    one stopped.

    Args:
        model: what to start from: an encoder, whose layer that scores is then new, or a reranker in
            the format of transformers; a folder, an asset reference or a short name.
        pairs: as of `rayembed.train`: a path, a DataFrame, a `datasets.Dataset`, or a list of
            tuples (query, positive) or of dicts.
        embedder: reference of the embedding model; None: all-MiniLM-L6-v2.
        loss: a loss over lists, such as `"pointwise_bce"`, or its settings; None: the recipe's,
            `listwise_softmax`.
        steps: weight updates; None: by `epochs`.
        epochs: passes over the pairs; one without `steps`.
        batch_size: lists in a step, over all workers; None: 16, or fewer where pairs are few.
        learning_rate: its highest; None: the recipe's.
        name: of the run; None: by the settings and what the files hold.
        output: folder or address of object storage for all results.
        workers: data-parallel processes.
        callbacks: of the trainer, on every worker; with several workers they are pickled.
        settings: further settings by path, as those of the job's `--set`.

    Raises:
        RayembedError: what is wrong and what to do.
    """
    from rayembed_extras.reranking.calls import train_on_pairs

    given = {
        "stages.rerank.steps": steps,
        "stages.rerank.epochs": epochs,
        "stages.rerank.batch.global_pairs": batch_size,
        "stages.rerank.optimizer.learning_rate": learning_rate,
        "placement.workers": workers,
    }
    return train_on_pairs(
        model,
        pairs,
        given,
        embedder=embedder,
        loss=loss,
        name=name,
        output=output,
        callbacks=callbacks,
        settings=settings or {},
    )
