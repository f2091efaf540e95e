"""Evaluation jobs: picklable units of work that run independently of each other.

`huggingface_hub` repeats a request five times when the hub is asked too often (429) or has an error
of its own, and waits as long as the hub's answer says. What is left after that is repeated here,
with longer waits: the limits are counted over five minutes, and many runners share one address.
`datasets` hides the cause of its errors, often behind a "couldn't find any data file"; it is looked
for in the chain of causes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import datasets.exceptions
import httpx
import mteb
from huggingface_hub import is_offline_mode
from mteb.abstasks.retrieval import AbsTaskRetrieval

from rayembed.assets.hub_client import causes_of, limit_hub, passes, status_of, with_retries
from rayembed.errors import AssetError, RayembedError
from rayembed.evaluation.hybrid import Baselines, Recorded, further_searches
from rayembed.evaluation.item_results import keep_items
from rayembed.evaluation.query_results import entries
from rayembed.results.costs import Cost

WAITS_SECONDS: tuple[float, ...] = (15, 60, 240)
"""Between the attempts at one task's data."""

_TOO_MANY = 429
_LOADING = (
    OSError,  # no such repository, file or revision; not reached; the hub's HTTP errors
    httpx.HTTPError,
    ValueError,  # no such configuration or split; not in the cache of a machine that is offline
    KeyError,
    RuntimeError,  # a repository with a loading script
    datasets.exceptions.DatasetsError,
)


def load_data(
    task: Any,
    *,
    waits: Sequence[float] = WAITS_SECONDS,
    sleep: Callable[[float], None] | None = None,
) -> None:
    """Load the data of a fresh mteb task with retries, so that `mteb.evaluate` need not
    load it.

    Args:
        waits: seconds before each further attempt, where the hub is asked too often or is down;
            longer where its answer says so.

    Raises:
        AssetError: the data cannot be had; names the task, the reason and what to do.
    """
    limit_hub()
    try:
        with_retries(task.load_data, task.metadata.name, waits=waits, sleep=sleep)
    except _LOADING as error:
        raise unavailable_data(task, error) from error


def unavailable_data(task: Any, error: BaseException) -> AssetError:
    """Build the error for a task whose data mteb could not load."""
    name, where = task.metadata.name, task.metadata.dataset
    reason, advice = _told(error)
    return AssetError(
        f"the data of the task {name!r} (data set {where.get('path')!r}, revision "
        f"{where.get('revision')!r}) cannot be loaded: {reason}. {advice}"
    )


def _told(error: BaseException) -> tuple[str, str]:
    """Explain why a task's data could not be loaded: the reason, and what to do."""
    causes = list(causes_of(error))
    status = status_of(error)
    if is_offline_mode():
        reason = "HF_HUB_OFFLINE is set, and they are not in the cache"
        advice = "Unset it, or load the task once on a machine with the same HF_HOME"
    elif "is a gated dataset" in str(error):
        reason = "access to the data set must be requested"
        advice = "Request it on the data set's page of the hub, and set HF_TOKEN"
    elif status == _TOO_MANY:
        reason = "the hub reports too many requests (429)"
        advice = (
            "Run again later, what is loaded is kept; with HF_TOKEN set the limits are higher, and "
            "HF_ENDPOINT names a mirror"
        )
    elif passes(status):
        reason = f"the hub failed with status {status}"
        advice = "Run again later; HF_ENDPOINT names a mirror"
    elif any(isinstance(cause, httpx.TransportError | ConnectionError) for cause in causes):
        reason = "the hub cannot be reached"
        advice = "Check the network and HF_ENDPOINT, which names a mirror"
    elif any(isinstance(cause, datasets.exceptions.DatasetNotFoundError) for cause in causes):
        reason = " ".join(str(error).split())
        advice = "If it is private, set HF_TOKEN; a mirror (HF_ENDPOINT) may lack it"
    else:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        advice = "Clear this data set from HF_HOME and run again; see whether mteb has a fix"
    return reason, advice


