"""First preparation step: convert a source's rows to records, then clean, deduplicate and sample
them.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rayembed.assets.names import check_inside
from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.config.data_steps import data_steps
from rayembed.config.document import fingerprint
from rayembed.data.cleaning.clean import clean
from rayembed.data.cleaning.overlap import overlap_identity
from rayembed.data.cleaning.rows import DUPLICATE
from rayembed.data.engine.artifacts import (
    ArtifactWriter,
    DatasetArtifact,
    PipelineContext,
    held_out_entry,
)
from rayembed.data.engine.parts import Part
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.sources.file_rows import Conversion, ResolvedDataset
from rayembed.data.sources.tasks import (
    ConvertedRows,
    HeldOut,
    RecordWriter,
    accept,
    counts_of,
    summary_of,
)

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Code version of conversion and cleaning; raise it when the same inputs yield other records."""


@dataclass(frozen=True)
class LeaveOut:
    """Task: write the converted rows of a piece, leaving out held-out rows and rows with a held-out
    text.
    """

    folder: str
    held_out: HeldOut
    source_bytes: int
    """Size of the source, which decides the rows of a part."""

    def __call__(self, item: ConvertedRows) -> Result:
        """Run the task; its result has `parts`, counts and examples of rejected rows."""
        writer = RecordWriter(self.folder, self.held_out, self.source_bytes)
        for records in item.rows():
            first = records[0]
            writer.take(records, {"query": first.query, "positives": list(first.positives)})
        return writer.finish()


def chooses_rows(dataset: DatasetConfig) -> bool:
    """Whether held-out rows are chosen among the data set's own converted rows, instead of being
    taken over from an earlier job.
    """
    return dataset.held_out is not None and dataset.source.held_out_folder() is None


def make_converted(context: PipelineContext, checked: ResolvedDataset) -> DatasetArtifact:
    """Make or reuse the folder with the records of all rows, among which the held-out rows are then
    chosen.

    Raises:
        DataError: no usable row, or more bad ones than `max_rejected_share`.
    """
    dataset = checked.dataset
    later = dict.fromkeys(("cleaning", "num_samples", "sample_share"), True)
    column = getattr(dataset.held_out, "column", None)
    inputs = {**_inputs(context, checked, later), "column": column}
    writer = ArtifactWriter(context.storage, "converted", dataset.name, inputs)

    def make() -> DatasetArtifact:
        conversion = Conversion(context, dataset, checked.files, HeldOut(), writer, indexed=True)
        results = dataset.source.convert(conversion)
        accept(dataset, summary_of(results))
        parts = [part for result in results for part in result["parts"]]
        indices = [[result["index"], len(result["parts"])] for result in results]
        return writer.finish(results, parts, indices=indices)

    made = writer.get_or_make(make)
    accept(dataset, made.manifest)
    return made


def converted_rows(converted: DatasetArtifact) -> list[ConvertedRows]:
    """List the converted rows as work items, one for each piece of the source."""
    parts, folder = iter(converted.parts), join(converted.folder, "parts")
    where = f"the manifest of {converted.folder!r}"
    return [
        ConvertedRows(tuple(islice(parts, number)), join(folder, check_inside(name, where)))
        for name, number in converted.manifest["indices"]
    ]


def rejected_before(converted: DatasetArtifact) -> Result:
    """Return the counts of rows that the conversion rejected, in the form of a task's result."""
    manifest = converted.manifest
    return {
        "rows_in": sum(manifest["rejected"].values()),
        "rows_used": 0,
        "rows_out": 0,
        "rejected": manifest["rejected"],
        "examples": manifest["examples"],
        "parts": [],
    }


