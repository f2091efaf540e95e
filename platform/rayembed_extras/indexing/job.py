"""Run the index job from its command-line arguments. Its functions import what they need."""

import argparse

from rayembed.config.types import expanded_name
from rayembed.errors import ConfigError
from rayembed.pipeline.job import Job, JobContext, Reader, finite_number, option
from rayembed_extras.indexing.places import with_place
from rayembed_extras.indexing.settings import IndexRun

_READER = Reader(
    kind=IndexRun,
    base=IndexRun.read,
    own=(
        option(
            "--documents PATH",
            "all documents: file, folder, prefix or pattern of Parquet, JSONL, CSV or TSV files, "
            "or of texts (.txt, .md), on disk, s3://, gs:// or hf://",
            sets="documents.path",
            missing="--documents is required: the files of the documents",
        ),
        option(
            "--model REFERENCE",
            "the model: a folder, models:/name@alias, hf://org/name@revision, or a short name",
            sets="model.reference",
            missing="--model is required: the model that embeds the documents",
            type=expanded_name,
        ),
        option(
            "--store KIND",
            "parquet (default), lance, pgvector, qdrant, faiss, or one of another package",
            sets="store.kind",
        ),
        option(
            "--storage-path FOLDER",
            "folder or object storage with the record of the index; default: outputs",
            sets="placement.storage_path",
        ),
    ),
    examples="documents.id=url, documents.metadata=[title, url], documents.chunks.by=sentences, "
    "store.number_type=int8",
    named=True,
)

_TO = option("--to PLACE", "address or folder of the store; default: the index's own folder")
_UPDATE = option(
    "--update",
    "compare with what the index has: embed new and changed documents, delete those that are gone",
)
_RATE = option(
    "--texts-per-second N",
    "with --dry-run: speed of all workers together; default: measured here on a sample",
    type=finite_number,
)
_PRICE = option(
    "--price-per-hour PRICE",
    "with --dry-run: price of an hour of all workers, in any currency",
    type=finite_number,
)


def _read(args: argparse.Namespace) -> IndexRun:
    if args.name is None and args.recipe is None:
        raise ConfigError("--name is required: the name of the index")
    return with_place(_READER(args), args.to)


def _index(run: IndexRun, context: JobContext) -> None:
    from rayembed_extras.indexing.build import build_index
    from rayembed_extras.indexing.report import print_indexed

    print_indexed(build_index(run, update=context.args.update), context.out)


def _show(run: IndexRun, context: JobContext) -> None:
    from rayembed_extras.indexing.estimate import estimate, print_estimate

    context.out.write(f"# index {run.name}\n{run.to_yaml()}")
    context.out.flush()
    found = estimate(run, context.args.texts_per_second)
    print_estimate(found, context.args.price_per_hour, context.err)


run_index_job = Job(
    options=(*_READER.options, _TO, _UPDATE, _RATE, _PRICE),
    read=_read,
    run=_index,
    shows=("the resolved settings", "texts, tokens, time, size and price", _show),
    example="--documents documents.jsonl --model all-MiniLM-L6-v2 --name docs",
)
"""The job that embeds documents into a vector store."""
