"""The first step: a source's rows become records, cleaned, without duplicates, sampled."""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rayembed.assets.resolver import resolve
from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.run import fingerprint
from rayembed.config.sources import FileSource, PairsSource, WikipediaSource
from rayembed.data.parts import ROWS_PER_PART, Part, read_index
from rayembed.data.prepared import Making, Prepared, Workshop
from rayembed.data.sources.files import Piece, check_columns, list_pieces
from rayembed.data.sources.tasks import (
    HELD_OUT_TEXT,
    ArticleRange,
    ConvertArticles,
    ConvertPairs,
    HeldOut,
    KeepRows,
    PieceUnit,
    RowsOfPart,
    select,
)
from rayembed.data.sources.wikipedia import read_articles
from rayembed.data.units import Result, add_up, run_units
from rayembed.errors import ConfigError, DataError

log = logging.getLogger(__name__)

CODE_VERSION = 3
"""Of converting and cleaning; raised whenever they make other records of the same inputs."""

_EXAMPLES_SHOWN = 5


@dataclass(frozen=True)
class Checked:
    """A data set whose source was found and has the columns that its settings name."""

    dataset: DatasetConfig
    """Its source's paths stand below the root."""
    pieces: tuple[Piece, ...]
    """Of a source of files; none of another one."""
    content: str
    """Fingerprint of what the source holds."""


def check_source(dataset: DatasetConfig, root: str) -> Checked:
    """The data set's source, before any row is converted.

    Raises:
        DataError: nothing there, or files that are none of the known kinds.
        ConfigError: a column that the files do not have; the message names the nearest.
    """
    dataset = with_source_path(dataset, root)
    match dataset.source:
        case PairsSource() as source:
            pieces = tuple(list_pieces(source.path))
            check_columns(pieces[0], source)
            named = [[p.path.rsplit("/", 1)[-1], p.start, p.version] for p in pieces]
            return Checked(dataset, pieces, fingerprint(named))
        case WikipediaSource() as source:
            content = hashlib.sha256(resolve(source.path).read_bytes()).hexdigest()[:12]
            return Checked(dataset, (), content)
        case source:
            raise ConfigError(f"data set {dataset.name!r}: sources of kind {source.kind!r} are new")


def make_records(workshop: Workshop, checked: Checked, held_out: HeldOut) -> Prepared:
    """The folder of the data set's records.

    Raises:
        DataError: no usable row, or more bad ones than `max_rejected_share`.
    """
    dataset = checked.dataset
    making = Making(
        workshop.storage,
        "records",
        dataset.name,
        {
            "code": CODE_VERSION,
            "settings": dataset.model_dump(
                mode="json",
                exclude={
                    "consistency": True,
                    "mining": True,
                    "clusters": True,
                    "source": {"path"},
                },
            ),
            "source": checked.content,
            "held_out": fingerprint(sorted(map(str, (*held_out.titles, *held_out.texts)))),
            "seed": workshop.seed,
        },
    )
    if (found := making.found()) is not None:
        return found
    results = _converted(workshop, checked, held_out, making)
    _accept(dataset, results)
    names, dropped = _selected(workshop, dataset, making, results)
    return making.finish(results, names, dropped)


def with_source_path(dataset: DatasetConfig, root: str) -> DatasetConfig:
    """The data set with its source's path below `root`, unless it is absolute or a reference."""
    path = getattr(dataset.source, "path", None)
    if not root or path is None or "://" in path or Path(path).is_absolute():
        return dataset
    source = dataset.source.model_copy(update={"path": join(root, path)})
    return dataset.model_copy(update={"source": source})


def _converted(
    workshop: Workshop, checked: Checked, held_out: HeldOut, making: Making
) -> list[Result]:
    """Results of the tasks that convert; their parts lie in the folder."""
    dataset = checked.dataset
    what = f"records {dataset.name}"
    target = making.parts_folder
    if isinstance(dataset.source, WikipediaSource):
        count = len(read_articles(resolve(dataset.source.path)))
        ranges = [
            ArticleRange(first, min(first + ROWS_PER_PART, count))
            for first in range(0, count, ROWS_PER_PART)
        ]
        task = ConvertArticles(target, dataset.source.path, dataset, workshop.seed, held_out)
        return run_units(making.folder, what, task, ranges, workshop.execute)
    units = [PieceUnit(piece) for piece in checked.pieces]
    convert = ConvertPairs(target, dataset, held_out)
    return run_units(making.folder, what, convert, units, workshop.execute)


def _accept(dataset: DatasetConfig, results: Sequence[Result]) -> None:
    """Return when the rows are enough and not too many are bad."""
    rows_in, rows_out, rejected = add_up(results)
    path = getattr(dataset.source, "path", dataset.name)
    examples = [example for result in results for example in result["examples"]]
    shown = "".join(f"\n  {e['reason']}: {e['row']}" for e in examples[:_EXAMPLES_SHOWN])
    counts = ", ".join(f"{count} × {reason}" for reason, count in rejected.items())
    if rows_out == 0:
        raise DataError(
            f"data set {dataset.name!r} is empty: {path!r} has {rows_in} rows, none usable "
            f"({counts or 'no rows at all'}){shown}"
        )
    # What is held out is good data kept back, not bad data.
    bad = sum(count for reason, count in rejected.items() if reason != HELD_OUT_TEXT)
    source = dataset.source
    if isinstance(source, FileSource) and bad > source.max_rejected_share * rows_in:
        raise DataError(
            f"data set {dataset.name!r}: {bad} of {rows_in} rows of {path!r} were rejected "
            f"({counts}), more than source.max_rejected_share {source.max_rejected_share}; mend "
            f"them or raise the share. For instance:{shown}"
        )
    log.info("records %s: %d of %d rows (%s)", dataset.name, rows_out, rows_in, counts)


def _selected(
    workshop: Workshop, dataset: DatasetConfig, making: Making, results: Sequence[Result]
) -> tuple[list[list[Any]], dict[str, int]]:
    """Names and rows of the parts after duplicates are dropped and samples drawn."""
    names = [item for result in results for item in result["parts"]]
    parts = [Part(join(making.parts_folder, name), rows) for name, rows in names]
    ids = read_index(parts).id_hash
    keep, dropped = select(ids, dataset.num_samples, workshop.seed, dataset.sample_share)
    if not dropped:
        if dataset.num_samples is not None and len(keep) < dataset.num_samples:
            log.warning(
                "data set %s: num_samples is %d, but there are only %d rows; all are taken",
                *(dataset.name, dataset.num_samples, len(keep)),
            )
        return names, {}
    edges = np.cumsum([part.rows for part in parts])[:-1]
    kept = [np.flatnonzero(mask) for mask in np.split(keep, edges)]
    units = [RowsOfPart(part, rows) for part, rows in zip(parts, kept, strict=True) if len(rows)]
    task, what = KeepRows(making.parts_folder), f"select {dataset.name}"
    done = run_units(making.folder, what, task, units, workshop.execute)
    return [item for result in done for item in result["parts"]], dropped
