"""Rows that become records individually: pairs, and sentences with a similarity."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from rayembed.config.data import DatasetConfig
from rayembed.config.sources import GradedSource, PairsSource, STSSource
from rayembed.data.records import Record
from rayembed.data.sources.building import both_ways, record_of
from rayembed.data.sources.cells import RowError, name_in, number_in, text_in, texts_in
from rayembed.data.sources.kinds import negatives_of
from rayembed.data.sources.tasks import NOT_SIMILAR


def pair_records(
    dataset: DatasetConfig, row: Mapping[str, Any], origin: str, *, json_lists: bool = False
) -> list[Record]:
    """Record of a row with a query and positives; if the settings are symmetric, also one for each
    positive as query.

    The latter have no negatives, as the row's were chosen for its query.

    Args:
        json_lists: as of `texts_in`.

    Raises:
        RowError: the row gives none; the message says why.
    """
    source = dataset.source
    assert isinstance(source, PairsSource)
    language = text_in(row, source.language) if source.language else None
    label = name_in(row, source.label) if source.label else None
    instruction = text_in(row, source.instruction) if source.instruction else None
    record = partial(
        record_of,
        dataset,
        origin=[origin],
        label=label,
        language=language,
        instruction=instruction,
    )
    texts = partial(texts_in, row, json_lists=json_lists)
    positives = texts(source.positive)
    negatives = [text for column in negatives_of(source) for text in texts(column)]
    name = name_in(row, source.id) if source.id else None
    made = record(_query(row, source.query), positives, negatives, name=name)
    if not source.both_directions:
        return [made]
    reverse = [
        record(positive, [made.query], name=name and f"{name}/{number}")
        for number, positive in enumerate(made.positives)
    ]
    return [made, *reverse]


def sts_records(dataset: DatasetConfig, row: Mapping[str, Any], origin: str) -> list[Record]:
    """Two records, one in each direction, of a row with sufficiently similar sentences.

    Raises:
        RowError: `NOT_SIMILAR`, or a cell that is empty or of another type.
    """
    source = dataset.source
    assert isinstance(source, STSSource)
    language = text_in(row, source.language) if source.language else None
    first, second = _query(row, source.first), _query(row, source.second)
    if not first or not second:
        raise RowError("no sentence")
    if number_in(row, source.score) < source.min_score:
        raise RowError(NOT_SIMILAR)
    return both_ways(dataset, first, second, origin=[origin], language=language)


def graded_record(dataset: DatasetConfig, row: Mapping[str, Any], origin: str) -> Record:
    """The record of a row with two sentences and their similarity.

    Raises:
        RowError: the score is outside of the scale, or a cell is empty or of another type.
    """
    source = dataset.source
    assert isinstance(source, GradedSource)
    language = text_in(row, source.language) if source.language else None
    first, second = _query(row, source.first), _query(row, source.second)
    if not first or not second:
        raise RowError("no sentence")
    score = number_in(row, source.score)
    if not source.lowest <= score <= source.highest:
        raise RowError(f"score outside of {source.lowest:g} to {source.highest:g}")
    similarity = (score - source.lowest) / (source.highest - source.lowest)
    made = record_of(dataset, first, [second], origin=[origin], language=language)
    return replace(made, similarity=similarity)


def _query(row: Mapping[str, Any], column: str) -> str | None:
    try:
        return text_in(row, column)
    except RowError:
        return None
