"""Search a batch plan for test texts: equal texts, texts contained in a training text, and near
copies.

A test text is *equal* to a training text when both have the same words, whatever the case, the
width of letters, white space and punctuation. It is *contained* when at least half of its n-grams
of 13 words stand in training texts; a text of 8 to 12 words must stand there as a whole. It is
*similar* when it shares most of its BM25 weight with one training text (`data/cleaning/bm25.py`).

Test texts are held as hashes, and searched in blocks: when as many hashes are held as
`MOST_GRAMS` allows, the plan is read for them, and they are dropped, so that memory does not grow
with the corpora. The files of the plan are read one after the other, each on its own, so that
processes and machines share them; what one of them finds is a list of numbers.
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
_AT_ONCE = 1024
MOST_GRAMS = 1 << 24
"""N-grams of a block of test texts: some 1.4 million passages, and 1 GiB in this process."""
MOST_CHARACTERS = 1 << 27
"""Characters of the items of a block, which stay as texts until they are searched."""
_REMEMBERED = 2_000_000
"""Hashes of training texts that a process remembers, so that a text of many steps is read once."""


class TestTexts:
    """Test texts, numbered in the order in which they are added, and searched in batch plans in
    blocks of bounded size.

    Args:
        plans: folders of the batch plans.
        folder: for the index of a block, which the tasks read.
        execute: runs the tasks; None: this machine, with a process for each of its cores.
    """

    __test__: ClassVar = False  # for pytest

    def __init__(self, plans: Iterable[str], folder: str, execute: Execute | None = None) -> None:
        self._files = [
            PlanFile(join(plan, name))
            for plan in dict.fromkeys(plans)
            for name in BatchPlan.open(plan).manifest[FILES]
        ]
        self._folder, self._execute = folder, execute or execute_here
        self.count = 0
        """Texts that were added."""
        self._found: list[np.ndarray] = []
        self._block = _Block(0)

    @property
    def searched(self) -> int:
        """Number of texts that are searched; the others follow with the next `search`."""
        return self._block.first

    @property
    def matches(self) -> np.ndarray:
        """(searched,) uint8: 0 for a text that is in no plan, else 1 + the index of its way in
        `(EQUAL, CONTAINED, SIMILAR)`.
        """
        return _joined(self._found, np.uint8)

    def add(self, texts: Sequence[str]) -> np.ndarray:
        """Add texts of items and return their (texts,) int64 numbers; equal texts of a block share
        a number.

        Raises:
            ArtifactError: a file of a plan is missing or broken, as by `search`.
        """
        numbers = np.empty(len(texts), np.int64)
        for start in range(0, len(texts), _AT_ONCE):
            self._make_room()
            known, new = self._block.items, list[str]()
            for index, text in enumerate(texts[start : start + _AT_ONCE], start):
                number = known.setdefault(text_hash(text), self.count + len(new))
                numbers[index] = number
                if number == self.count + len(new):
                    new.append(text)
            if new:
                self.count += self._block.add(new, documents=False)
        return numbers

    def add_documents(self, texts: Sequence[str]) -> None:
        """Add documents, which take the next numbers. Fewer n-grams are kept of them than of items,
        and they are not looked for by similarity.

        Raises:
            ArtifactError: a file of a plan is missing or broken, as by `search`.
        """
        for start in range(0, len(texts), _AT_ONCE):
            self._make_room()
            self.count += self._block.add(texts[start : start + _AT_ONCE], documents=True)

    def _make_room(self) -> None:
        block = self._block
        if block.num_grams >= MOST_GRAMS or block.characters >= MOST_CHARACTERS:
            self.search()

    def search(self) -> None:
        """Search the texts that were added since the last search; keep only their `matches`.

        Raises:
            ArtifactError: a file of a plan is missing or broken.
        """
        if self.searched < self.count:
            path = join(self._folder, f"index-{len(self._found)}.npz")
            self._found.append(self._block.search(self._files, path, self._execute))
            self._block = _Block(self.count)


@dataclass
class _Block:
    """Test texts that are searched together."""

    first: int
    """Number of the first text."""
    items: dict[int, int] = field(default_factory=dict)
    """Hash of an item's text → its number."""
    num_grams: int = 0
    characters: int = 0
    """Characters of the items."""
    _keys: list[np.ndarray] = field(default_factory=list)
    _grams: list[np.ndarray] = field(default_factory=list)
    _owners: list[np.ndarray] = field(default_factory=list)
    """For each n-gram the index of its text among those that were added with it."""
    _compared: list[str] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)
    """Index in the block of each text that is compared."""

    def add(self, texts: Sequence[str], *, documents: bool) -> int:
        """Add texts, and return their number."""
        hashes, counts = hashed_visible_words(texts)
        taken = np.minimum(counts, _SETTINGS.ngram)
        taken = np.where(counts >= _SETTINGS.shortest, taken, 0)
        grams, owners = grams_of_lengths(hashes, counts, taken)
        if documents:
            every = -(-np.bincount(owners, minlength=len(texts)) // _GRAMS_OF_DOCUMENT)
            kept = grams % every.astype(np.uint64)[owners] == 0
            grams, owners = grams[kept], owners[kept]
        else:
            short = np.flatnonzero(counts <= _LONGEST_COMPARED)
            self._compared += [texts[index] for index in short.tolist()]
            self._places += (sum(map(len, self._keys)) + short).tolist()
            self.characters += sum(map(len, texts))
        self._keys.append(text_keys(hashes, counts))
        self._grams.append(grams)
        self._owners.append(owners.astype(np.uint16))
        self.num_grams += len(grams)
        return len(texts)

    def search(self, files: Sequence["PlanFile"], path: str, execute: Execute) -> np.ndarray:
        """Search files of plans for the texts; return (texts,) uint8 as `TestTexts.matches`.

        Args:
            path: for the index.
        """
        every = _joined(self._keys, np.uint64)
        keys, grams = _distinct(every.copy()), _distinct(_joined(self._grams, np.uint64))
        similar = vars(build_arrays(self._compared))
        lengths = np.arange(_SETTINGS.shortest, _SETTINGS.ngram + 1)
        save_arrays(path, keys=keys, grams=grams, lengths=lengths, **similar)
        seen = {EQUAL: np.zeros(len(keys), bool), CONTAINED: np.zeros(len(grams), bool)}
        seen[SIMILAR] = np.zeros(len(self._compared), bool)
        for result in run_tasks("test texts in the batch plan", SearchFile(path), files, execute):
            for way, marks in seen.items():
                marks[np.array(result[way], dtype=np.int64)] = True
        found = np.zeros(len(every), np.uint8)
        found[np.array(self._places, dtype=np.int64)[seen[SIMILAR]]] = 3
        end = 0
        for of_texts, some, owners in zip(self._keys, self._grams, self._owners, strict=True):
            start, end = end, end + len(of_texts)
            there = seen[CONTAINED][np.searchsorted(grams, some)]
            total = np.bincount(owners, minlength=len(of_texts))
            hits = np.bincount(owners, there, minlength=len(of_texts))
            found[start:end][(total > 0) & (hits >= _SHARE * total)] = 2
        found[seen[EQUAL][np.searchsorted(keys, every)]] = 1
        return found


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
    """Path of the index of a block."""

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


def _distinct(hashes: np.ndarray) -> np.ndarray:
    """Sort hashes in place, and return each once; `np.unique` would hold twice the memory."""
    hashes.sort()
    found: np.ndarray = hashes[np.append(True, hashes[1:] != hashes[:-1])[: len(hashes)]]
    return found


def _joined(arrays: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays]).astype(dtype, copy=False)
