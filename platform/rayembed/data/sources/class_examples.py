"""Collect examples of each class, from which the positives and negatives of classification texts
are drawn.

NV-Embed, sections 4.2 and 5.2.4. A first pass over all pieces keeps examples of each class, those
with the smallest seeded hash, so that records are independent of the order and number of pieces. A
second pass finds further classes of these examples, as a text of two classes may be kept for only
one of them.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import file_name, join, write_atomic
from rayembed.data.engine.parts import read_table
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import seeded_hash
from rayembed.data.sources.files import FilePiece
from rayembed.data.sources.tasks import HeldOut, converted
from rayembed.data.words import normalised_hash

TextAndClass = Callable[[Mapping[str, Any]], tuple[str, str]]
"""Text and class of a row; raises `RowError` where it has none."""

_FURTHER = pa.schema([("class", pa.string()), ("hash", pa.uint64())])
_SCHEMA = pa.schema([("class", pa.string()), ("hash", pa.uint64()), ("text", pa.large_string())])
_TRIES_PER_NEGATIVE = 10


class _Hashes:
    """Text hashes grouped by class, from a table sorted by class and hash."""

    def __init__(self, table: pa.Table) -> None:
        self.hashes = table["hash"].to_numpy()
        found = table["class"].to_pylist()
        self.of_class = {
            name: range(bisect_left(found, name), bisect_right(found, name))
            for name in dict.fromkeys(found)
        }
        """Class → range of its rows."""

    def has(self, name: str, wanted: int) -> bool:
        """Whether a text of the class has this hash."""
        rows = self.of_class.get(name, range(0))
        return _among(self.hashes[rows.start : rows.stop], wanted)


class Examples:
    """Example texts of each class of a data set.

    Texts are in Arrow memory, in their size in bytes, for `examples_per_class` of each class.
    """

    def __init__(
        self,
        pool: pa.Table,
        seed: int,
        names: Iterable[str] = (),
        further: pa.Table | None = None,
    ) -> None:
        """Sort the examples in `pool` by class and hash. `names` adds classes without examples;
        `further` adds classes of the pool's texts.
        """
        self.seed = seed
        self._texts = pool["text"].combine_chunks()
        self._kept = _Hashes(pool)
        self._further = _Hashes(_FURTHER.empty_table() if further is None else further)
        self.names = sorted({*self._kept.of_class, *names})

    def size(self, name: str) -> int:
        """Number of examples of a class."""
        return len(self._kept.of_class.get(name, ()))

    def text(self, name: str, place: int) -> str:
        """Return an example of a class by its index, in the order of hashes."""
        return str(self._texts[self._kept.of_class[name][place]].as_py())

    def keeps(self, name: str, text: str) -> bool:
        """Whether the text is among the class's examples."""
        return self._kept.has(name, _place(self.seed, text))

    def has(self, name: str, text: str) -> bool:
        """Whether the text is an example, of any class, that also belongs to this class."""
        place = _place(self.seed, text)
        return self._kept.has(name, place) or self._further.has(name, place)

    def hashes(self) -> np.ndarray:
        """(n,) uint64 hashes of all examples, sorted."""
        return np.unique(self._kept.hashes)


@dataclass(frozen=True)
class CollectExamples:
    """Task: collect example texts of each class from one piece."""

    folder: str
    columns: tuple[str, ...]
    text_and_class: TextAndClass
    limit: int
    """Maximum number of examples of a class; 0: the names of classes alone."""
    held_out: HeldOut
    seed: int

    def __call__(self, item: FilePiece) -> Result:
        """Collect the examples; return as `pool` the name of their Parquet file in the folder."""
        smallest: dict[str, dict[int, str]] = {}
        limit = self.limit
        for _, made in converted(item, self.columns, lambda row: self.text_and_class(row.values)):
            if isinstance(made, str):
                continue
            text, name = made
            if normalised_hash(text) in self.held_out.texts:
                continue
            kept = smallest.setdefault(name, {})
            if limit:
                kept[_place(self.seed, text)] = text
            if len(kept) > 2 * limit:
                smallest[name] = dict(sorted(kept.items())[:limit])
        rows: list[dict[str, Any]] = []
        for name, kept in smallest.items():
            rows += [{"class": name, "hash": h, "text": t} for h, t in kept.items()]
            if not limit:  # the name alone
                rows.append({"class": name, "hash": 0, "text": None})
        table = _limited(pa.Table.from_pylist(rows, _SCHEMA), max(limit, 1))
        content = parquet_bytes(table)
        name = f"examples-{xxhash.xxh3_128_hexdigest(content)}.parquet"
        write_atomic(join(self.folder, name), content)
        return {"pool": name}


@dataclass(frozen=True)
class FindFurtherClasses:
    """Task: find in one piece the examples that also occur under another class."""

    folder: str
    columns: tuple[str, ...]
    text_and_class: TextAndClass
    pool: str
    """Path of the examples."""
    seed: int

    def __call__(self, item: FilePiece) -> Result:
        """Search the piece; return as `further` the name of a Parquet file with the classes
        found.
        """
        examples = open_examples(self.pool, "", self.seed, ())
        kept = examples.hashes()
        found: set[tuple[str, int]] = set()
        for _, made in converted(item, self.columns, lambda row: self.text_and_class(row.values)):
            if isinstance(made, str):
                continue
            text, name = made
            place = _place(self.seed, text)
            if _among(kept, place) and not examples.keeps(name, text):
                found.add((name, place))
        return {"further": file_name(_write_further(self.folder, found))}


