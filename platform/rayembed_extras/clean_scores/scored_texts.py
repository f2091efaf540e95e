"""Read the texts of a scored task: queries, pairs or single texts, and the documents of retrieval
tasks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from mteb.abstasks.classification import AbsTaskClassification
from mteb.abstasks.pair_classification import AbsTaskPairClassification
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.sts import AbsTaskSTS

from rayembed.evaluation.jobs import load_data

_AT_ONCE = 8192
"""Documents whose texts are in memory at once."""


@dataclass
class TaskPart:
    """Texts of one split and subset of a task."""

    split: str
    subset: str
    names: list[str]
    """Id of each query, or number of each row."""
    items: list[tuple[str, ...]]
    """Texts of each item: one of a query, two of a pair."""
    documents: Any = None
    """Rows with `id`, `text` and `title` of a retrieval; None: another task."""
    positives: list[list[str]] = field(default_factory=list)
    """Ids of the relevant documents of each query."""

    def document_blocks(self) -> Iterator[tuple[list[str], list[str]]]:
        """Yield the ids and texts of the documents in order and in blocks; a document without text
        has its title; nothing for other tasks.
        """
        for start in range(0, 0 if self.documents is None else len(self.documents), _AT_ONCE):
            rows = self.documents[start : start + _AT_ONCE]
            titles = rows.get("title") or [""] * len(rows["text"])
            texts = [t or title or "" for t, title in zip(rows["text"], titles, strict=True)]
            yield rows["id"], texts


def task_texts(task: Any) -> Iterator[TaskPart]:
    """Load a task's data, yield the texts of each evaluated split and subset, and release
    the data.

    Raises:
        AssetError: the data cannot be had.
    """
    load_data(task)
    is_retrieval = isinstance(task, AbsTaskRetrieval)
    if is_retrieval:
        task.convert_v1_dataset_format_to_v2(num_proc=None)
    for subset in task.hf_subsets:
        # A task of one subset has its splits at the top.
        splits = task.dataset.get(subset, task.dataset)
        for split in task.eval_splits:
            if split in splits:
                read = _of_retrieval if is_retrieval else _of_rows
                yield read(task, splits[split], split, subset)
    task.unload_data()


def _of_retrieval(task: Any, data: Mapping[str, Any], split: str, subset: str) -> TaskPart:
    texts = dict(zip(data["queries"]["id"], data["queries"]["text"], strict=True))
    judged = data["relevant_docs"]
    names = sorted(name for name in judged if name in texts)
    positives = [[d for d, grade in judged[name].items() if grade > 0] for name in names]
    queries: list[tuple[str, ...]] = [(" ".join(_flat(texts[name])),) for name in names]
    return TaskPart(split, subset, names, queries, documents=data["corpus"], positives=positives)


def _of_rows(task: Any, rows: Any, split: str, subset: str) -> TaskPart:
    if isinstance(task, AbsTaskClassification):
        columns = [task.input_column_name]
    else:
        kinds = task._get_content_columns()  # private to mteb so far, as in the cleaning of data
        columns = [name for name, kind in kinds.items() if kind == "text" and name in rows.features]
    cells = [list(rows[name]) for name in columns]
    is_pair = isinstance(task, AbsTaskSTS | AbsTaskPairClassification)
    if len(rows) == 1 and is_pair and not isinstance(cells[0][0], str):
        cells = [list(column[0]) for column in cells]  # all pairs in one row, as of old
    items = [tuple(chain(*map(_flat, row))) for row in zip(*cells, strict=True)]
    if not is_pair and any(len(item) > len(cells) for item in items):
        items = [(text,) for item in items for text in item]  # a set of texts in a row
    return TaskPart(split, subset, [str(n) for n in range(len(items))], items)


def _flat(value: Any) -> Iterator[str]:
    """Yield all texts of a cell, which may be a list of texts or of conversation turns."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _flat(value.get("content"))
    elif value is not None:
        for one in value:
            yield from _flat(one)
