"""Write the zip file for AIR-Bench's leaderboard, after checking that all results are complete.

The leaderboard says only whether a submission failed. It skips one whose files name another
version, and gives no average to a model that lacks a data set.
"""

import json
import logging
import tempfile
import zipfile
from pathlib import Path

from rayembed.assets.storage import join, store_file
from rayembed.errors import ArtifactError
from rayembed_extras.air_bench.catalogue import (
    AirBenchDataset,
    Split,
    air_bench_datasets,
)
from rayembed_extras.air_bench.results import (
    NO_RERANKER,
    AirBenchResults,
    check_retriever_name,
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
    datasets = air_bench_datasets(version, splits=(_SPLIT,))
    check_retriever_name(retriever)
    results = AirBenchResults.of(folder, version, retriever)
    problems = []
    with tempfile.TemporaryDirectory(prefix="air-bench-") as work:
        path = Path(work) / f"{retriever}_{NO_RERANKER}.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
            for dataset in datasets:
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
            raise ArtifactError(_problem_text(results, problems))
        target = join(out, path.name)
        store_file(path, target)
    logger.info("wrote %s; submit it to the leaderboard %s", target, LEADERBOARD)
    return target


def _checked(results: AirBenchResults, dataset: AirBenchDataset) -> tuple[bytes, str]:
    """Return the content of a result file and its problem; the problem is empty if the file is
    valid.
    """
    if problem := results.problem(dataset, _SPLIT):
        return b"", problem
    content = results.read(dataset, _SPLIT)
    values = json.loads(content)
    for field, expected in results.header(dataset, _SPLIT).items():
        if values[field] != expected:  # its folder has another name now
            return b"", f"{field} is {values[field]!r}, not {expected!r}"
    return content, ""


def _problem_text(results: AirBenchResults, problems: list[str]) -> str:
    shown = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        shown.append(f"and {len(problems) - _SHOWN} more")
    return (
        f"no submission of {results.retriever!r} to {results.version}: {len(problems)} of its test "
        "results are missing or wrong:\n  "
        + "\n  ".join(shown)
        + f"\nRemove those that are wrong from {results.folder!r} and evaluate "
        f"{results.model!r} (revision {results.revision!r}) on {results.version!r} again with "
        "the same folder: only what is missing is made"
    )
