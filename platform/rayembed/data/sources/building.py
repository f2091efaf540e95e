"""Construction of a record from a row's texts, or the reason for its rejection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from rayembed.config.types import has_content
from rayembed.data.records import Negative, Record, reject_reason
from rayembed.data.sources.cells import RowError, is_unicode
from rayembed.data.words import without_copies

if TYPE_CHECKING:
    from rayembed.config.data import DatasetConfig


def record_of(
    dataset: DatasetConfig,
    query: str | None,
    positives: Sequence[str],
    negatives: Sequence[str] = (),
    *,
    origin: Sequence[str],
    rule: str = "given",
    label: str | None = None,
    language: str | None = None,
    instruction: str | None = None,
    name: str | None = None,
) -> Record:
    """Build a record from texts.

    Texts without a visible character, positives equal to the query, and negatives that are the
    query or a positive but for case and white space are dropped, the latter counted. Equal texts
    get equal ids if their class and language are equal, too.

    Args:
        rule: how the negatives were chosen.
        instruction: put in place of the data set's `query_instruction`.
        name: of the record within the data set; None: its content names it.

    Raises:
        RowError: there is none; the message says why.
    """
    reason = reject_reason({"query": query, "positives": positives})
    if reason or query is None:
        raise RowError(reason or "no query")
    kept = [t for t in dict.fromkeys(positives) if t != query and has_content(t)]
    given = [t for t in dict.fromkeys(negatives) if has_content(t)]
    wrong = without_copies(given, (query, *kept))
    told = (instruction or "", label or "", language or "", name or "")
    if not all(map(is_unicode, (query, *kept, *wrong, *told))):
        raise RowError("not valid Unicode")
    named = {"label": label, "language": language}
    known = {name: value for name, value in named.items() if value is not None}
    identity = [query, kept, wrong, instruction, *([known] if known else [])]
    content = json.dumps(identity, ensure_ascii=False).encode()
    return Record(
        id=f"{dataset.name}/{name or xxhash.xxh3_128_hexdigest(content)}",
        query=query,
        positives=tuple(kept),
        negatives=tuple(Negative(text, rule=rule) for text in wrong),
        dataset=dataset.name,
        task=dataset.task,
        query_instruction=instruction or dataset.query_instruction,
        document_instruction=dataset.document_instruction,
        in_batch=dataset.in_batch_negatives,
        label=label,
        language=language,
        origin=tuple(origin),
        negatives_copied=len(given) - len(wrong),
    )


def both_ways(
    dataset: DatasetConfig,
    first: str,
    second: str,
    *,
    origin: Sequence[str],
    language: str | None = None,
) -> list[Record]:
    """Two records of a symmetric pair, one in each direction.

    Raises:
        RowError: as `record_of`.
    """
    return [
        record_of(dataset, query, [positive], origin=origin, language=language)
        for query, positive in ((first, second), (second, first))
    ]
