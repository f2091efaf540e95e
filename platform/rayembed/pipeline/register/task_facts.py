"""Category, main score and data set of mteb's tasks by name.

Own sets are described beside their results (`results.files`).
"""

from rayembed.results.files import TaskFacts


def task_facts(task: str) -> TaskFacts | None:
    """The facts of a task; None: mteb has no such task."""
    import mteb

    try:
        metadata = mteb.get_task(task).metadata
    except KeyError:
        return None
    return TaskFacts(str(metadata.type), str(metadata.main_score), str(metadata.dataset["path"]))
