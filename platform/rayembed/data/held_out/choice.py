"""Choose which rows of a data set are held out, by hashes of the texts of its converted
rows.

Which documents, groups or ids are held out depends on their texts and the seed alone, never on
parts, files or workers. Documents and groups are ranked by a seeded hash; the first ones are held
out, so that only as many as could be chosen are in memory.
"""

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np

from rayembed.assets.storage import below, read_bytes
from rayembed.config.data import DatasetConfig
from rayembed.config.held_out import HeldOut, HeldOutFraction, HeldOutGroups, HeldOutIds
from rayembed.data.engine.artifacts import PipelineContext
from rayembed.data.hashes import NO_HASH, seeded_keys, text_hash
from rayembed.data.sources.rows import lines_of
from rayembed.data.sources.tasks import ConvertedRows, HeldOutRows
from rayembed.errors import ArtifactError, DataError, StorageError

log = logging.getLogger(__name__)

MIN_DOCUMENTS = 10
"""Minimum number of held-out documents: nDCG@10 looks at ten, and with fewer all of them are found.
"""

_NONE = np.empty(0, np.int64)


def choose(
    context: PipelineContext, dataset: DatasetConfig, items: Sequence[ConvertedRows]
) -> HeldOutRows:
    """Choose the held-out rows of the data set by its settings: a share, groups or listed
    ids.

    Raises:
        DataError: fewer than `MIN_DOCUMENTS` documents would be, or the file of ids cannot be had.
    """
    match dataset.held_out:
        case HeldOutFraction() as fraction:
            # As many as are ranked, or all of them: the share is exact in either case.
            ranked = _ranked(items, "documents", fraction.seed, fraction.num_ranked)
            count = min(round(fraction.share * len(ranked)), fraction.max_queries)
            chosen = HeldOutRows(frozenset(ranked[:count].tolist()))
            _check_enough(dataset, chosen, len(ranked))
            return chosen
        case HeldOutGroups(share=float() as share, seed=seed):
            groups = _ranked(items, "groups", seed, None)
            values = groups[: max(round(share * len(groups)), 1)]
        case HeldOutGroups() | HeldOutIds() as listed:
            hashes = set(map(text_hash, listed_values(listed, context.root)))
            values = np.fromiter(hashes, np.int64, len(hashes))
        case None:
            raise AssertionError(
                f"data set {dataset.name!r} has no held_out setting, so no rows can be chosen"
            )
    queries, documents, found = _NONE, _NONE, _NONE
    for item in items:
        index = item.index()
        rows = np.isin(index["groups"], values)
        queries = np.union1d(queries, index["queries"][rows])
        documents = np.union1d(documents, index["documents"][np.repeat(rows, index["positives"])])
        found = np.union1d(found, index["groups"][rows])
    if len(found) < len(values):
        lost = len(values) - len(found)
        log.warning(
            "data set %s: %d of the %d values to hold out occur in no row of column %r",
            *(dataset.name, lost, len(values), dataset.held_out.column),
        )
    chosen = HeldOutRows(frozenset(documents.tolist()), frozenset(queries.tolist()))
    _check_enough(dataset, chosen, None)
    return chosen


def _ranked(
    items: Sequence[ConvertedRows],
    of: Literal["documents", "groups"],
    seed: int,
    most: int | None,
) -> np.ndarray:
    """Return the first `most` distinct hashes of documents or groups in the order of their seeded
    keys.
    """
    merged = _NONE
    for item in items:
        merged = np.setdiff1d(np.union1d(merged, item.index()[of]), [NO_HASH])
        keys = seeded_keys(merged, seed, f"held-out {of}")
        merged = np.asarray(merged[np.argsort(keys, kind="stable")][:most])
    return merged


def listed_values(held_out: HeldOut, root: str) -> list[str]:
    """Return the ids or groups to hold out: values in the settings, or lines of the file that they
    name.

    Args:
        root: folder that a relative path starts from.

    Raises:
        DataError: the file cannot be read, or has no line.
    """
    if not isinstance(held_out, HeldOutIds) or held_out.file is None:
        return list(getattr(held_out, "values", ()))
    place = below(root, held_out.file)
    try:
        lines = lines_of(read_bytes(place))
    except StorageError:
        raise
    except (ArtifactError, UnicodeError) as error:
        raise DataError(
            f"held_out.file {place!r} cannot be read: {error}; name a UTF-8 file with one id on "
            "each line"
        ) from error
    if values := [line.strip() for line in lines if line.strip()]:
        return values
    raise DataError(f"held_out.file {place!r} is empty; it must have one id on each line")


def _check_enough(dataset: DatasetConfig, chosen: HeldOutRows, total: int | None) -> None:
    """Raise when there are too few held-out documents for a meaningful score.

    Args:
        total: distinct documents of which a share is held out; None: they were chosen by rows.
    """
    count = len(chosen.documents)
    if count >= MIN_DOCUMENTS:
        return
    setting = f"data.datasets.{dataset.name}.held_out"
    off = f"set {setting}=null and evaluation.guard=null to train on all rows without scoring any"
    if total is None:
        raise DataError(
            f"data set {dataset.name!r}: its held-out rows have {count} distinct documents, but "
            f"retrieval among fewer than {MIN_DOCUMENTS} documents gives no meaningful score; "
            f"hold out more groups or ids ({setting}), or {off}"
        )
    advice = "it needs more rows"
    if total >= 2 * MIN_DOCUMENTS:
        assert isinstance(dataset.held_out, HeldOutFraction)
        share = -(-100 * MIN_DOCUMENTS // total) / 100
        advice = f"raise {setting}.share to {share:.2f}"
        if dataset.held_out.max_queries < MIN_DOCUMENTS:
            advice = f"raise {setting}.max_queries to at least {MIN_DOCUMENTS}"
    raise DataError(
        f"data set {dataset.name!r} has {total} distinct documents, of which {count} would be "
        f"held out, but retrieval among fewer than {MIN_DOCUMENTS} documents gives no meaningful "
        f"score; {advice}, or {off}"
    )
