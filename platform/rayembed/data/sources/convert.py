"""The first step: converts a source's rows to records, cleans, deduplicates and samples them."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.document import fingerprint
from rayembed.data.artifacts import (
    ArtifactWriter,
    DatasetArtifact,
    PipelineContext,
    held_out_entry,
)
from rayembed.data.cleaning.clean import clean, overlap_identity
from rayembed.data.parts import Part
from rayembed.data.sources.file_rows import Conversion, ResolvedDataset
from rayembed.data.sources.tasks import NOT_BAD, HeldOut
from rayembed.data.work_items import Result, add_up
from rayembed.errors import DataError

log = logging.getLogger(__name__)

CODE_VERSION = 7
"""Code version of conversion and cleaning; bump when the same inputs yield other records."""

_EXAMPLES_SHOWN = 5


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


def make_records(
    context: PipelineContext,
    checked: ResolvedDataset,
    held_out: HeldOut,
    part: DatasetArtifact | None = None,
) -> DatasetArtifact:
    """Make or reuse the folder of a data set's records.

    Args:
        held_out: rows and texts that are left out.
        part: the data set's own held-out part, which the manifest names.

    Raises:
        DataError: no usable row, or more bad ones than `max_rejected_share`.
        ConfigError, AssetError: texts of benchmarks that are named cannot be had.
    """
    dataset = checked.dataset
    writer = ArtifactWriter(
        context.storage,
        "records",
        dataset.name,
        {
            "code": CODE_VERSION,
            "settings": dataset.model_dump(
                mode="json",
                exclude={
                    "held_out": True,
                    "consistency": True,
                    "mining": True,
                    "clusters": True,
                    "source": {*dataset.source.paths, "max_rejected_share"},
                    "cleaning": {"overlap": {"tasks"}},
                },
            ),
            "source": checked.content,
            "held_out": fingerprint(sorted(map(str, held_out.texts))),
            **({} if part is None else {"held_out_part": part.fingerprint}),
            "overlap": overlap_identity(dataset.cleaning.overlap, context.root),
            "seed": context.seed,
        },
    )
    made = writer.get_or_make(
        lambda: _converted_and_cleaned(context, checked, held_out, part, writer)
    )
    accept(dataset, made.manifest)  # another run may have taken more bad rows
    return made


def _converted_and_cleaned(
    context: PipelineContext,
    checked: ResolvedDataset,
    held_out: HeldOut,
    part: DatasetArtifact | None,
    writer: ArtifactWriter,
) -> DatasetArtifact:
    dataset = checked.dataset
    conversion = Conversion(context, dataset, checked.files, held_out, writer)
    results = dataset.source.convert(conversion)
    told = told_of(results)
    accept(dataset, told)
    made = [item for result in results for item in result["parts"]]
    parts = [Part(join(writer.parts_folder, name), rows) for name, rows in made]
    cleaned = clean(context, dataset, writer, parts)
    log.info("records %s: %s", dataset.name, _summary(told, cleaned.dropped))
    more: dict[str, Any] = {"unread_columns": dict(checked.unread)} if checked.unread else {}
    if part is not None:
        more["held_out"] = held_out_entry(context.storage, part)
    if lost := sum(result.get("negatives_held_out", 0) for result in results):
        more["negatives_held_out"] = lost
    return writer.finish(results, cleaned.parts, cleaned.dropped, removed=cleaned.removed, **more)


def with_source_path(dataset: DatasetConfig, root: str) -> DatasetConfig:
    """Data set with relative source paths resolved below `root`; absolute paths and references
    stay.
    """
    below = {
        name: join(root, path)
        for name, path in dataset.source.paths.items()
        if root and "://" not in path and not Path(path).is_absolute()
    }
    if not below:
        return dataset
    return dataset.model_copy(update={"source": dataset.source.model_copy(update=below)})


def told_of(results: Sequence[Result]) -> dict[str, Any]:
    """Manifest entries on rows and records, from results."""
    rows_in, made, rejected = add_up(results)
    examples = [example for result in results for example in result["examples"]]
    return {
        "rows_in": rows_in,
        "records_made": made,
        "rejected": rejected,
        "examples": examples[:_EXAMPLES_SHOWN],
    }


def accept(dataset: DatasetConfig, told: Mapping[str, Any]) -> None:
    """Raise when there are too few rows or too many bad ones.

    The share in the settings is not part of the folder's name, so that raising it needs no new
    conversion.

    Args:
        told: a manifest, or as much of it as `told_of` gives.
    """
    rows_in, rows_out, rejected = told["rows_in"], told["records_made"], told["rejected"]
    path, tolerated = dataset.source.place, NOT_BAD | dataset.source.tolerated
    shown = "".join(f"\n  {e['reason']}: {e['row']}" for e in told["examples"][:_EXAMPLES_SHOWN])
    counts = _counts(rejected)
    if rows_out == 0:
        raise DataError(
            f"data set {dataset.name!r} is empty: {path!r} has {rows_in} rows, none usable "
            f"({counts or 'no rows at all'}){shown}"
        )
    bad = sum(count for reason, count in rejected.items() if reason not in tolerated)
    share = getattr(dataset.source, "max_rejected_share", 1.0)
    if bad > share * rows_in:
        raise DataError(
            f"data set {dataset.name!r}: {bad} of {rows_in} rows of {path!r} were rejected "
            f"({counts}), more than the share {share:g} that may be. Mend them, or set "
            f"data.datasets.{dataset.name}.source.max_rejected_share to "
            f"{math.ceil(100 * bad / rows_in) / 100:g} or more. For instance:{shown}"
        )


def _counts(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} × {reason}" for reason, count in rejected.items())


def _summary(told: Mapping[str, Any], dropped: Mapping[str, int]) -> str:
    """One-line summary of the conversion; a row may yield several records."""
    rejected, lost = told["rejected"], {why: count for why, count in dropped.items() if count}
    return (
        f"{told['rows_in']:,} rows read, {sum(rejected.values()):,} rejected"
        + (f" ({_counts(rejected)})" if rejected else "")
        + f", {told['records_made']:,} records"
        + (f", {_counts(lost)} dropped" if lost else "")
    )
