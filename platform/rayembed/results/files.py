"""Read mteb's result files: list the models that a folder has results for, and read their
scores.

The layout is mteb's: `<folder>/results/<org>__<model>/<revision>/<Task>.json`, here or in object
storage.
"""

import json
import logging
import math
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from rayembed.assets.storage import exists, join, read_bytes
from rayembed.config.document import read_yaml
from rayembed.errors import ArtifactError, StorageError
from rayembed.results.costs import COSTS_FILE, Cost, read_costs
from rayembed.results.items import item_scores
from rayembed.results.scores import OTHER, TaskScore

CONDITIONS_FILE = "prompts.yaml"
"""File next to the results that records the measurement conditions; other tools' results lack it.
"""

logger = logging.getLogger(__name__)

_META = "model_meta.json"

_OWN_REVISION = re.compile(r"(?:[a-z]+\d+-)*([0-9a-f]{12})-[0-9a-f]{8}")
"""Revision of the form `<weights>-<hash of other inputs>`, preceded by a width or context size for
truncated vectors or smaller contexts. Hub revisions are 40 digits."""


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a task that mteb's result file lacks."""

    category: str
    """mteb's task type: `Retrieval`, `Classification`, `STS`, …"""
    metric: str
    """Name of the main score."""
    dataset: str
    """Hub path of the data set, `org/name`; `own/name` of the user's own, `sample/name` of a
    sample's."""


Describe = Callable[[str], TaskFacts | None]
"""Function that looks up the facts of a task by name; None for unknown tasks."""


def is_result(name: str) -> bool:
    """Whether a file of this name may be an mteb result; hidden files are not."""
    return name.endswith(".json") and not name.startswith(".") and name != _META


def _results_in(folder: Path) -> list[Path]:
    """List the possible result files of one model revision."""
    return sorted(path for path in folder.glob("*.json") if is_result(path.name))


def read_results(folder: Path, describe: Describe) -> tuple[TaskScore, ...]:
    """Read the scores of one model revision from its folder, sorted by task.

    Args:
        describe: is asked for tasks of which the folder itself says nothing.

    Raises:
        ArtifactError: a file is no result of mteb, or there is none.
    """
    files = _results_in(folder)
    if not files:
        raise ArtifactError(
            f"no scores in {str(folder)!r}: expected mteb's result files <Task>.json; evaluate the "
            "model first (rayembed evaluate)"
        )
    described = described_in(str(folder))
    return tuple(read_score(str(path), folder.name, described, describe) for path in files)


Description = tuple[TaskFacts, Mapping[str, str]]
"""Facts of a task, and how its scores were taken."""


def described_in(folder: str) -> Mapping[str, Description]:
    """Map tasks to the facts and settings that rayembed stored beside their results; empty for
    results from elsewhere.
    """
    address = join(folder, CONDITIONS_FILE)
    if not exists(address):
        return {}
    record = read_yaml(read_bytes(address).decode())
    described: dict[str, tuple[TaskFacts, dict[str, str]]] = {}
    for row in record["prompts"]:
        facts = TaskFacts(row["type"], row["metric"], row["dataset"])
        _, conditions = described.setdefault(row["task"], (facts, dict(record["conditions"])))
        conditions[f"prompt of {row['side']}"] = row["prompt"]
    return described


def costs_in(folder: str) -> dict[str, Cost]:
    """Map tasks to the costs measured by an evaluation; empty for results of other programs."""
    address = join(folder, COSTS_FILE)
    return read_costs(read_bytes(address).decode()) if exists(address) else {}


def read_score(
    address: str,
    revision: str,
    described: Mapping[str, Description],
    describe: Describe = lambda _task: None,
    costs: Mapping[str, Cost] = MappingProxyType({}),
) -> TaskScore:
    """Read the score in a result file.

    Args:
        costs: of the folder's tasks, as `costs_in` gives them.

    Raises:
        ArtifactError: it is none of mteb's; the cause says why.
        StorageError: the storage does not give it.
    """
    try:
        result = _task_result(address)
    except StorageError:
        raise
    # What mteb's reader raises depends on where a file breaks: JSON, fields, old names of tasks.
    except (ArtifactError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{address!r} is no result file of mteb: {error}; remove it or evaluate again"
        ) from error
    facts, measured_with = described.get(result.task_name, (None, {}))
    facts = facts or describe(result.task_name) or TaskFacts(OTHER, "main_score", "")
    entries = [(split, entry) for split in sorted(result.scores) for entry in result.scores[split]]
    scores = {(split, str(entry["hf_subset"])): _number(entry) for split, entry in entries}
    return TaskScore(
        task=result.task_name,
        category=facts.category,
        metric=facts.metric,
        value=float(np.mean([_number(entry) for rows in result.scores.values() for entry in rows])),
        dataset=facts.dataset,
        dataset_revision=str(result.dataset_revision),
        scores=scores,
        model_revision=revision,
        mteb_version=str(result.mteb_version or ""),
        date=_in_utc(result.date),
        metrics=_means([entry for _, entry in entries]),
        measured_with=measured_with,
        items={
            (split, str(entry["hf_subset"])): items
            for split, entry in entries
            if (items := item_scores(entry)) is not None
        },
        cost=costs.get(result.task_name),
    )


