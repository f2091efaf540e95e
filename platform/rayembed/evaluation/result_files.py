"""mteb's result files, read back: which models lie in a folder and what they scored.

The layout is mteb's: `<folder>/results/<org>__<model>/<revision>/<Task>.json`; a folder that holds
the models directly is read as well, here or in object storage. A file that is half written or no
result is told in the log and left out.
"""

import logging
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rayembed.assets.storage import exists, file_name, join, list_files, read_bytes
from rayembed.config.yaml_text import read_yaml
from rayembed.errors import ArtifactError, StorageError
from rayembed.evaluation.benchmark_lines import Line, Place
from rayembed.registry.scores import CONDITIONS_FILE, stated_conditions, stated_facts

logger = logging.getLogger(__name__)

_NO_RESULTS = frozenset({"model_meta.json"})
"""Files of a revision's folder that are not results."""


@dataclass(frozen=True)
class StoredModel:
    """One revision of a model that has result files."""

    name: str
    """`<org>/<model>`."""
    revision: str
    files: tuple[str, ...]
    """Addresses of the result files; where two are of one task, the first counts."""


@dataclass(frozen=True)
class TaskFile:
    """Content of a result file."""

    task: str
    dataset_revision: str
    mteb_version: str
    date: datetime | None
    """Time of scoring; None: not written down."""
    scores: Mapping[Place, float]
    """(split, subset) → main score from 0 to 1; those that are no number are left out."""
    measured_with: Mapping[str, str] = field(default_factory=dict)
    """Number type, lengths, prompts and the like by name; empty: not recorded."""


@dataclass(frozen=True)
class TaskScore:
    """A model's score on one line of a benchmark, or what it lacks."""

    score: float | None
    """Mean over splits and subsets, from 0 to 1; None while any is missing."""
    missing: tuple[str, ...]
    """Splits, subsets or parts that are not scored, as a user reads them."""
    files: tuple[TaskFile, ...]
    """The files that it comes from, also of an incomplete one."""


def stored_models(folders: Iterable[str | Path]) -> tuple[StoredModel, ...]:
    """The model revisions of which the folders hold result files, by name and revision.

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


def read_results(model: StoredModel) -> dict[str, TaskFile]:
    """Task name → its result file; files that are no results are warned of and left out.

    Raises:
        StorageError: the storage does not give a file.
    """
    results: dict[str, TaskFile] = {}
    conditions: dict[str, Mapping[str, Mapping[str, str]]] = {}
    for address in model.files:
        if file_name(address).removesuffix(".json") in results:
            continue
        read = _read(address)
        if read is None:
            continue
        folder = address.rpartition("/")[0]
        if folder not in conditions:
            conditions[folder] = stated_conditions(_stated(folder))
        taken = replace(read, measured_with=conditions[folder].get(read.task, {}))
        results.setdefault(read.task, taken)
    return results


def stated_measures(models: Iterable[StoredModel]) -> dict[str, tuple[str, str]]:
    """Category and main score of each task that the evaluations of the models describe."""
    folders = {file.rpartition("/")[0]: None for model in models for file in model.files}
    found: dict[str, tuple[str, str]] = {}
    for folder in folders:
        facts = stated_facts(_stated(folder))
        found |= {task: (told.category, told.metric) for task, told in facts.items()}
    return found


def _stated(folder: str) -> dict[str, Any]:
    """What an evaluation wrote beside its results of how they were taken; empty of others'."""
    address = join(folder, CONDITIONS_FILE)
    return dict(read_yaml(read_bytes(address).decode())) if exists(address) else {}


def score_of(line: Line, results: Mapping[str, TaskFile]) -> TaskScore:
    """The score of one line of a benchmark.

    An aggregate is the mean of its parts where all are there, else what its own file says.
    """
    if not line.parts:
        return _own_score(line, results)
    parts = {part.name: score_of(part, results) for part in line.parts}
    known = [found.score for found in parts.values() if found.score is not None]
    files = tuple(file for found in parts.values() for file in found.files)
    if len(known) == len(parts):
        return TaskScore(math.fsum(known) / len(known), (), files)
    alone = _own_score(line, results)
    if alone.score is not None:
        return alone
    missing = tuple(name for name, found in parts.items() if found.score is None)
    return TaskScore(None, missing, files)


def newest(results: Mapping[str, TaskFile]) -> datetime | None:
    """Time at which the last of the results was scored; None where no file says it."""
    return max((file.date for file in results.values() if file.date is not None), default=None)


def _own_score(line: Line, results: Mapping[str, TaskFile]) -> TaskScore:
    file = results.get(line.task)
    if file is None:
        return TaskScore(None, (line.task,), ())
    missing = tuple("/".join(place) for place in line.places if place not in file.scores)
    if missing or not line.places:
        return TaskScore(None, missing or (line.task,), (file,))
    scores = [file.scores[place] for place in line.places]
    return TaskScore(math.fsum(scores) / len(scores), (), (file,))


def _result_files(root: str) -> list[tuple[str, str, str]]:
    """Model folder, revision and address of each result file at `root`."""
    found = []
    for path in list_files(root, recursive=True):
        parts = path.split("/")
        in_layout = len(parts) == 3 and "__" in parts[0] and path.endswith(".json")
        if in_layout and parts[2] not in _NO_RESULTS and not parts[2].startswith("."):
            found.append((parts[0], parts[1], join(root, path)))
    return found


def _read(address: str) -> TaskFile | None:
    try:
        result = _task_result(address)
    except StorageError:
        raise
    # What mteb's reader raises depends on where a file breaks: JSON, fields, old names of tasks.
    except (ArtifactError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        logger.warning("%s is no result file of mteb's and is left out: %s", address, reason)
        return None
    scores = {
        (split, str(row["hf_subset"])): float(row["main_score"])
        for split, rows in result.scores.items()
        for row in rows
        if _is_number(row["main_score"])
    }
    return TaskFile(
        task=result.task_name,
        dataset_revision=str(result.dataset_revision),
        mteb_version=str(result.mteb_version or ""),
        date=_in_utc(result.date),
        scores=scores,
    )


def _task_result(address: str) -> Any:
    import mteb

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        path.write_bytes(read_bytes(address))
        return mteb.TaskResult.from_disk(path)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not math.isnan(value)


def _in_utc(date: datetime | None) -> datetime | None:
    """The date with a time zone, so that dates of any two files can be compared."""
    if date is None:
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)
