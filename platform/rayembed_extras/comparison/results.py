"""Find the models that have results in folders, and read their scores."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rayembed.assets.storage import file_name, join, list_files
from rayembed.errors import ArtifactError, StorageError
from rayembed.results.costs import Cost
from rayembed.results.files import Description, costs_in, described_in, is_result, read_score
from rayembed.results.scores import TaskScore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredModel:
    """One revision of a model for which result files exist."""

    name: str
    """`<org>/<model>`."""
    revision: str
    files: tuple[str, ...]
    """Addresses of the result files; where two are of one task, the first counts."""


def stored_models(folders: Iterable[str | Path]) -> tuple[StoredModel, ...]:
    """Model revisions that have result files in the folders, by name and revision.

    Of a task that lies in several folders, the file of the folder named first counts.

    Raises:
        ArtifactError: a folder cannot be listed.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for folder in folders:
        for root in (join(folder, "results"), str(folder)):
            listed = _result_files(root)
            for model, revision, file in listed:
                found.setdefault((model, revision), []).append(file)
            if listed:
                break
    return tuple(
        StoredModel(model.replace("__", "/", 1), revision, tuple(files))
        for (model, revision), files in sorted(found.items())
    )


def _result_files(root: str) -> list[tuple[str, str, str]]:
    """Model folder, revision and address of each result file at `root`."""
    found = []
    for path in list_files(root, recursive=True):
        parts = path.split("/")
        if len(parts) == 3 and "__" in parts[0] and is_result(parts[2]):
            found.append((parts[0], parts[1], join(root, path)))
    return found


def read_model(model: StoredModel) -> dict[str, TaskScore]:
    """Read task name → score; skip files that are not mteb results, with a warning.

    Tasks of which an evaluation wrote no facts have the category `OTHER`.

    Raises:
        StorageError: the storage does not give a file.
    """
    scores: dict[str, TaskScore] = {}
    described: dict[str, Mapping[str, Description]] = {}
    costs: dict[str, Mapping[str, Cost]] = {}
    for address in model.files:
        if file_name(address).removesuffix(".json") in scores:
            continue
        folder = address.rpartition("/")[0]
        if folder not in described:
            described[folder], costs[folder] = described_in(folder), costs_in(folder)
        try:
            score = read_score(address, model.revision, described[folder], costs=costs[folder])
        except StorageError:
            raise
        except ArtifactError as error:
            reason = str(error.__cause__).partition("\n")[0]
            logger.warning(
                "%s is not a result file of mteb, so it is left out: %s", address, reason
            )
        else:
            scores.setdefault(score.task, score)
    return scores
