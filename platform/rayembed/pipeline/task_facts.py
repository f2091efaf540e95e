"""Category, main score and data set of a task by its name: of the Wikipedia sample and of mteb."""

from typing import Any

from rayembed.evaluation import wikipedia_tasks
from rayembed.registry.scores import TaskFacts


def task_facts(task: str) -> TaskFacts | None:
    """The facts of a task; None: neither the sample nor mteb has it."""
    if task in (*wikipedia_tasks.TASK_NAMES, wikipedia_tasks.CROSS_LINGUAL):
        return _facts(getattr(wikipedia_tasks, task).metadata)
    import mteb

    try:
        return _facts(mteb.get_task(task).metadata)
    except KeyError:
        return None


def _facts(metadata: Any) -> TaskFacts:
    return TaskFacts(str(metadata.type), str(metadata.main_score), str(metadata.dataset["path"]))
