"""mteb's task metadata as a text that travels with an encode spec, and back."""

import json
from functools import lru_cache
from typing import Any

import mteb
from mteb.abstasks import AbsTask
from mteb.abstasks.abstask import get_abstask_prompt
from mteb.abstasks.task_metadata import TaskMetadata


def task_text(metadata: TaskMetadata) -> str:
    """The name of a task that mteb has, else JSON of the whole metadata.

    `task_metadata` turns both into the metadata in any process.
    """
    return _text(metadata.name, metadata.model_dump_json())


@lru_cache(maxsize=512)
def _text(name: str, values: str) -> str:
    try:
        known = mteb.get_task(name).metadata.model_dump_json()
    except KeyError:
        known = ""
    # A name may be mteb's and the task another: its own class, with other data or languages.
    if known == values:
        return name
    # The class may be unknown where the text is read, and mteb's wrappers ask it for a prompt.
    return json.dumps({"metadata": json.loads(values), "prompt": get_abstask_prompt(name)})


@lru_cache(maxsize=512)
def task_metadata(text: str) -> TaskMetadata:
    """Metadata from which `task_text` made the text."""
    if not text.startswith("{"):
        return mteb.get_task(text).metadata
    values: dict[str, Any] = json.loads(text)
    metadata = TaskMetadata.model_validate(values["metadata"])
    remember_prompt(metadata, values["prompt"])
    return metadata


@lru_cache(maxsize=512)
def remember_prompt(metadata: TaskMetadata, prompt: str) -> type:
    """A class by which `get_abstask_prompt` finds the prompt of a task whose class is not imported
    here, or that has no name of its own.

    mteb looks among the classes of tasks that this process knows, and holds none of them itself.
    """
    return type(metadata.name, (AbsTask,), {"metadata": metadata, "abstask_prompt": prompt})
