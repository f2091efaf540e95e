"""Pieces of an evaluation: what one runner does by itself, side by side with others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mteb

from rayembed.errors import RayembedError
from rayembed.evaluation.task_data import load_data

Outcome = dict[str, Any]
"""Result of a job: plain values for JSON."""

TASK_RESULT = "task_result"
"""Key of an outcome: mteb's result of the task as a mapping."""

_TEXTS_AT_ONCE = 1024
"""Batch size of mteb's loaders; the pooled model joins their batches again."""


class TaskFactory(Protocol):
    """Makes an mteb task; small and picklable, as the tasks are not."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def num_texts(self) -> int:
        """Number of texts that it embeds, as far as is known without its data; 0: not known."""
        ...

    def load(self) -> Any:
        """A fresh task, without its data."""
        ...


class Job(Protocol):
    """A piece of an evaluation, picklable."""

    @property
    def name(self) -> str:
        """Name in logs and tables."""
        ...

    @property
    def num_texts(self) -> int:
        """Rough number of texts that it embeds; jobs with most of them begin first."""
        ...

    def run(self, model: Any) -> Outcome:
        """Do it with a model that has mteb's `EncoderProtocol` and `SearchProtocol`."""
        ...


@dataclass(frozen=True)
class ScoreTask:
    """Scores one mteb task."""

    task: TaskFactory

    @property
    def name(self) -> str:
        """The task's name."""
        return self.task.name

    @property
    def num_texts(self) -> int:
        """Texts that it embeds."""
        return self.task.num_texts

    def run(self, model: Any) -> Outcome:
        """The result by mteb under `TASK_RESULT`.

        Raises:
            AssetError: the task's data cannot be had.
            Exception: whatever mteb or the task raises.
        """
        task = self.task.load()
        load_data(task)
        found = mteb.evaluate(
            model,
            task,
            cache=None,
            co2_tracker=False,
            encode_kwargs={"batch_size": _TEXTS_AT_ONCE, "show_progress_bar": False},
            overwrite_strategy="always",
            show_progress_bar=False,
        )
        task.unload_data()  # mteb leaves what it did not load itself
        return {TASK_RESULT: found.task_results[0].to_dict()}


@dataclass(frozen=True)
class Done:
    """A job with its outcome or with what went wrong."""

    job: Job
    outcome: Outcome | None = None
    error: RayembedError | None = None
    seconds: float = 0.0


def longest_first(jobs: Sequence[Job]) -> list[Job]:
    """The jobs in the order in which they begin, so that no long one is left to the end."""
    return sorted(jobs, key=lambda job: (-job.num_texts, job.name))
