"""Search a batch plan for test texts: equal texts, texts contained in a training text, and near
copies.

A test text is *equal* to a training text when both have the same words, whatever the case, the
width of letters, white space and punctuation. It is *contained* when at least half of its n-grams
of 13 words stand in training texts; a text of 8 to 12 words must stand there as a whole. It is
*similar* when it shares most of its BM25 weight with one training text (`data/cleaning/bm25.py`).

Test texts are held as hashes. The files of the plan are read one after the other, each on its own,
so that processes and machines share them; what one of them finds is a list of numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.storage import join
from rayembed.config.mining import Containment, Overlap
from rayembed.data.cleaning.bm25 import Arrays, EvaluationIndex, build_arrays
from rayembed.data.cleaning.evaluation_texts import (
    GRAM_FACTOR,
    GramIndex,
    Grams,
    grams_of_lengths,
    hashed_visible_words,
)
from rayembed.data.engine.here import execute_here
from rayembed.data.engine.parts import read_table
from rayembed.data.engine.work_items import Execute, Result, run_tasks
from rayembed.data.hashes import mixed, text_hash
from rayembed.data.plan.batch_plan import FILES, BatchPlan

EQUAL, CONTAINED, SIMILAR = "equal", "contained", "similar"
"""Ways in which a test text is in the plan, the surest first."""

_SETTINGS = Containment()
_SIMILARITY = float(Overlap.model_fields["max_similarity"].default)
_SHARE = 0.5
"""Share of a text's n-grams from which on it counts as contained."""
_GRAMS_OF_DOCUMENT = 16
"""N-grams that are looked up of a longer document, about so many, chosen by their hashes: enough to
tell a copy from a document that shares a sentence."""
_LONGEST_COMPARED = 64
"""Words of a text up to which it is looked for by similarity; of longer ones a near copy shares
most n-grams."""
_NO_DOCUMENT, _DOCUMENT, _BOTH = range(3)
_AT_ONCE = 1024
_REMEMBERED = 2_000_000
"""Hashes of training texts that a process remembers, so that a text of many steps is read once."""


