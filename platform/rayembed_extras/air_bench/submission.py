"""The zip file for AIR-Bench's leaderboard, with all that can be checked before it is sent.

The leaderboard says only whether a submission failed. It skips one whose files name another
version or whose queries it does not know, takes the mean over the queries that it finds, and gives
no average to a model that lacks a data set. Everything of that kind is an error here.
"""

import json
import logging
import math
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from rayembed.assets.storage import join, store_file
from rayembed.errors import ArtifactError
from rayembed_extras.air_bench.catalogue import (
    AirBenchDataset,
    Split,
    air_bench_datasets,
    check_version,
)
from rayembed_extras.air_bench.results import (
    DEPTH,
    NO_RERANKER,
    AirBenchResults,
    Record,
    check_retriever_name,
    content_hash,
    hash_of_ids,
    made_by,
)

logger = logging.getLogger(__name__)

LEADERBOARD = "https://huggingface.co/spaces/AIR-Bench/leaderboard"

_SPLIT: Split = "test"
_SHOWN = 20


def write_submission(folder: str, version: str, retriever: str, out: str) -> str:
    """Write the zip file of a retriever's test results; return its path.

    The same results give the same bytes. An earlier zip file is replaced when the new one is whole.

    Args:
        folder: of all results of AIR-Bench, as of the jobs.
        out: folder for the zip file, local or in object storage; made if it is not there.

    Raises:
        ConfigError: no such version, or a name that the leaderboard cannot take.
        ArtifactError: results are missing or wrong; the message lists them and says what to run.
    """
    check_version(version)
    check_retriever_name(retriever)
    maker = made_by(folder, version, retriever)
    results = AirBenchResults(folder, version, retriever, str(maker.get("revision")))
    problems = [] if maker.get("benchmark_version") == version else [f"made_by.json: {maker}"]
    with tempfile.TemporaryDirectory(prefix="air-bench-") as work:
        path = Path(work) / f"{retriever}_{NO_RERANKER}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for dataset in air_bench_datasets(version, splits=(_SPLIT,)):
                content, problem = _checked(results, dataset)
                if problem:
                    problems.append(f"{dataset.result_path(_SPLIT)}: {problem}")
                else:
                    # Without the time of day, which would make two zip files of equal results
                    # differ; the leaderboard calls the file's MD5 the revision.
                    entry = zipfile.ZipInfo(dataset.result_path(_SPLIT))
                    entry.external_attr = 0o644 << 16
                    packed.writestr(entry, content, zipfile.ZIP_DEFLATED)
        if problems:
            raise ArtifactError(_told(results, problems, maker))
        target = join(out, path.name)
        store_file(path, target)
    logger.info("%s can be sent to %s", target, LEADERBOARD)
    return target


def _checked(results: AirBenchResults, dataset: AirBenchDataset) -> tuple[bytes, str]:
    """The result file's content and what is wrong with it; empty if nothing is."""
    record = results.record(dataset, _SPLIT)
    if record is None:
        return b"", "missing"
    content = results.read(dataset, _SPLIT)
    if content_hash(content) != record.result_sha256:
        return b"", "not what the evaluation wrote"
    if record.revision != results.revision:
        return b"", f"made with revision {record.revision!r}, not {results.revision!r}"
    try:
        values = json.loads(content)
    except ValueError as error:
        return b"", f"not JSON ({error})"
    return content, _wrong(values, results.header(dataset, _SPLIT), record)


def _wrong(values: Any, header: dict[str, str], record: Record) -> str:
    """Reason why AIR-Bench would reject a result file; empty if there is none."""
    if not isinstance(values, dict) or set(values) != {*header, "search_results"}:
        return f"its fields are not {', '.join(header)} and search_results"
    for field, expected in header.items():
        if values[field] != expected:
            return f"{field} is {values[field]!r}, not {expected!r}"
    found = values["search_results"]
    if not isinstance(found, dict) or hash_of_ids(found) != record.queries_sha256:
        return f"it does not have the {record.num_queries} queries of the data set"
    for query, hits in found.items():
        if problem := _wrong_hits(hits):
            return f"query {query!r} {problem}"
    return ""


def _wrong_hits(hits: Any) -> str:
    if not isinstance(hits, dict) or not 1 <= len(hits) <= DEPTH:
        return f"has no documents or more than {DEPTH}"
    if not all(hits):
        return "has a document without an id"
    if not all(_is_finite(score) for score in hits.values()):
        return "has a score that is not a finite number"
    return ""


def _is_finite(score: Any) -> bool:
    return isinstance(score, int | float) and not isinstance(score, bool) and math.isfinite(score)


def _told(results: AirBenchResults, problems: list[str], maker: dict[str, str]) -> str:
    shown = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        shown.append(f"and {len(problems) - _SHOWN} more")
    return (
        f"no submission of {results.retriever!r} to {results.version}: {len(problems)} of its test "
        "results are missing or wrong:\n  "
        + "\n  ".join(shown)
        + f"\nRemove those that are wrong from {results.folder!r} and evaluate "
        f"{maker.get('model')!r} (revision {results.revision!r}) on {results.version!r} again with "
        "the same folder: only what is missing is made"
    )
