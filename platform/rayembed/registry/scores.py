"""Scores of a model from mteb's result files: by task, with the data that they were measured on."""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rayembed.config.yaml_text import read_yaml
from rayembed.errors import ArtifactError

OTHER = "Other"
"""Category of tasks without a known category."""

MEAN, OF_OWN, OF_GENERAL = "mean", "mean/own", "mean/general"
"""Names of means over tasks: over all of one kind, over own ones and over general ones."""

_META = "model_meta.json"

CONDITIONS_FILE = "prompts.yaml"
"""File beside the results that says how they were taken; results of others have none."""

_OWN_REVISION = re.compile(r"(?:[a-z]+\d+-)*([0-9a-f]{12})-[0-9a-f]{8}")
"""Revision of the form `<weights>-<hash of other inputs>`, preceded by a width or context size for
truncated vectors or smaller contexts. Hub revisions are 40 digits."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskFacts:
    """Facts about a task that its result file lacks."""

    category: str
    """mteb's task type: `Retrieval`, `Classification`, `STS`, …"""
    metric: str
    """Name of the main score."""
    dataset: str
    """Hub path of the data set, `org/name`; `own/name` of the user's own, `sample/name` of a
    sample's."""


Describe = Callable[[str], TaskFacts | None]
"""Looks up the facts of a task by name; None for unknown tasks."""


@dataclass(frozen=True)
class TaskScore:
    """Main score of a model on a task, over all evaluated splits and subsets."""

    task: str
    category: str
    metric: str
    value: float
    """Score between 0 and 1 for nearly all metrics; NaN for a collapsed model."""
    dataset: str
    dataset_revision: str
    parts: tuple[str, ...]
    """Names `split/subset` over which the score is averaged."""
    model_revision: str
    """Revision under which the scores were stored: weights and everything else that decides
    vectors."""
    mteb_version: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """All other metrics of the task, averaged over the parts."""

    measured_with: Mapping[str, str] = field(default_factory=dict)
    """Number type, lengths, width, context and the prompts of the task's sides, by name; empty:
    not recorded."""

    @property
    def is_own(self) -> bool:
        """Whether it was measured on the user's own data."""
        return self.dataset.startswith("own/")

    @property
    def measured_on(self) -> tuple[str, str, tuple[str, ...]]:
        """Key of the test data; scores with equal keys are comparable."""
        return self.task, self.dataset_revision, self.parts

    def differences(self, other: "TaskScore") -> dict[str, tuple[str, str]]:
        """Settings in which the two scores were taken in other ways; see `differing_conditions`."""
        return differing_conditions(self.measured_with, other.measured_with)


