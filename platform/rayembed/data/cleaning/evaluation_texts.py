"""Texts excluded from training: those of mteb tasks, benchmarks or files.

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

import xxhash

from rayembed.assets.hub_client import limit_hub
from rayembed.assets.storage import below, file_name, read_bytes
from rayembed.config.settings import nearest
from rayembed.config.types import has_content
from rayembed.data.sources.cells import is_unicode
from rayembed.data.sources.files import list_pieces
from rayembed.data.sources.rows import BadRow, lines_of, read_rows
from rayembed.errors import ArtifactError, AssetError, ConfigError, DataError, StorageError

log = logging.getLogger(__name__)

_FILES = (".txt", ".jsonl", ".parquet")
_COLUMN = "text"


@dataclass(frozen=True)
class TextSource:
    """Task or file with texts; located but not loaded."""

    name: str
    """Name of the mteb task, or file name without its folder."""
    version: str
    """Revision, splits and subsets of the task's data, or hash of the file's content."""
    path: str = ""
    """Path of the file; empty for a task."""
    task: Any = None
    """The mteb task; None for a file."""


def find_sources(names: Sequence[str], root: str) -> list[TextSource]:
    """Locate the named tasks, tasks of benchmarks and files, each once.

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
    """Read the texts of a source; for a task, those of its evaluation splits.

    Raises:
        AssetError: the task's data cannot be loaded.
        DataError: a file without texts, or a task whose texts are not known.
    """
    if source.task is None:
        yield from _texts_of_file(source)
        return
    import httpx
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    task = source.task
    try:
        limit_hub()
        task.load_data()
        if isinstance(task, AbsTaskRetrieval):
            task.convert_v1_dataset_format_to_v2(num_proc=None)
    except (OSError, ValueError, KeyError, httpx.HTTPError) as error:
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
            "protects nothing",
            source.name,
        )


def _tasks(name: str) -> list[Any]:
    """The mteb tasks of a task or benchmark name; aggregates are expanded to their members."""
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
                f"cleaning.overlap.tasks = {name!r}: neither an mteb task or benchmark nor a "
                f"file with one of the endings {', '.join(_FILES)}; {nearest(name, known)}"
            ) from None
    return [part for task in tasks for part in getattr(task, "tasks", None) or [task]]


def _texts_of_task(task: Any) -> Iterator[str]:
    """Texts of a loaded task; none if it has only images or sound."""
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
            f"{task.metadata.type!r} does not tell which of its columns hold texts; leave it out "
            "or give its texts as a file"
        )
    for split in _splits(task):
        for column, kind in columns.items():
            if kind == "text" and column in split.features:
                yield from _flat(split[column])


def _splits(task: Any) -> Iterator[Any]:
    """Evaluation splits of all subsets, at any nesting level of the task's data."""
    for subset in task.hf_subsets or list(task.dataset):
        # A task of one subset, or one whose subsets are columns, has its splits at the top.
        here = task.dataset.get(subset, task.dataset)
        for name in task.eval_splits:
            if name in here:
                yield here[name]


def _flat(values: Any) -> Iterator[str]:
    """All texts in a column, whose cells may be lists of texts or conversation turns."""
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
            raise ValueError("it changed since the job looked at it; start the job again")
        if not all(map(is_unicode, texts)):
            raise ValueError("half of a surrogate pair, which is not valid Unicode")
        if not any(map(has_content, texts)):
            raise ValueError("there is no text in it, so it would protect nothing")
        return texts
    except StorageError:
        raise
    except (ValueError, ArtifactError, DataError) as error:
        raise DataError(
            f"cleaning.overlap.tasks: cannot read texts from {path!r}: {error}; expected UTF-8 "
            f"with a text a line (.txt), or a column {_COLUMN!r} (.jsonl, .parquet)"
        ) from error


def _texts_of_rows(path: str) -> Iterator[Any]:
    for piece in list_pieces(path):
        for row in read_rows(piece, (_COLUMN,)):
            if isinstance(row, BadRow):
                raise ValueError(f"{row.origin}: {row.reason}")
            if _COLUMN not in row.values:
                raise ValueError(f"{row.origin}: no column {_COLUMN!r}")
            yield row.values[_COLUMN]
