"""The choice of a data set's held-out rows: bounded passes over its rows, merged to text hashes.

Which documents, groups or ids are held out depends on their texts and the seed alone, never on
parts, files or workers. Documents and groups are ranked by a seeded hash; the first ones are held
out, so that a task need only report as many as could be chosen.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.storage import below, join, read_bytes
from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import HeldOut, HeldOutFraction, HeldOutGroups, HeldOutIds
from rayembed.data.artifacts import ArtifactWriter, PipelineContext
from rayembed.data.hashes import seeded_keys, text_hash
from rayembed.data.parts import remedy
from rayembed.data.sources.accepted import accept, told_of
from rayembed.data.sources.rows import lines_of
from rayembed.data.sources.tasks import HeldOut as Banned
from rayembed.data.sources.tasks import HeldOutRows, RecordWriter
from rayembed.data.words import normalised_hash
from rayembed.data.work_items import Result, WorkItem, run_resumable
from rayembed.errors import ArtifactError, DataError, StorageError

log = logging.getLogger(__name__)

MIN_DOCUMENTS = 10
"""Fewest held-out documents: nDCG@10 looks at ten, and with fewer all of them are found."""

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class RankNames:
    """Task: report the first documents or groups of a piece in the order of their seeded hash."""

    folder: str
    dataset: DatasetConfig
    of: Literal["documents", "groups"]
    most: int | None
    """Number of hashes that are kept; None: all."""

    def __call__(self, item: WorkItem) -> Result:
        """Write their hashes to a file, whose name is in the result."""
        hashes, counts = set[int](), RecordWriter(self.folder, Banned())
        for candidate in self.dataset.source.candidates(self.dataset, item):
            if isinstance(candidate.made, str):
                counts.reject(candidate.made, candidate.shown)
                continue
            counts.rows_used += 1
            if self.of == "documents":
                hashes.update(map(normalised_hash, candidate.made.positives))
            elif candidate.value is not None:
                hashes.add(text_hash(candidate.value))
        assert self.dataset.held_out is not None
        ranked = _first(_array(hashes), self.dataset.held_out.seed, self.of, self.most)
        file = _saved(self.folder, f"{self.of}-{item.key}", hashes=ranked)
        return {"file": file, **counts.finish()}


@dataclass(frozen=True)
class FindTexts:
    """Task: report queries and documents of the rows with some values in the held-out column."""

    folder: str
    dataset: DatasetConfig
    values: frozenset[int]
    """Hashes of the values."""

    def __call__(self, item: WorkItem) -> Result:
        """Write their hashes, and those of the values found, to a file named in the result."""
        queries, documents, found = set[int](), set[int](), set[int]()
        counts = RecordWriter(self.folder, Banned())
        for candidate in self.dataset.source.candidates(self.dataset, item):
            if isinstance(candidate.made, str):
                counts.reject(candidate.made, candidate.shown)
                continue
            counts.rows_used += 1
            if candidate.value is not None and (value := text_hash(candidate.value)) in self.values:
                found.add(value)
                queries.add(normalised_hash(candidate.made.query))
                documents.update(map(normalised_hash, candidate.made.positives))
        saved = {"queries": queries, "documents": documents, "found": found}
        arrays = {name: _array(hashes) for name, hashes in saved.items()}
        file = _saved(self.folder, f"texts-{item.key}", **arrays)
        return {"file": file, **counts.finish()}


def choose(
    context: PipelineContext,
    dataset: DatasetConfig,
    items: Sequence[WorkItem],
    writer: ArtifactWriter,
) -> HeldOutRows:
    """Choose the held-out rows of the data set.

    Raises:
        DataError: fewer than `MIN_DOCUMENTS` documents would be, the file of ids cannot be had,
            or there are too many bad rows.
    """
    folder = join(writer.working_folder, "chosen")

    def hashes_of(what: str, task: RankNames | FindTexts) -> Iterator[dict[str, np.ndarray]]:
        results = run_resumable(
            writer.working_folder, f"{what} {dataset.name}", task, items, context.execute
        )
        # Bad rows are told as conversion tells them, before too few documents are.
        made = sum(result["rows_used"] for result in results)
        accept(dataset, {**told_of(results), "records_made": made})
        paths = (join(folder, result["file"]) for result in results)
        return (load_arrays(path, remedy(path)) for path in paths)

    def ranked(of: Literal["documents", "groups"], most: int | None, seed: int) -> np.ndarray:
        merged = _NONE
        for arrays in hashes_of(f"rank {of}", RankNames(folder, dataset, of, most)):
            merged = _first(np.union1d(merged, arrays["hashes"]), seed, of, most)
        return merged

    match dataset.held_out:
        case HeldOutFraction() as fraction:
            # As many as are ranked, or all of them: the share is exact in either case.
            documents = ranked("documents", fraction.num_ranked, fraction.seed)
            count = min(round(fraction.share * len(documents)), fraction.max_queries)
            chosen = HeldOutRows(frozenset(documents[:count].tolist()))
            _check_enough(dataset, chosen, len(documents))
            return chosen
        case HeldOutGroups(share=float() as share, seed=seed):
            groups = ranked("groups", None, seed)
            values = frozenset(groups[: max(round(share * len(groups)), 1)].tolist())
        case HeldOutGroups() | HeldOutIds() as listed:
            values = frozenset(map(text_hash, listed_values(listed, context.root)))
        case None:
            raise AssertionError(f"data set {dataset.name!r} holds nothing out")
    queries, documents, found = _NONE, _NONE, _NONE
    for arrays in hashes_of("find held-out texts of", FindTexts(folder, dataset, values)):
        queries = np.union1d(queries, arrays["queries"])
        documents = np.union1d(documents, arrays["documents"])
        found = np.union1d(found, arrays["found"])
    if len(found) < len(values):
        lost = len(values) - len(found)
        log.warning(
            "data set %s: %d of the %d values to hold out stand in no row's column %r",
            *(dataset.name, lost, len(values), dataset.held_out.column),
        )
    chosen = HeldOutRows(frozenset(documents.tolist()), frozenset(queries.tolist()))
    _check_enough(dataset, chosen, None)
    return chosen


def listed_values(held_out: HeldOut, root: str) -> list[str]:
    """Values that the settings list, or the lines of the file that they name.

    Args:
        root: folder that a relative path starts from.

    Raises:
        DataError: the file cannot be read, or has no line.
    """
    if not isinstance(held_out, HeldOutIds) or held_out.file is None:
        return list(getattr(held_out, "values", ()))
    place = below(root, held_out.file)
    try:
        lines = lines_of(read_bytes(place))
    except StorageError:
        raise
    except (ArtifactError, UnicodeError) as error:
        raise DataError(
            f"held_out.file {place!r} cannot be read: {error}; name a UTF-8 file with one id a line"
        ) from error
    if values := [line.strip() for line in lines if line.strip()]:
        return values
    raise DataError(f"held_out.file {place!r} is empty; it must have one id a line")


def _check_enough(dataset: DatasetConfig, chosen: HeldOutRows, total: int | None) -> None:
    """Raise when there are too few held-out documents for a score that says something.

    Args:
        total: distinct documents of which a share is held out; None: they were chosen by rows.
    """
    count = len(chosen.documents)
    if count >= MIN_DOCUMENTS:
        return
    setting = f"data.datasets.{dataset.name}.held_out"
    off = (
        f"set {setting}=null and evaluation.guard=null to train on all rows without scores of them"
    )
    if total is None:
        raise DataError(
            f"data set {dataset.name!r}: its held-out rows have {count} distinct documents, and "
            f"retrieval among fewer than {MIN_DOCUMENTS} says nothing; hold out more groups or "
            f"ids ({setting}), or {off}"
        )
    advice = "it needs more rows"
    if total >= 2 * MIN_DOCUMENTS:
        assert isinstance(dataset.held_out, HeldOutFraction)
        share = -(-100 * MIN_DOCUMENTS // total) / 100
        advice = f"raise {setting}.share to {share:.2f}"
        if dataset.held_out.max_queries < MIN_DOCUMENTS:
            advice = f"raise {setting}.max_queries to at least {MIN_DOCUMENTS}"
    raise DataError(
        f"data set {dataset.name!r} has {total} distinct documents, of which {count} would be held "
        f"out, and retrieval among fewer than {MIN_DOCUMENTS} says nothing; {advice}, or {off}"
    )


def _array(hashes: set[int]) -> np.ndarray:
    return np.fromiter(hashes, np.int64, len(hashes))


def _first(hashes: np.ndarray, seed: int, of: str, most: int | None) -> np.ndarray:
    """The first of the distinct hashes in the order of their seeded keys."""
    keys = seeded_keys(hashes, seed, f"held-out {of}")
    return np.asarray(hashes[np.argsort(keys, kind="stable")][:most])


def _saved(folder: str, name: str, **arrays: np.ndarray) -> str:
    save_arrays(join(folder, f"{name}.npz"), **arrays)
    return f"{name}.npz"
