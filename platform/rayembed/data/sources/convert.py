"""The first step: converts a source's rows to records, cleans, deduplicates and samples them."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rayembed.assets.storage import join
from rayembed.config.document import fingerprint
from rayembed.data.artifacts import (
    ArtifactWriter,
    DatasetArtifact,
    PipelineContext,
    held_out_entry,
)
from rayembed.data.cleaning.clean import clean
from rayembed.data.cleaning.overlap import overlap_identity
from rayembed.data.cleaning.rows import DUPLICATE
from rayembed.data.parts import Part
from rayembed.data.sources.accepted import accept, counts_of, told_of
from rayembed.data.sources.file_rows import Conversion, ResolvedDataset
from rayembed.data.sources.tasks import HeldOut
from rayembed.data.sources.unread import merge_unread

log = logging.getLogger(__name__)

CODE_VERSION = 10
"""Code version of conversion and cleaning; bump when the same inputs yield other records."""


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
                    "repair": True,
                    "clusters": True,
                    "source": {*dataset.source.paths, "max_rejected_share"},
                    "cleaning": {"overlap": {"tasks"}},
                },
            ),
            "source": checked.content,
            "held_out": fingerprint(sorted(map(str, held_out.texts))),
            **({} if part is None else {"held_out_part": part.fingerprint}),
            "overlap": overlap_identity(dataset.cleaning.overlap, context.root),
            "seed": context.seed if dataset.draws_by_seed else None,
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
    named_by = getattr(dataset.source, "id", None)
    if named_by and (equal := cleaned.dropped.get(DUPLICATE)):
        log.warning(
            "data set %s: %d rows have the id of an earlier row (source.id = %r) and are left out, "
            "whatever their texts are; set source.id=null where files count their rows anew",
            *(dataset.name, equal, named_by),
        )
    unread = dict(checked.unread)
    for result in results:  # of rows beyond those that the look has seen
        unread = merge_unread(unread, result.get("unread", {}))
    more: dict[str, Any] = {"unread_columns": unread} if unread else {}
    if part is not None:
        more["held_out"] = held_out_entry(context.storage, part)
    counts = ("negatives_held_out", "negatives_copied", "texts_unread", "texts_without_id")
    for name in counts:
        if lost := sum(result.get(name, 0) for result in results):
            more[name] = lost
    if "negatives_copied" in more:
        log.info(
            "records %s: %d negatives are the query or a positive of their row, but for case and "
            "white space, and are left out",
            *(dataset.name, more["negatives_copied"]),
        )
    if rules := sum((Counter(result.get("pair_rules", {})) for result in results), Counter()):
        more["pair_rules"] = dict(sorted(rules.items()))
        log.info("records %s: pairs by rule: %s", dataset.name, counts_of(more["pair_rules"]))
    if cleaned.averaged:
        more["scores_averaged"] = cleaned.averaged
    if cleaned.negatives:
        more["negatives_overlap"] = cleaned.negatives
    return writer.finish(results, cleaned.parts, cleaned.dropped, removed=cleaned.removed, **more)


def _summary(told: Mapping[str, Any], dropped: Mapping[str, int]) -> str:
    """One-line summary of the conversion; a row may yield several records."""
    rejected, lost = told["rejected"], {why: count for why, count in dropped.items() if count}
    return (
        f"{told['rows_in']:,} rows read, {sum(rejected.values()):,} rejected"
        + (f" ({counts_of(rejected)})" if rejected else "")
        + f", {told['records_made']:,} records"
        + (f", {counts_of(lost)} dropped" if lost else "")
    )