def differing_conditions(
    here: Mapping[str, str], there: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Setting → its value here and there, where two scores of a task were taken in other ways.

    Prompts are one setting, `prompts`; where one score records nothing it is `conditions`.

    Args:
        here: number type, lengths, prompts and the like of one score, by name.
        there: those of the other.
    """
    if not here or not there:
        told = ["recorded" if values else "not recorded" for values in (here, there)]
        return {} if told[0] == told[1] else {"conditions": (told[0], told[1])}
    found: dict[str, tuple[str, str]] = {}
    for name in sorted({*here, *there}):
        values = here.get(name, "none"), there.get(name, "none")
        if values[0] != values[1]:
            found.setdefault("prompts" if name.startswith("prompt") else name, values)
    return found


def read_results(folder: Path, describe: Describe) -> tuple[TaskScore, ...]:
    """Scores in the folder of one model revision, by task name.

    Args:
        describe: is asked for tasks of which the folder itself says nothing.

    Raises:
        ArtifactError: a file is no result of mteb, or there is none.
    """
    files = _result_files(folder)
    if not files:
        raise ArtifactError(
            f"no scores in {str(folder)!r}: expected mteb's result files <Task>.json; evaluate the "
            "model first (jobs/evaluate_model.py)"
        )
    beside = folder / CONDITIONS_FILE
    stated = read_yaml(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    known, conditions = stated_facts(stated), stated_conditions(stated)

    def facts_of(task: str) -> TaskFacts | None:
        return known.get(task) or describe(task)

    return tuple(_read(path, folder.name, facts_of, conditions) for path in files)


def stated_facts(stated: Mapping[str, Any]) -> dict[str, TaskFacts]:
    """Task → its facts, by the content of the file beside results; own sets have no other source.

    Rows of earlier versions, which name no metric, are left out.
    """
    return {
        row["task"]: TaskFacts(row["type"], row["metric"], row["dataset"])
        for row in stated.get("prompts", ())
        if "metric" in row
    }


def stated_conditions(stated: Mapping[str, Any]) -> Mapping[str, Mapping[str, str]]:
    """Task → how its scores were taken, by the content of the file beside them."""
    shared = stated.get("conditions")
    if shared is None:  # of an earlier version
        return {}
    found: dict[str, dict[str, str]] = {}
    for row in stated["prompts"]:
        of_task = found.setdefault(row["task"], dict(shared))
        of_task[f"prompt of {row['side']}"] = row["prompt"]
    return found


def _result_files(folder: Path) -> list[Path]:
    """Possible result files; hidden files are ignored."""
    found = sorted(folder.glob("*.json"))
    return [path for path in found if path.name[0] != "." and path.name != _META]


def _read(
    path: Path,
    revision: str,
    describe: Describe,
    conditions: Mapping[str, Mapping[str, str]],
) -> TaskScore:
    import mteb

    try:
        result = mteb.TaskResult.from_disk(path, load_historic_data=False)
        value = float(result.get_score())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{str(path)!r} is no result file of mteb: {error}; remove it or evaluate again"
        ) from error
    facts = describe(result.task_name) or TaskFacts(OTHER, "main_score", "")
    entries = [
        (f"{split}/{entry['hf_subset']}", entry)
        for split, entries in sorted(result.scores.items())
        for entry in entries
    ]
    return TaskScore(
        task=result.task_name,
        category=facts.category,
        metric=facts.metric,
        value=value,
        dataset=facts.dataset,
        dataset_revision=result.dataset_revision,
        parts=tuple(sorted(part for part, _ in entries)),
        model_revision=revision,
        mteb_version=result.mteb_version or "",
        metrics=_means([entry for _, entry in entries]),
        measured_with=dict(conditions.get(result.task_name, {})),
    )


def _means(entries: list[Any]) -> dict[str, float]:
    """Means of the metrics that all parts have."""
    names = set.intersection(*(set(entry) for entry in entries)) - {"main_score"}
    found = {}
    for name in sorted(names):
        values = [entry[name] for entry in entries]
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
            found[name] = sum(values) / len(values)
    return found


def find_results(place: Path, weights_fingerprint: str, *, trusted: bool = False) -> Path:
    """Folder of one model revision within a results folder.

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
    if _result_files(place):
        _check_weights(place, weights_fingerprint, trusted=trusted)
        return place
    root = place / "results" if (place / "results").is_dir() else place
    revisions = sorted(path for path in root.glob("*/*") if _result_files(path))
    found = [path for path in revisions if path.name.startswith(weights_fingerprint)]
    if len(found) == 1:
        _check_weights(found[0], weights_fingerprint, trusted=trusted)
        return found[0]
    shown = [str(path.relative_to(place)) for path in found or revisions]
    listed = ", ".join(shown[:10]) + (", …" if len(shown) > 10 else "")
    if found:
        raise ArtifactError(
            f"{str(place)!r} has {len(found)} sets of scores of the weights {weights_fingerprint}, "
            f"taken with different settings: {listed}; name the folder of one of them"
        )
    raise ArtifactError(
        f"{str(place)!r} has no scores of the weights {weights_fingerprint}; it has "
        f"{listed or 'none at all'}. Evaluate the model, or name the folder of its revision "
        "(<results>/results/<org>__<model>/<revision>)"
    )


def _check_weights(folder: Path, weights_fingerprint: str, *, trusted: bool) -> None:
    """Check that the folder's scores are of these weights, or name none.

    Raises:
        ArtifactError: it names other weights, or none.
    """
    told = sorted({folder.name, _stated_revision(folder) or folder.name})
    named = {match[1] for revision in told if (match := _OWN_REVISION.fullmatch(revision))}
    if others := named - {weights_fingerprint}:
        raise ArtifactError(
            f"the scores in {str(folder)!r} are of the weights {', '.join(sorted(others))}, and "
            f"this model has the weights {weights_fingerprint}; evaluate it "
            "(jobs/evaluate_model.py)"
        )
    if any(revision.startswith(weights_fingerprint) for revision in told):
        return
    shown = " or ".join(map(repr, told))
    if not trusted:
        raise ArtifactError(
            f"the scores in {str(folder)!r} do not say that they are of the weights "
            f"{weights_fingerprint} of this model: their revision is {shown}. Evaluate it "
            "(jobs/evaluate_model.py), or say with --trust-results that they are its own"
        )
    _logger.warning(
        "the scores in %s are taken as those of the weights %s on your word (--trust-results): "
        "their revision is %s",
        folder,
        weights_fingerprint,
        shown,
    )


def _stated_revision(folder: Path) -> str | None:
    """Revision that mteb recorded with the scores, independent of the folder's name."""
    try:
        found = json.loads((folder / _META).read_text(encoding="utf-8")).get("revision")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def by_category(scores: Iterable[TaskScore]) -> dict[str, float]:
    """Mean main score of each category, with equal task weights."""
    groups: dict[str, list[float]] = {}
    for score in scores:
        groups.setdefault(score.category, []).append(score.value)
    return {name: sum(values) / len(values) for name, values in sorted(groups.items())}


def means(tasks: Iterable[str], own: Collection[str]) -> dict[str, list[str]]:
    """Name of a mean → tasks that it is over: own and general ones apart where there are both.

    Args:
        own: names of own tasks, others among them.
    """
    tasks = list(tasks)
    kinds = {
        OF_OWN: [task for task in tasks if task in own],
        OF_GENERAL: [task for task in tasks if task not in own],
    }
    return kinds if all(kinds.values()) else {MEAN: tasks} if tasks else {}


def score_means(scores: Sequence[TaskScore]) -> dict[str, list[TaskScore]]:
    """Name of a mean → scores that it is over, as `means`."""
    by_task = {score.task: score for score in scores}
    found = means(by_task, {score.task for score in scores if score.is_own})
    return {name: [by_task[task] for task in tasks] for name, tasks in found.items()}


def mean(scores: Iterable[TaskScore]) -> float:
    """Mean main score over all tasks; NaN without tasks."""
    values = [score.value for score in scores]
    return sum(values) / len(values) if values else math.nan


def to_json(scores: Iterable[TaskScore]) -> str:
    """JSON text of the scores, for `from_json`."""
    ordered = sorted(scores, key=lambda score: score.task)
    return json.dumps([asdict(score) for score in ordered], indent=1, ensure_ascii=False) + "\n"


def from_json(text: str) -> tuple[TaskScore, ...]:
    """Scores from a text written by `to_json`.

    Raises:
        ArtifactError: something else.
    """
    try:
        values = json.loads(text)
        return tuple(TaskScore(**{**value, "parts": tuple(value["parts"])}) for value in values)
    except (ValueError, TypeError, KeyError) as error:
        raise ArtifactError(f"the stored scores cannot be read: {error}") from error
