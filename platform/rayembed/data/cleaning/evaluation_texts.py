"""Texts to exclude from training: the texts of mteb tasks, of benchmarks or of files.

Of retrieval and reranking tasks these are the queries. Their documents are not: corpora such as
Wikipedia or MS MARCO are trained on by everyone, knowing a document is not knowing which query it
answers, and without them no passage of the web would be left. Of all other tasks (STS, pair and
text classification, clustering, bitexts, summaries) they are all texts of the evaluation splits,
since these are what scores are made of.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.hub_client import limit_hub
from rayembed.assets.storage import below, file_name, join, read_bytes
from rayembed.config.mining import Containment
from rayembed.config.settings import nearest
from rayembed.config.types import has_content
from rayembed.data.engine.parts import remedy
from rayembed.data.hashes import mixed, text_hash
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import BadRow, lines_of, read_rows
from rayembed.data.words import words
from rayembed.errors import ArtifactError, AssetError, ConfigError, DataError, StorageError

log = logging.getLogger(__name__)

_FILES = (".txt", ".jsonl", ".parquet")
_COLUMN = "text"


@dataclass(frozen=True)
class TextSource:
    """An mteb task or a file whose texts are excluded from training; located, not loaded."""

    name: str
    """Name of the mteb task, or file name without its folder."""
    version: str
    """Revision, splits and subsets of the task's data, or hash of the file's content."""
    path: str = ""
    """Path of the file; empty for a task."""
    task: Any = None
    """The mteb task; None for a file."""


def find_sources(names: Sequence[str], root: str) -> list[TextSource]:
    """Locate the named mteb tasks, benchmarks' tasks and files; each is listed once.

    Args:
        root: where relative paths start.

    Raises:
        ConfigError: a name that is none of them; the message tells the nearest.
        ArtifactError: a file cannot be read.
    """
    found: list[TextSource] = []
    for name in names:
        if file_name(name).endswith(_FILES):
            path = below(root, name)
            version = xxhash.xxh3_64_hexdigest(read_bytes(path))
            found.append(TextSource(file_name(path), version, path=path))
            continue
        for task in _tasks(name):
            data = task.metadata.dataset
            taken = f"{','.join(task.eval_splits)} of {','.join(task.hf_subsets or ())}"
            version = f"{data['path']}@{data['revision']}: {taken}"
            found.append(TextSource(task.metadata.name, version, task=task))
    return list({(source.name, source.version): source for source in found}.values())


def read_texts(source: TextSource) -> Iterator[str]:
    """Read the texts of a file, or of a task's evaluation splits.

    Raises:
        AssetError: the task's data cannot be loaded.
        DataError: a file without texts, or a task whose texts are not known.
    """
    if source.task is None:
        yield from _texts_of_file(source)
        return
    task = source.task
    try:
        load_data(task)
    except loading_errors() as error:
        raise AssetError(
            f"cleaning.overlap.tasks: cannot load the data of the mteb task {source.name!r}: "
            f"{error}. Check the network or HF_ENDPOINT, or give its texts as a file"
        ) from error
    texts = 0
    for text in _texts_of_task(task):
        texts += has_content(text)
        yield text
    task.unload_data()
    if not texts:  # of a benchmark that is no matter: some of its tasks are about images alone
        log.warning(
            "cleaning.overlap.tasks: the mteb task %s has no texts in its evaluation splits; it "
            "excludes nothing from training",
            source.name,
        )


def load_data(task: Any) -> None:
    """Load the data of an mteb task in the format of mteb 2.

    Raises:
        OSError, ValueError, KeyError, httpx.HTTPError: it cannot; see `loading_errors`.
    """
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    limit_hub()
    task.load_data()
    if isinstance(task, AbsTaskRetrieval):
        task.convert_v1_dataset_format_to_v2(num_proc=None)


def loading_errors() -> tuple[type[Exception], ...]:
    """Return the exception classes that `load_data` can raise."""
    import httpx

    return (OSError, ValueError, KeyError, httpx.HTTPError)


def _tasks(name: str) -> list[Any]:
    """Return the mteb task of this name, or all tasks of the benchmark of this name; aggregate
    tasks are replaced by their members.
    """
    import mteb

    try:
        tasks: Iterable[Any] = mteb.get_benchmark(name).tasks
    except KeyError:
        try:
            tasks = [mteb.get_task(name)]
        except KeyError:
            known = [benchmark.name for benchmark in mteb.get_benchmarks()]
            known += [task.metadata.name for task in mteb.get_tasks()]
            raise ConfigError(
                f"cleaning.overlap.tasks names {name!r}, which is neither an mteb task or "
                f"benchmark nor a file that ends with one of {', '.join(_FILES)}; "
                f"{nearest(name, known)}"
            ) from None
    return [part for task in tasks for part in getattr(task, "tasks", None) or [task]]


def _texts_of_task(task: Any) -> Iterator[str]:
    """Yield the evaluation texts of a loaded task; none if it has only images or sound."""
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    if isinstance(task, AbsTaskRetrieval):
        for split in _splits(task):
            yield from _flat(
                split["queries"]["text"] if _COLUMN in split["queries"].features else ()
            )
        return
    # mteb's own list of the columns that hold what is compared, private to it so far.
    columns = task._get_content_columns()
    if not columns:
        raise DataError(
            f"cleaning.overlap.tasks: the mteb task {task.metadata.name!r} of type "
            f"{task.metadata.type!r} does not state which of its columns hold texts; leave it out "
            "or give its texts as a file"
        )
    for split in _splits(task):
        for column, kind in columns.items():
            if kind == "text" and column in split.features:
                yield from _flat(split[column])


def _splits(task: Any) -> Iterator[Any]:
    """Yield the evaluation splits of all subsets, whether the task's data nests splits below
    subsets or not.
    """
    for subset in task.hf_subsets or list(task.dataset):
        # A task of one subset, or one whose subsets are columns, has its splits at the top.
        here = task.dataset.get(subset, task.dataset)
        for name in task.eval_splits:
            if name in here:
                yield here[name]


def _flat(values: Any) -> Iterator[str]:
    """Yield all texts in a column, whose cells may be lists of texts or conversation turns."""
    if isinstance(values, str):
        yield values
    elif isinstance(values, dict):
        yield from _flat(values.get("content"))
    elif values is not None:
        for value in values:
            yield from _flat(value)


def _texts_of_file(source: TextSource) -> list[str]:
    path = source.path
    try:
        if file_name(path).endswith(".txt"):
            texts = lines_of(read_bytes(path))
        else:
            texts = [text for text in _texts_of_rows(path) if isinstance(text, str)]
        if xxhash.xxh3_64_hexdigest(read_bytes(path)) != source.version:
            raise ValueError("the file changed since the job listed it; start the job again")
        if not any(map(has_content, texts)):
            raise ValueError("the file has no text, so it would exclude nothing from training")
        return texts
    except StorageError:
        raise
    except (ValueError, ArtifactError, DataError) as error:
        raise DataError(
            f"cleaning.overlap.tasks: cannot read texts from {path!r}: {error}; expected a UTF-8 "
            f"file with one text on each line (.txt), or with a column {_COLUMN!r} (.jsonl, "
            ".parquet)"
        ) from error


def _texts_of_rows(path: str) -> Iterator[Any]:
    for piece in list_pieces(path):
        for row in read_rows(piece, (_COLUMN,)):
            if isinstance(row, BadRow):
                raise ValueError(f"{row.origin}: {row.reason}")
            if _COLUMN not in row.values:
                raise ValueError(f"{row.origin}: the row has no column {_COLUMN!r}")
            yield row.values[_COLUMN]


_TEXTS_AT_ONCE = 1024
"""Texts whose words are hashed at a time, with some 100 bytes a word."""

_INVISIBLE = dict.fromkeys([0x00AD, 0x200B, 0x2060, 0xFEFF])
"""Characters that are left out: soft hyphen, zero-width space, word joiner, byte-order mark."""

_FILTER_BITS_PER_GRAM = 16
"""Bits of the filter for each n-gram, at least: one of 16 other n-grams passes at most."""


@dataclass(frozen=True)
class Grams:
    """Hashes of the distinct n-grams of E benchmark texts."""

    hashes: np.ndarray
    """(G,) uint64, ascending."""
    places: np.ndarray
    """(G,) int32 index of the first text that contains the n-gram."""
    lengths: tuple[int, ...]
    """Lengths of the n-grams in words, ascending."""


def grams_of(texts: Sequence[str], settings: Containment) -> Grams:
    """Collect the n-grams by which benchmark texts are recognised within longer texts."""
    found, places, lengths = [np.empty(0, np.uint64)], [np.empty(0, np.int64)], set[int]()
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        hashes, counts = hashed_visible_words(texts[start : start + _TEXTS_AT_ONCE])
        taken = np.where(counts >= settings.shortest, np.minimum(counts, settings.ngram), 0)
        lengths.update(taken[taken > 0].tolist())
        grams, texts_of = grams_of_lengths(hashes, counts, taken)
        found.append(grams)
        places.append(start + texts_of)
    all_hashes, all_places = np.concatenate(found), np.concatenate(places).astype(np.int32)
    order = np.lexsort((all_places, all_hashes))
    distinct, first = np.unique(all_hashes[order], return_index=True)
    return Grams(distinct, all_places[order][first], tuple(sorted(lengths)))


def write_grams(folder: str, texts: Sequence[str], settings: Containment) -> None:
    """Write the n-grams of benchmark texts into a file of the folder."""
    grams = grams_of(texts, settings)
    save_arrays(
        _path(folder),
        hashes=grams.hashes,
        places=grams.places,
        lengths=np.array(grams.lengths, dtype=np.int64),
    )


def open_grams(folder: str) -> "GramIndex":
    """Open the n-grams that `write_grams` wrote.

    Raises:
        ArtifactError: there is none, or it is broken.
    """
    loaded = load_arrays(_path(folder), remedy(_path(folder)))
    lengths = tuple(loaded["lengths"].tolist())
    return GramIndex(Grams(loaded["hashes"], loaded["places"], lengths))


def _path(folder: str) -> str:
    return join(folder, "grams.npz")


class GramIndex:
    """Index of n-grams that finds the benchmark text contained in a training text."""

    def __init__(self, grams: Grams) -> None:
        self.grams = grams
        bits = max(int(_FILTER_BITS_PER_GRAM * len(grams.hashes) - 1).bit_length(), 3)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << (bits - 3), dtype=np.uint8)
        slot = grams.hashes >> self._shift
        np.bitwise_or.at(self._filter, slot >> np.uint64(3), _bit(slot))

    def find(self, texts: Sequence[str]) -> np.ndarray:
        """(texts,) int64 index of the first benchmark text within each text; -1 for none."""
        if not len(self.grams.hashes):
            return np.full(len(texts), -1, dtype=np.int64)
        slices = range(0, len(texts), _TEXTS_AT_ONCE)
        found = [self._find(texts[first : first + _TEXTS_AT_ONCE]) for first in slices]
        return np.concatenate([np.empty(0, np.int64), *found])

    def hits(
        self, hashes: np.ndarray, counts: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, for each n-gram length, the texts that contain an n-gram of a benchmark text, and
        the index of that n-gram.

        Args:
            hashes, counts: words of the texts, as `hashed_words` gives them.
        """
        if not len(self.grams.hashes):
            return
        for _, grams, texts_of in windows(hashes, counts, self.grams.lengths):
            slot = grams >> self._shift
            passing = np.flatnonzero(self._filter[slot >> np.uint64(3)] & _bit(slot))
            wanted = grams[passing]
            at = np.searchsorted(self.grams.hashes, wanted)
            at = np.minimum(at, len(self.grams.hashes) - 1)
            same = self.grams.hashes[at] == wanted
            yield texts_of[passing[same]], at[same]

    def _find(self, texts: Sequence[str]) -> np.ndarray:
        found = np.full(len(texts), -1, dtype=np.int64)
        unset = np.iinfo(np.int64).max
        best = np.full(len(texts), unset)
        for texts_of, at in self.hits(*hashed_visible_words(texts)):
            np.minimum.at(best, texts_of, self.grams.places[at])
        return np.where(best == unset, found, best)


