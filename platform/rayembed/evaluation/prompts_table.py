"""Table of the prompts of all tasks, printed before an evaluation and stored with its
results.

A prompt that is missing or another than the model was trained with costs scores without a word.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import yaml
from mteb.abstasks import AbsTask, AbsTaskRetrieval
from mteb.abstasks.aggregated_task import AbsTaskAggregate
from mteb.types import PromptType

from rayembed.config.document import read_yaml
from rayembed.evaluation.model_spec import SCORES, ModelSpec
from rayembed.evaluation.prompts import ModelPrompts
from rayembed.models.versions import VECTORS


@dataclass(frozen=True)
class PromptRow:
    """Table row with the prompt for one role in one task."""

    task: str
    type: str
    """mteb's type of the task, which is its category: `Retrieval`, `STS`, …"""
    metric: str
    """Name of the task's main score."""
    dataset: str
    """Path of the data set, `org/name`; `own/name` of the user's own."""
    side: str
    """`query`, `document`, or `text` where a task has no sides."""
    role: str
    """The model's role, query or document."""
    prompt: str
    """Literal text before each text; empty for none."""


def prompts_table(spec: ModelSpec, tasks: Sequence[AbsTask]) -> list[PromptRow]:
    """Make table rows for the queries and documents, or the sides, of each task; aggregates have
    rows for each member.
    """
    return [
        PromptRow(
            task=task.metadata.name,
            type=task.metadata.type,
            metric=task.metadata.main_score,
            dataset=task.metadata.dataset["path"],
            side=prompt_type.value if prompt_type else "text",
            role=encode_spec.role,
            prompt=spec.shown(encode_spec),
        )
        for task in _parts(tasks)
        for prompt_type in _sides(task)
        for encode_spec in [spec.encode_spec(task.metadata, prompt_type)]
    ]


def prompts_record(spec: ModelSpec, tasks: Sequence[AbsTask]) -> dict[str, Any]:
    """Convert the table, with the model's name and revision, to plain values for `prompts.yaml`."""
    return {
        "model": spec.meta.name,
        "revision": spec.meta.revision,
        "conditions": {**spec.conditions, "software": f"vectors {VECTORS}, scores {SCORES}"},
        "prompts": [asdict(row) for row in prompts_table(spec, tasks)],
    }


def with_earlier_tasks(record: dict[str, Any], earlier: str | None) -> dict[str, Any]:
    """Add rows of an earlier record for tasks that this record lacks, if both have the same
    settings.

    Args:
        earlier: text of the `prompts.yaml` beside the results; None: there is none.
    """
    try:
        found = {} if earlier is None else read_yaml(earlier)
        if found.get("conditions") != record["conditions"]:
            return record
        tasks = {row["task"] for row in record["prompts"]}
        rows = [row for row in found["prompts"] if row["task"] not in tasks]
    except (ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return record  # a file that somebody has changed
    return {**record, "prompts": [*rows, *record["prompts"]]}


def literal_prompts(prompts: ModelPrompts, tasks: Sequence[AbsTask]) -> dict[str, list[str]]:
    """Map each task's name to the literal prompts before its texts, one for each prompt type."""
    return {
        task.metadata.name: [
            prompts.shown(prompts.instruction(task.metadata, side)) for side in _sides(task)
        ]
        for task in _parts(tasks)
    }


def format_prompts(rows: Sequence[PromptRow]) -> str:
    """Format each distinct prompt with the tasks that use it, as lines of text."""
    by_prompt: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        by_prompt.setdefault((row.side, row.prompt), []).append(row.task)
    lines = []
    for (side, prompt), names in by_prompt.items():
        lines.append(f"{side:9} {prompt!r}" if prompt else f"{side:9} no prompt")
        lines.append(f"{'':9}   {', '.join(names)}")
    return "\n".join(lines)


def _parts(tasks: Sequence[AbsTask]) -> Iterator[AbsTask]:
    for task in tasks:
        if isinstance(task, AbsTaskAggregate):
            yield from _parts(task.metadata.tasks)
        else:
            yield task


def _sides(task: AbsTask) -> tuple[PromptType | None, ...]:
    """List the prompt types that mteb uses for the texts of the task."""
    if isinstance(task, AbsTaskRetrieval):
        return PromptType.query, PromptType.document
    sides = [getattr(task, f"input{i}_prompt_type", None) for i in (1, 2)]
    return tuple(dict.fromkeys(sides))