Outcome = dict[str, Any]
"""Result of a job: plain values for JSON."""

TASK_RESULT = "task_result"
"""Key of an outcome: mteb's result of the task as a mapping."""

COST = "cost"
"""Key of an outcome: cost of the corpora that were searched, a `Cost` as a mapping."""

FURTHER = "further"
"""Key of an outcome: name of each further row → its outcome."""

_TEXTS_AT_ONCE = 1024
"""Batch size of mteb's loaders; the pooled model joins their batches again."""


class TaskFactory(Protocol):
    """Protocol of small, picklable factories of mteb tasks; the tasks themselves are too large to
    send to workers.
    """

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def num_texts(self) -> int:
        """Number of texts to embed, as far as it is known without loading the data; 0 if
        unknown.
        """
        ...

    def load(self) -> Any:
        """Return a fresh task, without its data."""
        ...


class Job(Protocol):
    """Protocol of a picklable unit of work in an evaluation."""

    @property
    def name(self) -> str:
        """Name of the job in logs and tables."""
        ...

    @property
    def num_texts(self) -> int:
        """Approximate number of texts to embed; the largest jobs start first."""
        ...

    def run(self, model: Any) -> Outcome:
        """Run the job with a model that implements mteb's `EncoderProtocol` and
        `SearchProtocol`.
        """
        ...


@dataclass(frozen=True)
class ScoreTask:
    """A job that scores one mteb task."""

    task: TaskFactory
    baselines: Baselines | None = None
    """Rows that are scored beside the model, of a retrieval task; None: the model alone."""

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def num_texts(self) -> int:
        """Number of texts to embed."""
        return self.task.num_texts

    def run(self, model: Any) -> Outcome:
        """Score the task; the outcome holds mteb's result under `TASK_RESULT`, the cost under
        `COST` and the outcomes of further rows under `FURTHER`.

        Raises:
            AssetError: the task's data cannot be had.
            Exception: whatever mteb or the task raises.
        """
        task = self.task.load()
        load_data(task)
        _keep_queries(task)
        keep_items(task)
        if self.baselines is None:
            outcome = _scored(task, model)
        else:
            recorded = Recorded(model)
            outcome = _scored(task, recorded)
            rows = further_searches(recorded, self.baselines)
            outcome[FURTHER] = {row: _scored(task, searches) for row, searches in rows}
        task.unload_data()  # mteb leaves what it did not load itself
        return outcome


def _scored(task: Any, model: Any) -> Outcome:
    """Score a model on a loaded task; return mteb's result and the cost."""
    found = mteb.evaluate(
        model,
        task,
        cache=None,
        co2_tracker=False,
        encode_kwargs={"batch_size": _TEXTS_AT_ONCE, "show_progress_bar": False},
        overwrite_strategy="always",
        show_progress_bar=False,
    )
    cost = getattr(model, "cost", Cost())
    return {TASK_RESULT: found.task_results[0].to_dict(), COST: asdict(cost)}


def _keep_queries(task: Any) -> None:
    """Make a retrieval task store scores and best documents of single queries, which mteb drops,
    unless it computes its scores in its own way.
    """
    is_plain = (
        isinstance(task, AbsTaskRetrieval)
        and type(task).task_specific_scores is AbsTaskRetrieval.task_specific_scores
    )
    if is_plain and task.metadata.main_score == "ndcg_at_10":
        task.task_specific_scores = _of_queries


def _of_queries(
    scores: Mapping[str, Mapping[str, float]],
    _judged: Any,
    found: Mapping[str, Mapping[str, float]],
    **_places: Any,
) -> dict[str, Any]:
    return entries(scores, found)


@dataclass(frozen=True)
class Done:
    """A finished job with its outcome, or with the error that stopped it."""

    job: Job
    outcome: Outcome | None = None
    error: RayembedError | None = None
    seconds: float = 0.0


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs by decreasing number of texts, so that no long job runs alone at the end."""
    return sorted(jobs, key=lambda job: (-job.num_texts, job.name))
