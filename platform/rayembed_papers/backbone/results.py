"""List the trials of a finetuning, read their results, and summarise them."""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

from rayembed.assets.storage import exists, list_files, read_bytes, remove_folder
from rayembed.errors import ArtifactError
from rayembed_papers.backbone.catalogue import task_named
from rayembed_papers.backbone.finetune import Grid
from rayembed_papers.backbone.rows import StoredRows
from rayembed_papers.backbone.tasks import Finetuning, Task, TaskRows
from rayembed_papers.backbone.trial import Backbone, Scores, Trial


@dataclass(frozen=True)
class Result:
    """Scores and loss of a finished trial."""

    trial: Trial
    scores: Scores
    """Scores by task; empty if the trial diverged."""

    @property
    def diverged(self) -> bool:
        """Whether loss or outputs were not finite; diverged trials are excluded from medians."""
        return not self.scores

    def score(self, task: Task) -> float:
        """The task's main metric, averaged over the subsets in the paper's table."""
        found = self.scores[task.name]
        return fmean(found[subset][task.metric] for subset in task.subsets or found)

    @property
    def setting(self) -> tuple[float, int]:
        """The pair (learning rate, batch size)."""
        return self.trial.grid.learning_rate, self.trial.grid.batch_size


@dataclass(frozen=True)
class Summary:
    """Results of all trials on one task, with the best setting."""

    task: Task
    results: tuple[Result, ...]
    """Results of all trials that did not diverge, for every setting."""
    best: tuple[Result, ...]
    """Results of the learning rate and batch size with the highest median over the seeds."""
    diverged: int = 0
    """Number of trials that diverged."""

    @property
    def median(self) -> float:
        """Median score over the seeds of the best setting."""
        return median(result.score(self.task) for result in self.best)

    @property
    def mean(self) -> float:
        """Mean score over the seeds of the best setting."""
        return fmean(result.score(self.task) for result in self.best)

    @property
    def deviation(self) -> float:
        """Standard deviation of the score over the seeds of the best setting."""
        return pstdev([result.score(self.task) for result in self.best])

    @property
    def median_of_all(self) -> float:
        """Median score over all trials of all settings."""
        return median(result.score(self.task) for result in self.results)

    @property
    def setting(self) -> tuple[float, int]:
        """Learning rate and batch size of the best setting."""
        return self.best[0].setting


def trials_of(
    finetuning: Finetuning,
    backbone: Backbone,
    data: Mapping[TaskRows, StoredRows],
    folder: str,
    *,
    keeps_model: bool,
    start: Trial | None,
) -> list[Trial]:
    """List the trials of a finetuning: all combinations of learning rate, batch size and seed."""
    protocol = finetuning.protocol
    grid = itertools.product(protocol.learning_rates, protocol.batch_sizes, protocol.seeds)
    own = {rows: data[rows] for rows in finetuning.all_rows}
    return [
        Trial(backbone, finetuning, Grid(*values), own, folder, keeps_model, start)
        for values in grid
    ]


def find_results(trials: Sequence[Trial]) -> list[Result]:
    """Read the results of finished trials, in the order of the trials, including diverged
    ones.

    Raises:
        ArtifactError: a result cannot be read.
    """
    if not trials:
        return []
    there = set(list_files(trials[0].folder, recursive=True))
    finished = [trial for trial in trials if f"trials/{trial.key}.json" in there]
    return [_read(trial) for trial in finished]


def missing(trials: Sequence[Trial], results: Sequence[Result]) -> list[Trial]:
    """List the trials still to run: the unfinished ones, and the best trial again if other trials
    need its model and it is gone.
    """
    done = {result.trial.key for result in results}
    left = [trial for trial in trials if trial.key not in done]
    if converged(results) and trials[0].keeps_model:
        best = best_result(results).trial
        if not exists(best.model_path):
            left.append(best)
    return left


def converged(results: Iterable[Result]) -> list[Result]:
    """Select the trials that did not diverge."""
    return [result for result in results if not result.diverged]


def best_result(results: Iterable[Result]) -> Result:
    """Return the trial with the highest score on the finetuning's first task; diverged trials do
    not count.
    """
    found = converged(results)
    task = task_named(found[0].trial.finetuning.scored[0].task)
    return max(found, key=lambda result: result.score(task))


def keep_best_model(trials: Sequence[Trial]) -> None:
    """Remove the models of finished trials, except the best one so far."""
    results = converged(find_results(trials))
    if results and trials[0].keeps_model:
        best = best_result(results)
        for result in results:
            if result is not best and exists(result.trial.model_path):
                remove_folder(result.trial.model_path)


def summarize(task: Task, results: Sequence[Result]) -> Summary:
    """Summarise a task's results; a setting with missing seeds cannot be the best.

    Trials that diverged are counted and no results; at least one must not have.

    Settings of equal median: the higher mean, then the smaller learning rate and batch.
    """
    by_setting: dict[tuple[float, int], list[Result]] = {}
    ended = converged(results)
    for result in ended:
        by_setting.setdefault(result.setting, []).append(result)
    most = max(map(len, by_setting.values()))

    def rank(some: list[Result]) -> tuple[Any, ...]:
        scores = [result.score(task) for result in some]
        return median(scores), fmean(scores), *(-value for value in some[0].setting)

    whole = [some for some in by_setting.values() if len(some) == most]
    best = tuple(sorted(whole, key=rank)[-1])
    return Summary(task, tuple(ended), best, diverged=len(results) - len(ended))


def _read(trial: Trial) -> Result:
    try:
        found = json.loads(read_bytes(trial.result_path))
        return Result(trial, {} if found["training_loss"] is None else found["scores"])
    except (ValueError, KeyError) as error:
        raise ArtifactError(
            f"the result {trial.result_path!r} is damaged ({error}); remove it and submit the job "
            "again"
        ) from error
