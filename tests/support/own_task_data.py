"""The data of a task over an own set for retrieval, as plain texts by their ids."""

from types import SimpleNamespace


def retrieval_data(task):
    """Documents, queries and judgements of a task, or of what makes one."""
    made = task.load() if hasattr(task, "load") else task
    made.load_data()
    ((part,),) = (splits.values() for splits in made.dataset.values())
    return SimpleNamespace(
        documents=dict(zip(part["corpus"]["id"], part["corpus"]["text"], strict=True)),
        queries=dict(zip(part["queries"]["id"], part["queries"]["text"], strict=True)),
        relevant=part["relevant_docs"],
    )
