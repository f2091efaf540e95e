"""The gate `--index-ready`: whether an index serves queries of a version of a model."""

from typing import Any

from rayembed.errors import RayembedError
from rayembed.registry.gates import Check
from rayembed.registry.indexes import ReadyQuestion
from rayembed_extras.index_upgrades.switch import open_index
from rayembed_extras.indexing.manifest import TableRecord


def index_ready(question: ReadyQuestion) -> Check:
    """Check that an index serves queries of a version; see `rayembed.registry.indexes`.

    The store must answer, and its name refer to the recorded table.
    """
    name, reference = question.name, question.reference
    try:
        index = open_index(question.storage, name)
    except RayembedError as error:
        note = f"{error} (rayembed index --documents PATH --model {reference} --name {name})"
        return _check(question, holds=False, note=note)
    index.store.close()
    record = index.record
    if record.made_by.weights != question.weights:
        return _adapted(question, record)
    if record.complete:
        return _check(question, holds=True, note=f"{record.table} was made by this version")
    note = f"{record.table} is not complete: run rayembed index --name {name} again"
    return _check(question, holds=False, note=note)


def _adapted(question: ReadyQuestion, record: TableRecord) -> Check:
    """Check the adapter of a version for another model's table."""
    upgrade = f"rayembed upgrade --name {question.name} --model {question.reference} --road"
    made = f"{record.table} was made by {record.made_by.reference}"
    entry: dict[str, Any] = (record.adapter or {}).get(question.weights, {})
    if not entry:
        note = f"{made}, and this version has no adapter: {upgrade} backfill, or {upgrade} adapter "
        return _check(question, holds=False, note=f"{note}with --compatible 0.97 here")
    if entry.get("share") is None:
        note = f"{made}, and the adapter's share of recall was not measured: {upgrade} adapter"
        return _check(question, holds=False, note=note)
    value, low, high = (100 * float(number) for number in entry["share"])
    of = "recall@10" if entry.get("judged") else "the first 10 documents"
    kind = entry.get("kind")
    what = "its queries as they are keep" if kind == "identity" else f"the adapter {kind} keeps"
    kept = f"{what} {value:.1f} % ({low:.1f} to {high:.1f}) of {of}"
    if question.compatible is None:
        note = f"{made}; {kept}: allow it by --compatible 0.97, or {upgrade} backfill"
        return _check(question, holds=False, note=note)
    holds = low >= 100 * question.compatible
    note = f"{made}; {kept}, the lower end of which counts" + (
        "" if holds else f": {upgrade} backfill"
    )
    return _check(question, holds=holds, note=note, figure=low / 100)


def _check(
    question: ReadyQuestion, *, holds: bool, note: str, figure: float | None = None
) -> Check:
    limit = None if figure is None else question.compatible
    return Check(f"index {question.name} is ready", figure, limit, holds=holds, note=note)