def share_contained(text: str, benchmark_text: str, settings: Containment) -> float:
    """Return the share of a benchmark text's distinct n-grams that a training text contains."""
    wanted = grams_of([benchmark_text], settings)
    hashes, counts = hashed_visible_words([text])
    found = [grams for _, grams, _ in windows(hashes, counts, wanted.lengths)]
    if not found:
        return 0.0
    return float(np.isin(wanted.hashes, np.concatenate(found)).mean())


def hashed_visible_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hash all words as `hashed_words` does, after removing invisible characters inside them."""
    return hashed_words([t if t.isascii() else t.translate(_INVISIBLE) for t in texts])


def _bit(slot: np.ndarray) -> np.ndarray:
    return np.left_shift(np.uint8(1), (slot & np.uint64(7)).astype(np.uint8))


GRAM_FACTOR = np.uint64(0x9E3779B97F4A7C15)
"""Factor of the polynomial hash that combines the hashes of an n-gram's words."""


def grams_of_lengths(
    hashes: np.ndarray, counts: np.ndarray, wanted: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Hash the n-grams of each text, where n may differ between texts; return the hashes and each
    hash's text index.

    Args:
        hashes: (words,) uint64 of all texts' words.
        counts: (texts,) words of each text.
        wanted: (texts,) words of its n-grams; 0: it has none.
    """
    grams, texts = [np.empty(0, np.uint64)], [np.empty(0, np.int64)]
    lengths = np.unique(wanted[wanted > 0]).tolist()
    for length, found, text in windows(hashes, counts, lengths):
        ours = wanted[text] == length
        grams.append(found[ours])
        texts.append(text[ours])
    return np.concatenate(grams), np.concatenate(texts)


def hashed_words(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hash every word of the texts in order, and count the words of each text.

    Returns:
        (words,) uint64 and (texts,) int64.
    """
    known: dict[str, int] = {}
    split = [words(text) for text in texts]
    codes = [known.setdefault(word, len(known)) for found in split for word in found]
    by_code = np.array([text_hash(word) for word in known], dtype=np.int64).view(np.uint64)
    hashes = by_code[np.array(codes, dtype=np.int64)]
    return hashes, np.array([len(found) for found in split], dtype=np.int64)


def windows(
    hashes: np.ndarray, counts: np.ndarray, lengths: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield for each length n the hashes of all n-grams that lie within one text, and the index of
    that text.

    Args:
        hashes: (words,) uint64 of all texts' words.
        counts: (texts,) words of each text.
        lengths: words of an n-gram, ascending.
    """
    text = np.repeat(np.arange(len(counts)), counts)
    left = np.repeat(np.cumsum(counts), counts) - np.arange(len(hashes))
    combined, done = np.zeros(len(hashes), dtype=np.uint64), 0
    for length in lengths:
        with np.errstate(over="ignore"):
            for place in range(done, length):
                # What begins too near the end of all texts is cut away.
                there = max(len(hashes) - place, 0)
                combined = combined[:there] * GRAM_FACTOR + hashes[place:]
        done = length
        inside = left[: len(combined)] >= length
        yield length, mixed(combined[inside]), text[: len(combined)][inside]
