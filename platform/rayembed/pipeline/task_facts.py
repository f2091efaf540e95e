"""Category, main score and data set of a task by its name: of mteb and of the Wikipedia sample."""

from rayembed.evaluation.own_set import MEASURES
from rayembed.registry.scores import TaskFacts
from rayembed.samples.references import ScoreSizes
from rayembed.samples.wikipedia import own_sets


def task_facts(task: str) -> TaskFacts | None:
    """The facts of a task; None: neither the sample nor mteb has it."""
    if task in (measures := sample_measures()):
        return TaskFacts(*measures[task], f"own/{task}")
    import mteb

    try:
        metadata = mteb.get_task(task).metadata
    except KeyError:
        return None
    return TaskFacts(str(metadata.type), str(metadata.main_score), str(metadata.dataset["path"]))


def sample_measures() -> dict[str, tuple[str, str]]:
    """Category and main score of the sample's tasks, by name."""
    return {own.name: MEASURES[own.kind] for own in own_sets(ScoreSizes(languages=("fr",)))}
