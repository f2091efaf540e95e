"""Find the tasks on which a model was trained according to mteb's model metadata."""

from collections.abc import Sequence

from mteb.models import ModelMeta


def declared_tasks(meta: ModelMeta, tasks: Sequence[str]) -> dict[str, str]:
    """Task → reason why mteb's leaderboard would not count its score as zero-shot.

    Data that share texts count as one, as mteb has it (`NQ` and `NanoNQRetrieval`).
    """
    own = meta.model_copy(update={"adapted_from": None})
    of_own = own.get_training_datasets() or set()
    # mteb asks the base only where the model's own data are known.
    whole = meta.model_copy(update={"training_datasets": meta.training_datasets or set()})
    everything = whole.get_training_datasets() or set()
    base = meta.adapted_from
    reasons = {}
    for task in tasks:
        if task in of_own:
            reasons[task] = f"its data are among the training data of {meta.name}"
        elif task in everything:
            reasons[task] = f"its data are among the declared training data of the base {base}"
    return reasons
