"""Plan an evaluation: its tasks, the parts of tasks without a result, and the merging of
results.

A retrieval task over several subsets (the languages of MIRACL) is one piece a subset; an aggregate
(CQADupstackRetrieval) is one piece a member. Other tasks stay whole: bitext mining embeds all
subsets together, clustering draws its samples from one generator for all of them, and the rest
loads all subsets at once anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.results import TaskResult

from rayembed.config.evaluation import EvaluationRun
from rayembed.config.named_benchmarks import (
    further_benchmark_names,
    job_benchmark_names,
    refuse_job_benchmarks,
)
from rayembed.config.own_sets import Scores
from rayembed.errors import RayembedError
from rayembed.evaluation.averages import main_score
from rayembed.evaluation.benchmarks import (
    MtebTask,
    benchmark_tasks,
    named_tasks,
    of_languages,
)
from rayembed.evaluation.jobs import ScoreTask, TaskFactory
from rayembed.evaluation.own_set import OwnTask
from rayembed.results.writer import ResultWriter


def pieces(factory: MtebTask) -> tuple[MtebTask, ...]:
    """Split a task into parts that can be evaluated independently and merged to the same scores."""
    task = factory.load()
    if task.is_aggregate:
        members = [member.metadata for member in task.metadata.tasks]
        splits = tuple(task.eval_splits)
        return tuple(
            MtebTask(member.name, None, None if splits == tuple(member.eval_splits) else splits)
            for member in members
        )
    if isinstance(task, AbsTaskRetrieval) and len(task.hf_subsets) > 1:
        return tuple(replace(factory, subsets=(subset,)) for subset in task.hf_subsets)
    return (factory,)


def joined(factory: MtebTask, results: Sequence[TaskResult]) -> TaskResult:
    """Merge the results of all parts of a task, given in any order.

    Scores are those of the task evaluated whole; the time is the sum of the pieces' times.

    Raises:
        ValueError: results of different tasks or of different revisions of the data.
    """
    task = factory.load()
    if task.is_aggregate:
        by_name = {result.task_name: result for result in results}
        members = [member.metadata.name for member in task.metadata.tasks]
        return task.combine_task_results([by_name[name] for name in members if name in by_name])
    merged = reduce(lambda whole, piece: whole.merge(piece), results)
    order = {subset: place for place, subset in enumerate(task.hf_subsets)}
    for scores in merged.scores.values():
        scores.sort(key=lambda score: order.get(score["hf_subset"], len(order)))
    return merged


def task_factories(scores: Scores) -> list[TaskFactory]:
    """List the tasks that the settings name, each once; benchmarks with their own jobs are left
    out.

    A task that two benchmarks have with other subsets or splits is evaluated on those of both.

    Raises:
        ConfigError: an unknown benchmark, task or language.
    """
    if not isinstance(scores, EvaluationRun):
        refuse_job_benchmarks(scores.benchmarks)
    found: dict[str, MtebTask] = {}
    for benchmark in scores.benchmarks:
        if benchmark in job_benchmark_names():
            continue
        for task in benchmark_tasks(benchmark, also=further_benchmark_names()):
            found[task.name] = _both(found[task.name], task) if task.name in found else task
    for task in named_tasks(scores.tasks):
        found[task.name] = _both(found[task.name], task) if task.name in found else task
    of_mteb = tuple(found.values())
    if scores.languages and of_mteb:
        of_mteb = of_languages(of_mteb, scores.languages)
    return [*(OwnTask(settings) for settings in scores.own_sets), *of_mteb]


def _both(one: MtebTask, other: MtebTask) -> MtebTask:
    """Merge two selections of the same task into one with the subsets and splits of both."""
    if one == other:
        return one
    tasks = one.load(), other.load()
    splits = dict.fromkeys(split for task in tasks for split in task.eval_splits)
    if None in (one.subsets, other.subsets):
        return replace(one, subsets=None, eval_splits=tuple(splits))
    subsets = dict.fromkeys(subset for task in tasks for subset in task.hf_subsets)
    return replace(one, subsets=tuple(subsets), eval_splits=tuple(splits))


@dataclass
class Scoring:
    """State of one task during an evaluation: its parts, their results, and the score."""

    factory: TaskFactory
    pieces: tuple[TaskFactory, ...]
    results: dict[TaskFactory, Any] = field(default_factory=dict)
    """mteb's result of each piece, as its file holds it: the file may cover more than the piece."""
    result: Any | None = None
    """Result of mteb for the whole task; None while pieces are missing."""
    score: float | None = None
    """Mean main score over the splits and subsets asked for; None while pieces are missing."""
    error: RayembedError | None = None
    seconds: float = 0.0
    """Time in seconds spent on scoring in this call; 0 if all results existed before."""

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.factory.name

    def missing(self) -> list[ScoreTask]:
        """Jobs for the parts of the task that have no result yet."""
        return [ScoreTask(piece) for piece in self.pieces if piece not in self.results]

    def take(self, piece: TaskFactory, result: Any, writer: ResultWriter) -> None:
        """Store the result of a part at once, so that a restarted evaluation does not repeat it."""
        self.results[piece] = writer.save(result)
        if (whole := self._whole(piece)) is not None:
            if whole is not self.results[piece]:
                writer.save(whole)
            self._take_score(whole)

    def find(self, writer: ResultWriter) -> None:
        """Read stored results from the folder; if all members of an aggregate have one, write the
        aggregate's own.
        """
        for piece in self.pieces:
            result = writer.finished(piece.load())
            if result is not None:
                self.results[piece] = result
        if (whole := self._whole(self.pieces[0])) is not None:
            if whole.task_name != self.pieces[0].name and not writer.finished(self.factory.load()):
                writer.save(whole)
            self._take_score(whole)

    def score_in(self, benchmark_task: MtebTask) -> float | None:
        """Score of the task on a benchmark's splits and subsets, which may be fewer than the
        evaluated ones. None: pieces are missing.
        """
        if self.result is None or self.factory == benchmark_task:
            return self.score
        task = benchmark_task.load()
        if not task.is_aggregate:
            asked = set(self.factory.load().hf_subsets)
            common = tuple(subset for subset in task.hf_subsets if subset in asked)
            benchmark_task = replace(benchmark_task, subsets=common)
        return main_score(benchmark_task, self.result)

    def by_subset(self) -> dict[str, float]:
        """Score of each finished subset (for MIRACL: each language) of a task evaluated one subset
        at a time; empty for other tasks.
        """
        return {
            piece.subsets[0]: main_score(piece, self.results[piece])
            for piece in self.pieces
            if isinstance(piece, MtebTask) and piece.subsets is not None
            if len(piece.subsets) == 1 and piece in self.results
        }

    def _take_score(self, whole: Any) -> None:
        self.result, self.score = whole, main_score(self.factory, whole)

    def _whole(self, piece: TaskFactory) -> Any:
        """Return the result of the whole task once this part's result is read; None while other
        parts are missing. The members of an aggregate have files of their own.
        """
        if len(self.results) < len(self.pieces):
            return None
        latest = self.results[piece]
        if not isinstance(self.factory, MtebTask) or latest.task_name == self.name:
            return latest
        of_asked = [
            result.validate_and_filter_scores(piece.load())
            for piece, result in self.results.items()
        ]
        return joined(self.factory, of_asked)


def find_results(factories: Sequence[TaskFactory], writer: ResultWriter) -> list[Scoring]:
    """Return the state of every task, with the results that the folder already has.

    Raises:
        RayembedError: a task of the user's own cannot be made of its data.
    """
    scorings = []
    for factory in factories:
        parts = pieces(factory) if isinstance(factory, MtebTask) else (factory,)
        scoring = Scoring(factory, parts)
        scoring.find(writer)
        scorings.append(scoring)
    return scorings


def retrieval_only(factories: Sequence[TaskFactory]) -> list[TaskFactory]:
    """Select the tasks that a model without vectors, such as BM25, can run."""
    return [factory for factory in factories if _is_retrieval(factory.load())]


def _is_retrieval(task: Any) -> bool:
    members = task.metadata.tasks if task.is_aggregate else [task]
    return all(isinstance(member, AbsTaskRetrieval) for member in members)
