"""Run the job that measures what the store of an index returns. Its functions import what they
need.
"""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import yaml

from rayembed.errors import ConfigError
from rayembed.pipeline.job import Job, JobContext, option
from rayembed_extras.indexing.settings import NumberType

if TYPE_CHECKING:
    from rayembed_extras.indexing.store_scores import ScoresRequest

NONE = "none"
"""Index settings of a table without an index."""


def settings_in(text: str, flag: str) -> dict[str, Any]:
    """Parse `name=value,name=value`, where a value may hold commas, or a group in YAML's braces.

    Raises:
        ConfigError: it is neither.
    """
    if text == NONE:
        return {}
    problem = f"{flag} {text!r} must be name=value,name=value, or a group {{name: value}}"
    try:
        if text.startswith("{"):
            values = yaml.safe_load(text)
        else:
            parts = [part.partition("=") for part in re.split(r",(?=\w+=)", text)]
            if not all(name and equals and value for name, equals, value in parts):
                raise ConfigError(problem)
            values = {name: yaml.safe_load(value) for name, _, value in parts}
    except yaml.YAMLError as error:
        raise ConfigError(problem) from error
    if not isinstance(values, dict):
        raise ConfigError(problem)
    return values


class _Asked(NamedTuple):
    """Arguments of the job."""

    request: "ScoresRequest"
    queries: str | None
    split: str


def _read(args: argparse.Namespace) -> Any:
    if args.k < 1 or args.sample < 1:
        raise ConfigError("--k and --sample must be at least 1")
    number_types = tuple(dict.fromkeys(args.number_type))
    if unknown := [name for name in number_types if name not in get_args(NumberType)]:
        raise ConfigError(
            f"--number-type {unknown[0]}: allowed are {', '.join(get_args(NumberType))}"
        )
    return (
        args,
        [settings_in(text, "--index") for text in args.index],
        [settings_in(text, "--search") for text in args.search],
    )


def _asked(read: Any) -> _Asked:
    from rayembed_extras.indexing.store_scores import ScoresRequest

    args, indexes, searches = read
    storage = args.storage_path
    if "://" not in storage:
        storage = str(Path(storage).expanduser().absolute())
    request = ScoresRequest(
        storage,
        args.name,
        tuple(dict.fromkeys(args.number_type)),
        tuple(indexes),
        tuple(searches),
        args.k,
        args.sample,
        args.tracking_uri,
    )
    return _Asked(request, args.queries, args.split)


def _measure(read: Any, context: JobContext) -> None:
    from rayembed_extras.indexing.judged_queries import find_queries
    from rayembed_extras.indexing.store_scores import measure
    from rayembed_extras.indexing.store_scores_report import print_report

    asked = _asked(read)
    files = None if asked.queries is None else find_queries(asked.queries, asked.split)
    print_report(asked.request.storage, measure(asked.request, files), context.out)


run_scores_job = Job(
    options=(
        option("--name NAME", "the index to measure", required=True),
        option(
            "--queries PATH",
            "judged queries: a folder in BEIR's layout (queries, qrels), or rows of query and "
            "document (an id) or positive (a text); default: rows of the index, for recall alone",
        ),
        option("--split NAME", "split of the judgements in BEIR's layout", default="test"),
        option(
            "--number-type TYPE",
            "also measure a copy of the table with vectors of float32, float16, int8 or bits",
            often=True,
        ),
        option(
            "--index SETTINGS",
            "also measure a copy of the table with these index settings of the store, such as "
            "index_type=IVF_HNSW_SQ,num_partitions=4 (lance) or factory=IVF64,Flat (faiss), or "
            f"{NONE}; with every --number-type",
            often=True,
        ),
        option(
            "--search SETTINGS",
            "settings of a search, such as nprobes=20; each is measured on every copy, or without "
            "copies on the index as it is built",
            often=True,
        ),
        option("--k NUMBER", "results of a query", type=int, default=10),
        option("--sample NUMBER", "rows that are queries without --queries", type=int, default=500),
        option("--storage-path FOLDER", "where the record of the index is", default="outputs"),
        option("--tracking-uri URI", "MLflow's address, for a registered model"),
    ),
    read=_read,
    run=_measure,
    stopped="stopped; a copy of the table may be left, which the same command removes",
)
"""The job that measures what a store returns."""