def _inputs(
    context: PipelineContext, checked: ResolvedDataset, later: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings and versions that determine the converted records, for the folder's
    fingerprint.

    Args:
        later: settings that are read after conversion.
    """
    dataset = checked.dataset
    steps = dict.fromkeys(("held_out", *(step.kind for step in data_steps())), True)
    unnamed = {"source": {*dataset.source.paths, "max_rejected_share"}}
    return {
        "code": CODE_VERSION,
        "settings": dataset.model_dump(mode="json", exclude={**steps, **unnamed, **later}),
        "source": checked.content,
        "seed": context.seed if dataset.draws_by_seed else None,
    }


def make_records(
    context: PipelineContext,
    checked: ResolvedDataset,
    held_out: HeldOut,
    part: DatasetArtifact | None = None,
) -> DatasetArtifact:
    """Make or reuse the folder of a data set's records, converted, cleaned and without held-out
    rows.

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
            **_inputs(context, checked, {"cleaning": {"overlap": {"tasks"}}}),
            "held_out": fingerprint(sorted(map(str, held_out.texts))),
            **({} if part is None else {"held_out_part": part.fingerprint}),
            "overlap": overlap_identity(dataset.cleaning.overlap, context.root),
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
    more: dict[str, Any] = {}
    if chooses_rows(dataset):
        converted = make_converted(context, checked)
        more["converted"] = converted.fingerprint
        size = sum(piece.size for piece in checked.files.get("path", ()))
        task = LeaveOut(writer.parts_folder, held_out, size)
        what = f"leave held-out rows out of {dataset.name}"
        items = converted_rows(converted)
        kept = run_resumable(writer.folder, what, task, items, context.execute)
        results = [rejected_before(converted), *kept]
    else:
        conversion = Conversion(context, dataset, checked.files, held_out, writer)
        results = dataset.source.convert(conversion)
    told = summary_of(results)
    accept(dataset, told)
    made = [item for result in results for item in result["parts"]]
    parts = [Part(join(writer.parts_folder, name), rows) for name, rows in made]
    cleaned = clean(context, dataset, writer, parts)
    log.info("records %s: %s", dataset.name, _summary(told, cleaned.dropped))
    named_by = getattr(dataset.source, "id", None)
    if named_by and (equal := cleaned.dropped.get(DUPLICATE)):
        log.warning(
            "data set %s: %d rows have the id of an earlier row (source.id = %r) and are left "
            "out, even if their texts differ; set source.id=null if each file numbers its rows "
            "from the start",
            *(dataset.name, equal, named_by),
        )
    if checked.unread:
        more["unread_columns"] = [{"column": name} for name in checked.unread]
    if part is not None:
        more["held_out"] = held_out_entry(context.storage, part)
    counts = ("negatives_held_out", "negatives_copied", "texts_unread", "texts_without_id")
    for name in counts:
        if lost := sum(result.get(name, 0) for result in results):
            more[name] = lost
    if "negatives_copied" in more:
        log.info(
            "records %s: %d hard negatives equal the query or a positive of their row, apart from "
            "case and white space, and are left out",
            *(dataset.name, more["negatives_copied"]),
        )
    if rules := sum((Counter(result.get("pair_rules", {})) for result in results), Counter()):
        more["pair_rules"] = dict(sorted(rules.items()))
        log.info(
            "records %s: number of pairs that each rule made: %s",
            dataset.name,
            counts_of(more["pair_rules"]),
        )
    if cleaned.averaged:
        more["scores_averaged"] = cleaned.averaged
    if cleaned.negatives:
        more["negatives_overlap"] = cleaned.negatives
    return writer.finish(results, cleaned.parts, cleaned.dropped, removed=cleaned.removed, **more)


def _summary(told: Mapping[str, Any], dropped: Mapping[str, int]) -> str:
    """Summarise the conversion in one line: rows read, rejected and dropped, and records made."""
    rejected, lost = told["rejected"], {why: count for why, count in dropped.items() if count}
    return (
        f"{told['rows_in']:,} rows read, {sum(rejected.values()):,} rejected"
        + (f" ({counts_of(rejected)})" if rejected else "")
        + f", {told['records_made']:,} records"
        + (f", {counts_of(lost)} dropped" if lost else "")
    )
