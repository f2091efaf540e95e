"""Run the corpus job: save a contextual model together with context vectors of a corpus."""

import argparse
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rayembed.config.types import expanded_name
from rayembed.errors import ArtifactError, DataError
from rayembed.pipeline.job import Job, JobContext, option

logger = logging.getLogger(__name__)

_DOCUMENTS_BETWEEN_LOGS = 100_000
_SECONDS_BETWEEN_LOGS = 5.0


def save_with_corpus(
    reference: str, documents: Iterable[str], output: Path, *, pick: str, seed: int
) -> int:
    """Save the model with context documents of a corpus and new reference vectors (proof) in
    `output`; return the number of documents.

    Args:
        reference: asset reference of a saved contextual model, or a copy of a published one.
        pick: `random` reads the documents once; `clusters` holds and embeds all of them.

    Raises:
        ArtifactError: the model takes no context, or `output` holds something else than a model.
        AssetError: the reference leads nowhere.
        DataError: the corpus has no document.
    """
    from rayembed.assets.resolver import resolve_model
    from rayembed.machine.hardware import default_device
    from rayembed.models.loading.load import check_loadable, load_model, saved_dtype
    from rayembed.models.loading.saved_prompts import saved_instructions
    from rayembed.models.passes.encoding import corpus_context
    from rayembed.models.saving.export import check_target, read_compression, write_compression
    from rayembed.proof.write import write_proof
    from rayembed_extras.corpora.clusters import clustered_context

    check_target(output)
    folder = resolve_model(reference)
    config = check_loadable(folder)
    if not config.context_places:
        raise ArtifactError(
            f"{reference!r} is a model of kind {config.kind!r}, which has no corpus context; use "
            "a contextual model, such as CDE"
        )
    model = load_model(folder, device=default_device())
    documents = _counted(documents)
    if pick == "clusters":
        context = clustered_context(model, documents, seed=seed, progress=_progress())
    else:
        context = corpus_context(model, documents, seed=seed)
    if context is None:
        raise DataError("all documents of the corpus are empty")
    model = load_model(folder, dtype=saved_dtype(folder))  # another may have embedded
    model.set_corpus(context)
    model.save(output, instructions=saved_instructions(folder, model.config))
    if (compression := read_compression(folder)) is not None:
        write_compression(output, compression)  # its weights are the same
    write_proof(output)
    return len(context)


def _counted(documents: Iterable[str]) -> Iterator[str]:
    """Pass the documents on, logging from time to time how many were read."""
    number = 0
    for number, text in enumerate(documents, start=1):
        if number % _DOCUMENTS_BETWEEN_LOGS == 0:
            logger.info("%s documents read", f"{number:,}")
        yield text
    logger.info("%s documents read: the whole corpus", f"{number:,}")


def _progress() -> Callable[[int, int], None]:
    """Return a callback that logs the number of embedded documents from time to time."""
    logged = time.monotonic()

    def progress(done: int, of: int) -> None:
        nonlocal logged
        if done == of or time.monotonic() - logged > _SECONDS_BETWEEN_LOGS:
            logged = time.monotonic()
            logger.info("%s of %s documents embedded", f"{done:,}", f"{of:,}")

    return progress


def _give_corpus(args: argparse.Namespace, context: JobContext) -> None:
    from rayembed.data.mining.documents import documents_in

    documents = documents_in(args.documents, args.column)
    output = Path(args.output)
    number = save_with_corpus(args.model, documents, output, pick=args.pick, seed=args.seed)
    context.out.write(f"Model with a corpus of {number} context documents: {args.output}\n")


run_corpus_job = Job(
    options=(
        option(
            "--model REFERENCE",
            "a saved contextual model (CDE)",
            required=True,
            type=expanded_name,
        ),
        option(
            "--documents PATH",
            "the corpus: a file, folder, prefix or pattern of Parquet, JSONL or CSV files",
            required=True,
        ),
        option("--column NAME", "column of the documents", default="text"),
        option(
            "--pick {random,clusters}",
            "context documents: a random draw, or one of each cluster",
            default="random",
        ),
        option("--seed SEED", "seed of the draw; default: 0", type=int, default=0),
        option("--output FOLDER", "where the model goes", required=True),
    ),
    read=lambda args: args,
    run=_give_corpus,
    stopped="stopped; nothing was written",
)
"""The job that saves a contextual model with context documents of a corpus."""
