"""The first step: converts a source's rows to records, cleans, deduplicates and samples them."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.document import fingerprint
from rayembed.config.sources import (
    BeirSource,
    ClassesSource,
    MtebSource,
    NLISource,
    RecordsSource,
)
from rayembed.data.artifacts import (
    ArtifactWriter,
    DatasetArtifact,
    PipelineContext,
    held_out_entry,
)
from rayembed.data.cleaning.clean import clean
from rayembed.data.cleaning.overlap import overlap_identity
from rayembed.data.parts import Part
from rayembed.data.sources import joins
from rayembed.data.sources.classes import (
    CollectExamples,
    ExampleFiles,
    FindFurtherClasses,
    merge_examples,
    merge_further,
)
from rayembed.data.sources.earlier import EarlierPart, TakeRecords, open_earlier
from rayembed.data.sources.files import FilePiece, list_pieces
from rayembed.data.sources.kinds import columns_of, paths_of
from rayembed.data.sources.mteb_tasks import SplitOfTask, StageTask, check_task, staged
from rayembed.data.sources.rows import check_columns
from rayembed.data.sources.rowwise import ConvertRows
from rayembed.data.sources.tasks import NOT_BAD, HeldOut
from rayembed.data.sources.unread import unread_columns
from rayembed.data.work_items import Result, add_up, in_process, run_resumable
from rayembed.errors import DataError

log = logging.getLogger(__name__)

CODE_VERSION = 7
"""Code version of conversion and cleaning; bump when the same inputs yield other records."""

_EXAMPLES_SHOWN = 5


@dataclass(frozen=True)
class ResolvedDataset:
    """A data set whose source exists and has the columns that the settings name."""

    dataset: DatasetConfig
    """Settings with the source's paths resolved below the root."""
    content: str
    """Content fingerprint of the source."""
    files: Mapping[str, tuple[FilePiece, ...]] = field(default_factory=dict)
    """Setting → pieces of its files, for sources of files."""
    unread: Mapping[str, str] = field(default_factory=dict)
    """Unread column of the files at `path` → what it looks like."""


def check_source(dataset: DatasetConfig, root: str) -> ResolvedDataset:
    """Check a data set's source before any row is converted.

    Raises:
        DataError: nothing there, or files that are none of the known kinds.
        ConfigError: a column that the files do not have, the message names the nearest; a split
            that a task evaluates on or does not have.
        AssetError: the hub does not give what a reference names.
    """
    dataset = with_source_path(dataset, root)
    match dataset.source:
        case MtebSource() as source:
            return ResolvedDataset(dataset, check_task(source))
        case RecordsSource() as source:
            earlier = open_earlier(source)
            return ResolvedDataset(
                dataset, fingerprint([earlier.fingerprint, earlier.manifest["parts"]])
            )
        case source:
            files = {name: tuple(list_pieces(path)) for name, path in paths_of(source).items()}
            columns = {f"source.{name}": column for name, column in columns_of(source).items()}
            if (column := getattr(dataset.held_out, "column", None)) is not None:
                columns["held_out.column"] = column
            check_columns(files["path"][0], columns)
            if isinstance(source, BeirSource):
                joins.check_texts(source, files["corpus"][0], files["queries"][0])
            told = {n: [[p.name, p.start, p.version] for p in ps] for n, ps in files.items()}
            unread = unread_columns(files["path"], columns.values())
            return ResolvedDataset(dataset, fingerprint(told), files, unread)


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
                    "source": {*paths_of(dataset.source), "max_rejected_share"},
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
    results = _converted(context, checked, held_out, writer)
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
        for name, path in paths_of(dataset.source).items()
        if root and "://" not in path and not Path(path).is_absolute()
    }
    if not below:
        return dataset
    return dataset.model_copy(update={"source": dataset.source.model_copy(update=below)})


def _converted(
    context: PipelineContext, checked: ResolvedDataset, held_out: HeldOut, writer: ArtifactWriter
) -> list[Result]:
    """Results of the conversion tasks; their parts are in the folder."""
    dataset = checked.dataset
    match dataset.source:
        case RecordsSource() as source:
            parts = [EarlierPart(part) for part in open_earlier(source).parts]
            take = TakeRecords(writer.parts_folder, dataset, held_out)
            return run_resumable(
                writer.folder, f"records {dataset.name}", take, parts, context.execute
            )
        case MtebSource() as source:
            folder = join(writer.working_folder, "staged")
            # Here, where the check has loaded the task.
            run_resumable(
                writer.working_folder,
                f"stage {dataset.name}",
                StageTask(folder),
                [SplitOfTask(source)],
                in_process,
            )
            dataset, pieces = staged(dataset, folder)
            return _of_files(context, dataset, {"path": pieces}, held_out, writer)
    return _of_files(context, dataset, checked.files, held_out, writer)


def _of_files(
    context: PipelineContext,
    dataset: DatasetConfig,
    files: Mapping[str, Sequence[FilePiece]],
    held_out: HeldOut,
    writer: ArtifactWriter,
) -> list[Result]:
    """Results of the conversion tasks of a source of files."""
    match dataset.source:
        case NLISource():
            return joins.convert_premises(context, dataset, files["path"], held_out, writer)
        case BeirSource():
            return joins.convert_judged(context, dataset, files, held_out, writer)
        case ClassesSource() as source:
            folder = join(writer.working_folder, "examples")
            collect = CollectExamples(folder, dataset, held_out, context.seed)
            what = f"examples {dataset.name}"
            pools = run_resumable(
                writer.working_folder, what, collect, files["path"], context.execute
            )
            pool = merge_examples(folder, [pool["pool"] for pool in pools], source)
            further = ""
            if source.label_form == "example":
                find = FindFurtherClasses(folder, dataset, pool, context.seed)
                what = f"classes {dataset.name}"
                done = run_resumable(
                    writer.working_folder, what, find, files["path"], context.execute
                )
                further = merge_further(folder, [one["further"] for one in done])
            examples = ExampleFiles(pool, further)
        case _:
            examples = ExampleFiles()
    task = ConvertRows(writer.parts_folder, dataset, held_out, context.seed, examples)
    what = f"records {dataset.name}"
    return run_resumable(writer.folder, what, task, files["path"], context.execute)


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
    path = getattr(dataset.source, "path", None) or getattr(dataset.source, "task", dataset.name)
    shown = "".join(f"\n  {e['reason']}: {e['row']}" for e in told["examples"][:_EXAMPLES_SHOWN])
    counts = _counts(rejected)
    if rows_out == 0:
        raise DataError(
            f"data set {dataset.name!r} is empty: {path!r} has {rows_in} rows, none usable "
            f"({counts or 'no rows at all'}){shown}"
        )
    bad = sum(count for reason, count in rejected.items() if reason not in NOT_BAD)
    share = getattr(dataset.source, "max_rejected_share", 1.0)
    if bad > share * rows_in:
        raise DataError(
            f"data set {dataset.name!r}: {bad} of {rows_in} rows of {path!r} were rejected "
            f"({counts}), more than source.max_rejected_share {share}; mend "
            f"them or raise the share. For instance:{shown}"
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
