"""Count the test items of each task that were seen in training, and score all items and the unseen
ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rayembed.evaluation.query_results import query_results
from rayembed.results.items import Items, item_scores
from rayembed_extras.clean_scores.bootstrap import CleanScore, clean_score
from rayembed_extras.clean_scores.scored_texts import TaskPart
from rayembed_extras.clean_scores.search import CONTAINED, EQUAL, SIMILAR, TestTexts

_WAYS = (EQUAL, CONTAINED, SIMILAR)
MOST_SHOWN = 10_000
"""Seen items whose texts are listed."""
_SHOWN_CHARACTERS = 200


@dataclass
class ScoredPart:
    """One scored split and subset of a task: its numbered texts, and the outcomes that make up its
    score.
    """

    task: str
    split: str
    subset: str
    main_score: float
    names: list[str]
    items: list[tuple[str, ...]]
    """Texts of each item; names and texts are dropped by `mark`."""
    item_of: np.ndarray
    """(texts,) int64 index of the item that each text belongs to."""
    numbers: np.ndarray
    """(texts,) int64 number of each text."""
    documents: range
    """Numbers of the documents; empty for other tasks than retrieval."""
    positives: np.ndarray
    """(positives,) int64 indices of the documents that are relevant to a query, each once."""
    outcomes: Items | None
    """Outcomes of the items; None: not stored, or the score is not made of them."""
    ways: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    """(items,) uint8: how the item was seen, as `TestTexts.matches` has it; set by `mark`."""
    seen_documents: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))
    """(documents,) uint8: the same of documents."""
    seen_texts: list[tuple[str, str, str]] = field(default_factory=list)
    """(name, way, text) of the first seen items."""

    @classmethod
    def of(
        cls, metadata: Any, part: TaskPart, entry: Mapping[str, Any], texts: TestTexts
    ) -> "ScoredPart":
        """Number the texts of a split and subset, and read the items' outcomes from its stored
        scores.
        """
        flat = [text for item in part.items for text in item]
        sizes = [len(item) for item in part.items]
        numbers = texts.add(flat)
        first, positives = texts.count, list[int]()
        relevant = {document for of_query in part.positives for document in of_query}
        for ids, some in part.document_blocks():
            at = texts.count - first
            positives += [at + place for place, name in enumerate(ids) if name in relevant]
            texts.add_documents(some)
        outcomes = item_scores(entry)
        if stored := query_results(entry):
            known = all(name in stored for name in part.names)
            outcomes = [stored[name].score for name in part.names] if known else None
        if outcomes is not None and len(outcomes) != len(part.items):
            outcomes = None
        return cls(
            metadata.name,
            part.split,
            part.subset,
            float(entry["main_score"]),
            part.names,
            part.items,
            np.repeat(np.arange(len(sizes)), sizes),
            numbers,
            range(first, texts.count),
            np.array(positives, dtype=np.int64),
            outcomes,
        )

    @property
    def last(self) -> int:
        """First number after the numbers of all texts."""
        return max(self.documents.stop, int(self.numbers.max(initial=-1)) + 1)

    def mark(self, found: np.ndarray) -> None:
        """Mark each item with the strongest match of its texts: equal, contained, or similar.

        Args:
            found: how each text was seen, by its number.
        """
        unseen = len(_WAYS) + 1
        of_texts = np.where(found[self.numbers] > 0, found[self.numbers], unseen)
        ways = np.full(len(self.items), unseen)
        np.minimum.at(ways, self.item_of, of_texts)
        self.ways = np.where(ways == unseen, 0, ways).astype(np.uint8)
        self.seen_documents = found[self.documents.start : self.documents.stop].copy()
        self.seen_texts = [
            (
                self.names[index],
                _WAYS[int(self.ways[index]) - 1],
                " ".join(" | ".join(self.items[index]).split())[:_SHOWN_CHARACTERS],
            )
            for index in np.flatnonzero(self.ways)[:MOST_SHOWN].tolist()
        ]
        self.names, self.items = [], []
        self.item_of = self.numbers = np.empty(0, np.int64)


@dataclass(frozen=True)
class TaskOverlap:
    """Test items of a task that occur in the training data, and the score without them."""

    task: str
    main_score: float
    items: int
    ways: Mapping[str, int]
    """Way of being seen → number of items."""
    positives: int
    seen_positives: int
    documents: int
    seen_documents: int
    score: CleanScore | None
    note: str
    """Why there is no clean score; empty: there is one."""

    @property
    def seen(self) -> int:
        """Number of test items that occur in the training data."""
        return sum(self.ways.values())

    @property
    def is_seen(self) -> bool:
        """Whether a test item or a document of the task occurs in the training data."""
        return bool(self.seen or self.seen_documents)


def task_overlaps(parts: Sequence[ScoredPart]) -> list[TaskOverlap]:
    """Compute the overlap of each task with the training data, in the order of the parts, which are
    marked.
    """
    by_task: dict[str, list[ScoredPart]] = {}
    for part in parts:
        by_task.setdefault(part.task, []).append(part)
    return [_overlap(task, of_task) for task, of_task in by_task.items()]


def _overlap(task: str, parts: Sequence[ScoredPart]) -> TaskOverlap:
    ways = np.concatenate([part.ways for part in parts])
    known = [part.outcomes for part in parts if part.outcomes is not None]
    score, note = None, ""
    if len(known) < len(parts):
        note = "its score is not made of the scores of single texts, or these were not stored"
    else:
        score = clean_score(known, [part.ways == 0 for part in parts])
        if score is None:
            note = "too few items are clean"
    positives = [part.seen_documents[part.positives] for part in parts]
    documents = [part.seen_documents for part in parts]
    return TaskOverlap(
        task,
        float(np.mean([part.main_score for part in parts])),
        len(ways),
        {way: int((ways == 1 + number).sum()) for number, way in enumerate(_WAYS)},
        *(sum(map(len, positives)), sum(int((one > 0).sum()) for one in positives)),
        *(sum(map(len, documents)), sum(int((one > 0).sum()) for one in documents)),
        score,
        note,
    )
