"""Tasks taken apart into pieces that are evaluated side by side, and their results joined again.

A retrieval task over several subsets (the languages of MIRACL) is one piece a subset; an aggregate
(CQADupstackRetrieval) is one piece a member. Other tasks stay whole: bitext mining embeds all
subsets together, clustering draws its samples from one generator for all of them, and the rest
loads all subsets at once anyway.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.results import TaskResult

from rayembed.evaluation.benchmarks import MtebTask


def pieces(factory: MtebTask) -> tuple[MtebTask, ...]:
    """The parts of a task that give its own scores when they are evaluated apart."""
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
    """The result of a task from those of all its pieces, in any order.

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
