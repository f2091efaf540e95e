"""Stages whose length is given in epochs: rows are counted, and steps follow."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import HeldOutFraction
from rayembed.config.run import Run
from rayembed.config.settings import parse
from rayembed.data.sources.file_rows import FileRows
from rayembed.errors import ConfigError

if TYPE_CHECKING:
    from rayembed.data.sources.files import FilePiece

CountRows = Callable[[DatasetConfig, str, str], int]
"""Rows of a data set, given `data.root` and the stage that asks, which errors name."""


def rows_trained_on(dataset: DatasetConfig, root: str, stage: str) -> int:
    """Rows of a data set's files that training may see.

    Raises:
        ConfigError, DataError: as `with_steps`.
    """
    from rayembed.data.sources.check import check_source

    if not isinstance(dataset.source, FileRows):
        raise ConfigError(
            f"stages.{stage}.epochs counts rows of files, and the source of the data set "
            f"{dataset.name!r} is {dataset.source.kind!r}; set stages.{stage}.steps"
        )
    rows = count_rows(check_source(dataset, root).files["path"])
    if isinstance(dataset.held_out, HeldOutFraction):
        rows -= min(int(dataset.held_out.share * rows), dataset.held_out.max_queries)
    return rows


def with_steps(run: Run, count: CountRows = rows_trained_on) -> Run:
    """The run with `steps` in place of each stage's `epochs`.

    Of data sets with a held-out share, that share of their rows is left out of the count; rejected
    rows and duplicates are counted.

    Raises:
        ConfigError: rows of a source that is no file of rows, or a stage that refuses its steps.
        DataError: the files cannot be read.
    """
    if all(stage.epochs is None for stage in run.stages):
        return run
    datasets = {dataset.name: dataset for dataset in run.data.datasets}
    counts: dict[str, int] = {}
    stages = []
    for stage in run.stages:
        if stage.epochs is None:
            stages.append(stage)
            continue
        for name in stage.datasets:
            if name in datasets and name not in counts:
                counts[name] = count(datasets[name], run.data.root, stage.name)
        rows = sum(counts.get(name, 0) for name in stage.datasets)
        steps = max(1, round(stage.epochs * rows / stage.batch.global_pairs))
        stages.append(parse(type(stage), {**dict(stage), "epochs": None, "steps": steps}))
    return parse(type(run), {**dict(run), "stages": tuple(stages)})


def count_rows(pieces: "Sequence[FilePiece]") -> int:
    """Rows of files, those that cannot be used among them."""
    from rayembed.data.sources.rows import read_rows

    return sum(sum(1 for _ in read_rows(piece)) for piece in pieces)