@dataclass
class TestTexts:
    """Distinct test texts, numbered in the order in which they are added."""

    __test__: ClassVar = False  # for pytest

    count: int = 0
    _known: dict[int, int] = field(default_factory=dict)
    """Hash of a text → its number."""
    _keys: list[np.ndarray] = field(default_factory=list)
    _grams: list[np.ndarray] = field(default_factory=list)
    _owners: list[np.ndarray] = field(default_factory=list)
    _of_documents: list[bool] = field(default_factory=list)
    """For each block of n-grams whether they are those of documents."""
    _state: bytearray = field(default_factory=bytearray)
    """For each text whether it is no document, a document, or both."""
    _compared: list[str] = field(default_factory=list)
    _compared_numbers: list[int] = field(default_factory=list)

    def add(self, texts: Sequence[str], *, documents: bool = False) -> np.ndarray:
        """Add texts and return their (texts,) int64 numbers; equal texts share a number.

        Args:
            documents: whether the texts are documents, of which fewer n-grams are kept and which
                are not looked for by similarity.
        """
        numbers, new, again = np.empty(len(texts), np.int64), list[str](), dict[int, str]()
        for index, text in enumerate(texts):
            numbers[index] = number = self._known.setdefault(text_hash(text), len(self._known))
            if number == self.count + len(new):
                new.append(text)
            elif not documents and number < self.count and self._state[number] == _DOCUMENT:
                self._state[number] = _BOTH
                again[number] = text
        for start in range(0, len(new), _AT_ONCE):
            some = new[start : start + _AT_ONCE]
            self._keys.append(text_keys(*hashed_visible_words(some)))
            self._add(some, np.arange(self.count, self.count + len(some)), documents=documents)
            self._state += bytes([_DOCUMENT if documents else _NO_DOCUMENT]) * len(some)
            self.count += len(some)
        if again:  # documents of another task: as an item a text is searched in all ways
            self._add(list(again.values()), np.array(list(again)), documents=False)
        return numbers

    def _add(self, texts: Sequence[str], numbers: np.ndarray, *, documents: bool) -> None:
        hashes, counts = hashed_visible_words(texts)
        taken = np.minimum(counts, _SETTINGS.ngram)
        taken = np.where(counts >= _SETTINGS.shortest, taken, 0)
        grams, owners = grams_of_lengths(hashes, counts, taken)
        if documents:
            every = -(-np.bincount(owners, minlength=len(texts)) // _GRAMS_OF_DOCUMENT)
            kept = grams % every.astype(np.uint64)[owners] == 0
            grams, owners = grams[kept], owners[kept]
        self._grams.append(grams)
        self._owners.append(numbers[owners].astype(np.int32))
        self._of_documents.append(documents)
        if not documents:
            short = np.flatnonzero(counts <= _LONGEST_COMPARED).tolist()
            self._compared += [texts[index] for index in short]
            self._compared_numbers += numbers[short].tolist()

    def search(
        self, plans: Iterable[str], folder: str, execute: Execute | None = None
    ) -> np.ndarray:
        """Search the batch plans for all texts.

        Args:
            plans: folders of the plans.
            folder: for the index, which the tasks read.
            execute: runs the tasks; None: this machine, with a process for each of its cores.

        Returns:
            (count,) uint8: 0 for a text that is in no plan, else 1 + the index of its way in
            `(EQUAL, CONTAINED, SIMILAR)`.

        Raises:
            ArtifactError: a file of a plan is missing or broken.
        """
        keys, key_of = np.unique(_joined(self._keys, np.uint64), return_inverse=True)
        self._drop_samples()
        grams, gram_of = np.unique(_joined(self._grams, np.uint64), return_inverse=True)
        owners = _joined(self._owners, np.int32)
        self._keys, self._grams, self._owners = [], [], []
        similar = vars(build_arrays(self._compared))
        lengths = np.arange(_SETTINGS.shortest, _SETTINGS.ngram + 1)
        path = join(folder, "index.npz")
        save_arrays(path, keys=keys, grams=grams, lengths=lengths, **similar)
        items = [
            PlanFile(join(plan, name))
            for plan in dict.fromkeys(plans)
            for name in BatchPlan.open(plan).manifest[FILES]
        ]
        task, run = SearchFile(path), execute or execute_here
        seen = {EQUAL: np.zeros(len(keys), bool), CONTAINED: np.zeros(len(grams), bool)}
        seen[SIMILAR] = np.zeros(len(self._compared), bool)
        for result in run_tasks("test texts in the batch plan", task, items, run):
            for way, marks in seen.items():
                marks[np.array(result[way], dtype=np.int64)] = True
        found = np.zeros(self.count, np.uint8)
        numbers = np.array(self._compared_numbers, dtype=np.int64)
        found[numbers[seen[SIMILAR]]] = 3
        total = np.bincount(owners, minlength=self.count)
        there = np.bincount(owners, seen[CONTAINED][gram_of], minlength=self.count)
        found[(total > 0) & (there >= _SHARE * total)] = 2
        found[seen[EQUAL][key_of]] = 1
        return found

    def _drop_samples(self) -> None:
        """Drop the n-grams that were sampled of documents which are items, too."""
        both = np.frombuffer(self._state, np.uint8) == _BOTH
        for block, sampled in enumerate(self._of_documents):
            if sampled:
                kept = ~both[self._owners[block]]
                self._grams[block] = self._grams[block][kept]
                self._owners[block] = self._owners[block][kept]


@dataclass(frozen=True)
class PlanFile:
    """Work item: one file of a batch plan."""

    path: str

    @property
    def key(self) -> str:
        """Unique name of the work item, derived from the file's path."""
        return f"{text_hash(self.path):x}"


@dataclass(frozen=True)
class SearchFile:
    """Task that searches a file of a batch plan for the test texts."""

    index: str
    """Path of what `TestTexts.search` writes."""

    def __call__(self, item: PlanFile) -> Result:
        """Run the task; its result lists, for each kind of match, the index entries that occur in
        the file.
        """
        index = _index(self.index)
        columns = ["query", "positives", "negatives.list.element.text"]
        table = read_table(item.path, columns)
        texts = index.unknown(_distinct_texts(table))
        found: dict[str, list[np.ndarray]] = {EQUAL: [], CONTAINED: [], SIMILAR: []}
        for start in range(0, len(texts), _AT_ONCE):
            some = texts[start : start + _AT_ONCE]
            hashes, counts = hashed_visible_words(some)
            found[EQUAL].append(index.equal(text_keys(hashes, counts)))
            found[CONTAINED] += [at for _, at in index.grams.hits(hashes, counts)]
            found[SIMILAR].append(index.texts.similar_pairs(some, _SIMILARITY)[1])
        index.remember(texts)
        numbers = {way: np.unique(_joined(places, np.int64)) for way, places in found.items()}
        rows = {"rows_in": len(table), "rows_out": len(table), "rejected": {}}
        return {**rows, **{way: places.tolist() for way, places in numbers.items()}}


class _Index:
    """Search index of the test texts in a task's process: word hashes, n-grams and BM25 weights."""

    def __init__(self, path: str) -> None:
        loaded = load_arrays(path)
        self.keys = loaded["keys"]
        grams, lengths = loaded["grams"], tuple(loaded["lengths"].tolist())
        self.grams = GramIndex(Grams(grams, np.empty(0, np.int32), lengths))
        arrays = Arrays(**{name: loaded[name] for name in Arrays.__dataclass_fields__})
        self.texts = EvaluationIndex(arrays, pa.table({}), _SIMILARITY)
        self._read: set[int] = set()

    def unknown(self, texts: Sequence[str]) -> list[str]:
        """Select the texts that this process has not searched yet."""
        if len(self._read) > _REMEMBERED:
            self._read.clear()
        new = {hash_: text for text in texts if (hash_ := text_hash(text)) not in self._read}
        return list(new.values())

    def remember(self, texts: Iterable[str]) -> None:
        """Note texts as searched, once their search has succeeded: a failed task is tried again."""
        self._read.update(map(text_hash, texts))

    def equal(self, keys: np.ndarray) -> np.ndarray:
        """Return the positions in the index of the given hashes that it contains."""
        at = np.minimum(np.searchsorted(self.keys, keys), max(len(self.keys) - 1, 0))
        return at[self.keys[at] == keys] if len(self.keys) else np.empty(0, np.int64)


_index = lru_cache(maxsize=1)(_Index)


def text_keys(hashes: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(texts,) uint64 hash of each text's word sequence.

    Args:
        hashes, counts: as `hashed_words` gives them; each text has a word.
    """
    if not len(counts):
        return np.empty(0, np.uint64)
    starts = np.cumsum(counts) - counts
    place = (np.arange(len(hashes)) - np.repeat(starts, counts)).astype(np.uint64)
    with np.errstate(over="ignore"):
        placed = mixed(hashes + place * GRAM_FACTOR)
        return mixed(np.add.reduceat(placed, starts) + counts.astype(np.uint64))


def _distinct_texts(table: pa.Table) -> list[str]:
    negatives = pc.list_flatten(table["negatives"].combine_chunks())
    columns = [
        table["query"].combine_chunks(),
        pc.list_flatten(table["positives"].combine_chunks()),
        pc.struct_field(negatives, "text"),
    ]
    texts = pa.concat_arrays([column.cast(pa.string()) for column in columns])
    distinct: list[Any] = pc.unique(texts.drop_null()).to_pylist()
    return distinct


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