def _task_result(address: str) -> Any:
    import mteb

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        path.write_bytes(read_bytes(address))
        return mteb.TaskResult.from_disk(path)


def _number(entry: Mapping[str, Any]) -> float:
    """Main score of a result entry; NaN if the model collapsed or an old file has no score."""
    score = entry["main_score"]
    return float(score) if isinstance(score, int | float) else math.nan


def _in_utc(date: datetime | None) -> datetime | None:
    """Convert a date to UTC, so that dates from any two files can be compared."""
    if date is None:
        return None
    return date.replace(tzinfo=UTC) if date.tzinfo is None else date.astimezone(UTC)


def _means(entries: list[Any]) -> dict[str, float]:
    """Mean of each metric over the given entries, for metrics that all entries have."""
    names = set.intersection(*(set(entry) for entry in entries)) - {"main_score"}
    found = {}
    for name in sorted(names):
        values = [entry[name] for entry in entries]
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            found[name] = sum(values) / len(values)
    return found


def find_results(place: Path, weights_fingerprint: str, *, trusted: bool = False) -> Path:
    """Find the folder of one model revision within a results folder.

    Args:
        place: a results folder in mteb's layout, `results/<org>__<model>/<revision>/<Task>.json`,
            or the folder of the revision itself.
        weights_fingerprint: of the model; revisions that rayembed made name it.
        trusted: whether the user says that a revision's folder that names no weights, as mteb's own
            do not, has the scores of this model. One that names other weights never has.

    Raises:
        ArtifactError: nothing there for these weights, more than one revision of them, or scores
            of other weights.
    """
    if not place.is_dir():
        raise ArtifactError(f"there is no results folder {str(place)!r}; evaluate the model first")
    if _results_in(place):
        _check_weights(place, weights_fingerprint, trusted=trusted)
        return place
    root = place / "results" if (place / "results").is_dir() else place
    revisions = sorted(path for path in root.glob("*/*") if _results_in(path))
    found = [path for path in revisions if path.name.startswith(weights_fingerprint)]
    if len(found) == 1:
        _check_weights(found[0], weights_fingerprint, trusted=trusted)
        return found[0]
    shown = [str(path.relative_to(place)) for path in found or revisions]
    listed = ", ".join(shown[:10]) + (", …" if len(shown) > 10 else "")
    if found:
        raise ArtifactError(
            f"{str(place)!r} has {len(found)} sets of scores of the weights "
            f"{weights_fingerprint}, measured with different settings: {listed}; name one "
            "of these folders"
        )
    raise ArtifactError(
        f"{str(place)!r} has no scores of the weights {weights_fingerprint}; scores found "
        f"there: {listed or 'none'}. Evaluate the model, or name the folder of its revision "
        "(<results>/results/<org>__<model>/<revision>)"
    )


def _check_weights(folder: Path, weights_fingerprint: str, *, trusted: bool) -> None:
    """Raise if the folder's scores belong to other weights, or state no weights and the caller does
    not trust them.

    Raises:
        ArtifactError: it names other weights, or none.
    """
    told = sorted({folder.name, _stated_revision(folder) or folder.name})
    named = {match[1] for revision in told if (match := _OWN_REVISION.fullmatch(revision))}
    if others := named - {weights_fingerprint}:
        raise ArtifactError(
            f"the scores in {str(folder)!r} were measured with the weights "
            f"{', '.join(sorted(others))}, but this model has the weights "
            f"{weights_fingerprint}; evaluate this model (rayembed evaluate)"
        )
    if any(revision.startswith(weights_fingerprint) for revision in told):
        return
    shown = " or ".join(map(repr, told))
    if not trusted:
        raise ArtifactError(
            f"the scores in {str(folder)!r} are not marked as those of this model's weights "
            f"({weights_fingerprint}): they name the revision {shown}. Evaluate the model "
            "(rayembed evaluate), or add --trust-results to confirm that the scores belong "
            "to it"
        )
    logger.warning(
        "--trust-results: the scores in %s were recorded for revision %s and are accepted for the "
        "weights %s",
        folder,
        shown,
        weights_fingerprint,
    )


def _stated_revision(folder: Path) -> str | None:
    """Revision that mteb recorded with the scores, independent of the folder's name."""
    try:
        found = json.loads((folder / _META).read_text(encoding="utf-8")).get("revision")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None
