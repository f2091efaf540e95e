"""Checks of a run's sources before any row is converted. Imports no torch."""

import logging
from collections.abc import Collection, Sequence

from rayembed.assets.reading import is_on_hub
from rayembed.assets.resolver import is_unpacked
from rayembed.assets.storage import below
from rayembed.config.data import DatasetConfig
from rayembed.config.data_run import DataRun
from rayembed.config.run import Run
from rayembed.data.sources.file_rows import ResolvedDataset
from rayembed.data.sources.names_beside import shown_names
from rayembed.data.sources.unread import unread_negatives

logger = logging.getLogger(__name__)


def check_source(dataset: DatasetConfig, root: str) -> ResolvedDataset:
    """Check a data set's source before any row is converted.

    Raises:
        DataError: nothing there, or files that are none of the known kinds.
        ConfigError: a column that the files do not have, the message names the nearest; a split
            that a task evaluates on or does not have.
        AssetError: the hub does not give what a reference names.
    """
    whole = with_source_path(dataset, root)
    resolved: ResolvedDataset = whole.source.check(whole)
    return resolved


def with_source_path(dataset: DatasetConfig, root: str) -> DatasetConfig:
    """Data set with relative source paths resolved below `root`; absolute paths and references
    stay.
    """
    whole = {name: below(root, path) for name, path in dataset.source.paths.items()}
    return dataset.model_copy(update={"source": dataset.source.model_copy(update=whole)})


def check_sources(
    run: DataRun, names: Collection[str] | None = None, checked: Sequence[ResolvedDataset] = ()
) -> list[ResolvedDataset]:
    """Data sets whose sources were found with all columns that the settings name.

    Needs no download, so that it can run before one.

    Args:
        checked: those that were found already.
    """
    chosen = [d for d in run.data.datasets if names is None or d.name in names]
    known = {one.dataset.name: one for one in checked}
    found = [known.get(d.name) or check_source(d, run.data.root) for d in chosen]
    for one in found:
        for setting, pieces in one.files.items():
            names_of = list(dict.fromkeys(name for piece in pieces for name in piece.names))
            if len(names_of) > 1:
                logger.info(
                    "data.datasets.%s.source.%s stands for %d files, all of which are read: %s",
                    *(one.dataset.name, setting, len(names_of), shown_names(names_of)),
                )
    return found


def check_files_at_hand(run: Run) -> list[ResolvedDataset]:
    """Check that the stages' data files exist, except those on the hub or in packages.

    What takes no download, for those who are about to begin one.

    Returns:
        The data sets that were checked.

    Raises:
        ConfigError: as `check_source`; or rows have negatives that a stage asks for and nobody
            reads.
        DataError: as `check_source`.
    """
    used = {name for stage in run.stages for name in stage.datasets}
    found = []
    for dataset in run.data.datasets:
        places = dataset.source.paths.values() if dataset.name in used else ()
        if places and not any(is_on_hub(place) or is_unpacked(place) for place in places):
            found.append(check_source(dataset, run.data.root))
    check_unread(run, found)
    return found


def check_unread(run: Run, sources: Sequence[ResolvedDataset]) -> None:
    """Raise when a stage requires hard negatives and rows have some in columns that are not read.

    Raises:
        ConfigError: some do.
    """
    asking = {n for stage in run.stages if stage.batch.num_negatives for n in stage.datasets}
    for checked in sources:
        if checked.dataset.name in asking:
            problem = unread_negatives(checked.dataset, checked.unread)
            if problem is not None:
                raise problem