def merge_examples(folder: str, pools: Sequence[str], examples_per_class: int) -> str:
    """Merge the examples of all pieces into one file in the folder, and return its path."""
    merged = _SCHEMA.empty_table()
    for name in pools:
        merged = _limited(
            pa.concat_tables([merged, read_table(join(folder, name))]), examples_per_class
        )
    content = parquet_bytes(merged)
    path = join(folder, f"merged-{xxhash.xxh3_128_hexdigest(content)}.parquet")
    write_atomic(path, content)
    return path


def merge_further(folder: str, names: Sequence[str]) -> str:
    """Merge the additional classes of examples, found in all pieces, into one file in the folder;
    return its path.
    """
    found: set[tuple[str, int]] = set()
    for name in names:
        table = read_table(join(folder, name))
        found.update(zip(table["class"].to_pylist(), table["hash"].to_pylist(), strict=True))
    return _write_further(folder, found)


@lru_cache(maxsize=2)
def open_examples(pool: str, further: str, seed: int, names: tuple[str, ...]) -> Examples:
    """Open the examples that `merge_examples` wrote, and add the class names of the
    settings.

    Args:
        pool: path that `merge_examples` gave.
        further: path that `merge_further` gave; empty if no additional classes are known.
    """
    return Examples(read_table(pool), seed, names, read_table(further) if further else None)


def example_of(examples: Examples, name: str, text: str, key: str) -> str | None:
    """Draw another example of the text's class; None if there is no other.

    Args:
        key: what the draw depends on, beside the seed.
    """
    size = examples.size(name)
    own = int(examples.keeps(name, text))
    if size == own:
        return None
    place = seeded_hash(examples.seed, "positive", key) % size
    drawn = examples.text(name, place)
    return drawn if drawn != text else examples.text(name, (place + 1) % size)


def other_examples(
    examples: Examples, name: str, taken: set[str], key: str, number: int
) -> list[str]:
    """Draw distinct examples of other classes, spread over as many classes as possible."""
    classes = [c for c in other_classes(examples, name, key, number) if examples.size(c)]
    texts: list[str] = []
    for tried in range(_TRIES_PER_NEGATIVE * (number + len(classes))):
        if not classes or len(texts) == number:
            break
        other = classes[tried % len(classes)]
        place = seeded_hash(examples.seed, f"negative {tried}", key) % examples.size(other)
        text = examples.text(other, place)
        # A text of two classes cannot be told apart: never a negative.
        if text not in taken and not examples.has(name, text):
            texts.append(text)
            taken = taken | {text}
    return texts


def other_classes(examples: Examples, own: str, key: str, number: int) -> Iterator[str]:
    """Yield up to `number` other classes in seeded random order, each once."""
    names = examples.names
    place = bisect_left(names, own)
    present = place < len(names) and names[place] == own
    count = len(names) - present
    moved: dict[int, int] = {}
    for step in range(min(number, count)):
        other = step + seeded_hash(examples.seed, f"class {step}", key) % (count - step)
        chosen = moved.get(other, other)
        moved[other] = moved.get(step, step)
        yield names[chosen + (present and chosen >= place)]


def _place(seed: int, text: str) -> int:
    return seeded_hash(seed, "example", text)


def _among(hashes: np.ndarray, wanted: int) -> bool:
    """Whether the sorted uint64 array contains a hash."""
    place = np.searchsorted(hashes, np.uint64(wanted))
    return bool(place < len(hashes) and hashes[place] == np.uint64(wanted))


def _write_further(folder: str, found: Collection[tuple[str, int]]) -> str:
    rows = [{"class": name, "hash": place} for name, place in sorted(found)]
    content = parquet_bytes(pa.Table.from_pylist(rows, _FURTHER))
    path = join(folder, f"further-{xxhash.xxh3_128_hexdigest(content)}.parquet")
    write_atomic(path, content)
    return path


def _limited(table: pa.Table, limit: int) -> pa.Table:
    """Keep the `limit` rows with the smallest hashes in each class, without duplicates, sorted by
    class and hash.
    """
    if not len(table):
        return table
    order = [("class", "ascending"), ("hash", "ascending"), ("text", "ascending")]
    table = table.sort_by(order).combine_chunks()
    names = pc.dictionary_encode(table["class"]).combine_chunks().indices.to_numpy()
    hashes = table["hash"].to_numpy()
    new = np.ones(len(table), dtype=bool)
    new[1:] = (names[1:] != names[:-1]) | (hashes[1:] != hashes[:-1])
    table, names = table.filter(pa.array(new)), names[new]
    first = np.searchsorted(names, names, side="left")
    return table.filter(pa.array(np.arange(len(names)) - first < limit))
