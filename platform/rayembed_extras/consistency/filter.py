"""Apply the consistency filter: keep pairs whose document a small model retrieves for the query
(Nomic Embed v2, §4.2).

Of a row with several positives each is a pair of its own; the row goes with its last one.

folder/working/shards/   vectors cut by shard
folder/working/ranks/    the rank of each row's own documents, a file for each shard
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rayembed.assets.array_files import load_arrays, save_arrays
from rayembed.assets.storage import join
from rayembed.config.data import DatasetConfig
from rayembed.data.engine.artifacts import ArtifactWriter, DatasetArtifact, PipelineContext
from rayembed.data.engine.exchange import Buckets, exchange
from rayembed.data.engine.index import index_chunks
from rayembed.data.engine.parts import Part, PartItem, read_table, remedy, table_of, write_table
from rayembed.data.engine.shuffle import Bucket
from rayembed.data.engine.work_items import Result, run_resumable
from rayembed.data.plan.teacher_scores import scores_of_positives
from rayembed.data.records import Record
from rayembed.data.vectors.embed import embed_parts
from rayembed.data.words import normalised_hash
from rayembed.display.progress import tell
from rayembed.errors import DataError
from rayembed.models.versions import VECTORS
from rayembed.search.tiles import products, tiles_of
from rayembed_extras.consistency.settings import ConsistencyConfig
from rayembed_extras.consistency.shards import (
    NOT_THERE,
    CountLanguages,
    Language,
    NumberedPart,
    RowShard,
    SendVectors,
    Shards,
    gather,
)

log = logging.getLogger(__name__)

CODE_VERSION = 1
"""Code version of the filter; raise it when the same inputs yield other rows."""

INCONSISTENT = "document not among the top k"

_EXAMPLES_OF_PART = 10
_SHOWN_CHARACTERS = 300


def make_filtered(
    context: PipelineContext, dataset: DatasetConfig, parent: DatasetArtifact
) -> DatasetArtifact:
    """Filter the records of a data set, keeping positives among their query's top documents; return
    the new folder.

    A positive that is not stays known as none of the query's negatives. The documents are the
    positives of all rows of the same shard; see `own_ranks`.

    Raises:
        DataError: there are no rows, or none stays.
    """
    config: ConsistencyConfig = getattr(dataset, ConsistencyConfig.kind)
    inputs = {
        "code": CODE_VERSION,
        "settings": config.model_dump(mode="json", exclude={"teacher"}),
        "teacher": context.teacher_loader.fingerprint(config.teacher),
        "vectors": VECTORS,
        "records": parent.fingerprint,
        "seed": context.seed if _are_cut(parent.parts, config.shard_rows) else None,
    }
    writer = ArtifactWriter(context.storage, "filtered", dataset.name, inputs, parent)
    return writer.get_or_make(lambda: _filter(context, config, parent.parts, writer))


def _are_cut(parts: Sequence[Part], shard_rows: int) -> bool:
    """Whether a language has more rows than fit in one shard, so that the seed decides which rows
    compete.
    """
    if sum(part.rows for part in parts) <= shard_rows:
        return False
    rows: Counter[int] = Counter()
    for index in index_chunks(parts):
        languages, counts = np.unique(index.language_hash, return_counts=True)
        rows.update(dict(zip(languages.tolist(), counts.tolist(), strict=True)))
    return max(rows.values()) > shard_rows


def _filter(
    context: PipelineContext,
    config: ConsistencyConfig,
    parts: Sequence[Part],
    writer: ArtifactWriter,
) -> DatasetArtifact:
    name, execute = writer.dataset, context.execute
    total = sum(part.rows for part in parts)
    if not total:
        raise DataError(
            f"data set {name!r} has no rows, so the consistency filter cannot be applied"
        )
    folder, working = writer.folder, writer.working_folder
    items = [NumberedPart(part, number) for number, part in enumerate(parts)]
    teacher = writer.settled(context, config)
    vectors = embed_parts(context, name, parts, teacher)

    counted = run_resumable(folder, f"languages {name}", CountLanguages(), items, execute)
    rows: Counter[Language] = Counter()
    for result in counted:
        rows.update(dict(result["languages"]))
    shards = Shards.for_rows(rows, config.shard_rows, context.seed)
    count = len(shards.languages)
    send, scratch = SendVectors(vectors, shards), join(working, "shards")
    buckets, reports = exchange(scratch, f"shards {name}", send, items, count, execute)
    task = RankShard(working, buckets)
    numbers = [Bucket(number) for number in range(count)]
    ranked = run_resumable(working, f"rank {name}", task, numbers, execute, "gpu or cpu")
    bins = {bin_: sum(r["ranks"][bin_] for r in ranked) for bin_ in ranked[0]["ranks"]}

    positives = [result["positives"] for result in reports]
    ranked_parts, languages, lost = _ranked_parts(working, parts, positives, shards, config.top_k)
    gone = total - sum(language["kept"] for language in languages)
    if gone == total:
        raise DataError(
            f"data set {name!r}: the consistency filter leaves none of its {total} rows, because "
            f"no document ranks high enough for its own query (ranks: {bins}). Raise "
            f"consistency.top_k={config.top_k}, or check that the teacher {config.teacher!r} "
            "suits the data"
        )
    keep = KeepConsistent(writer.parts_folder)
    results = run_resumable(folder, f"filter {name}", keep, ranked_parts, execute)
    log.info("consistency filter %s: %d of %d rows kept", name, total - gone, total)
    return writer.finish(
        results,
        [item for result in results for item in result["parts"]],
        {INCONSISTENT: gone},
        shards=count,
        languages=languages,
        teacher_dtype=teacher.dtype,
        ranks=bins,
        **({"positives_dropped": lost} if lost else {}),
    )


@dataclass(frozen=True)
class RankedPart(PartItem):
    """Work item: a data file, and for each of its positives whether its rank is high enough to
    stay.
    """

    stays: np.ndarray
    """uint8, one bit for each positive as in `np.packbits`: whether it is in the top ranks."""
    shown: tuple[int, ...]
    """Ranks of the first positives of the first removed rows, for examples."""


@dataclass(frozen=True)
class KeepConsistent:
    """Task that keeps the positives in the top ranks, and the rows that have a positive left."""

    folder: str

    def __call__(self, item: RankedPart) -> Result:
        """Run the task; its result has `parts`, counts, and `examples` of removed rows."""
        table = read_table(item.part.path)
        counts = pc.list_value_length(table["positives"]).to_numpy()
        stays = np.unpackbits(item.stays, count=counts.sum()).astype(bool)
        left = np.bincount(np.repeat(np.arange(len(table)), counts)[stays], minlength=len(table))
        rows, parts = left > 0, []
        if rows.any():
            kept = table.filter(pa.array(rows))
            if (left[rows] < counts[rows]).any():
                of_row = np.split(stays, np.cumsum(counts)[:-1])
                kept = table_of(
                    [
                        _with(Record.from_row(row), of_row[number].tolist())
                        for number, row in zip(
                            np.flatnonzero(rows).tolist(), kept.to_pylist(), strict=True
                        )
                    ]
                )
            part = write_table(self.folder, kept)
            parts = [[part.name, part.rows]]
        gone = table.select(["id", "query", "positives", "language"]).filter(pa.array(~rows))
        shown = [
            {
                "reason": INCONSISTENT,
                "id": row["id"],
                "query": row["query"][:_SHOWN_CHARACTERS],
                "document": row["positives"][0][:_SHOWN_CHARACTERS],
                "language": row["language"],
                "rank": rank,
            }
            for row, rank in zip(
                gone.slice(0, _EXAMPLES_OF_PART).to_pylist(), item.shown, strict=True
            )
        ]
        total = {"rows_in": len(table), "rows_out": len(table), "rejected": {}}
        return {**total, "parts": parts, "examples": shown}


def _with(record: Record, stays: Sequence[bool]) -> Record:
    """Copy the record with the kept positives only; removed ones are marked so that they never
    become negatives.
    """
    if all(stays):
        return record

    def left(scores: Sequence[float | None] | None, first: float | None) -> list[float | None]:
        return list(compress(scores or (first, *[None] * (len(stays) - 1)), stays))

    gone = (normalised_hash(t) for t, kept in zip(record.positives, stays, strict=True) if not kept)
    return replace(
        record,
        positives=tuple(compress(record.positives, stays)),
        false_negatives=tuple(dict.fromkeys((*record.false_negatives, *gone))),
        **scores_of_positives(
            left(record.positive_scores, record.positive_score),
            left(record.positive_cross_scores, record.positive_cross_score),
        ),
    )


Ranks = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Part index, row, positive's index within the part, and rank, for some rows' positives; (n,) int64
each, in row order."""


def _ranked_parts(
    folder: str, parts: Sequence[Part], positives: Sequence[int], shards: Shards, top_k: int
) -> tuple[list[RankedPart], list[Mapping[str, Any]], int]:
    """Return the files with their ranks, the kept rows of each language, and the number of
    positives removed from kept rows. Five bytes a positive are in memory.

    Args:
        positives: number of positives of each part.
    """
    starts = np.cumsum([0, *positives])
    ranks = np.zeros(starts[-1], dtype=np.int32)
    first = np.zeros(starts[-1], dtype=np.bool_)
    counted: dict[Language, tuple[int, int]] = {}
    lost = 0
    for number, language in enumerate(shards.languages):
        part, row, text, rank = read_ranks(folder, number)
        place = starts[part] + text
        ranks[place] = rank
        begins = np.flatnonzero(
            (np.diff(part, prepend=NOT_THERE) != 0) | (np.diff(row, prepend=NOT_THERE) != 0)
        )
        first[place[begins]] = True
        left = np.add.reduceat(rank <= top_k, begins, dtype=np.int64)
        lost += int((np.diff(begins, append=len(rank)) - left)[left > 0].sum())
        rows, kept = counted.get(language, (0, 0))
        counted[language] = rows + len(begins), kept + int((left > 0).sum())
    assert ranks.all(), "a row is in no shard"
    shares: list[Mapping[str, Any]] = [
        {"language": language, "rows": rows, "kept": kept, "share": round(kept / rows, 4)}
        for language, (rows, kept) in counted.items()
    ]
    ranked = []
    for one, (start, stop) in zip(parts, pairwise(starts), strict=True):
        own, begins = ranks[start:stop], np.flatnonzero(first[start:stop])
        stays = own <= top_k
        gone = begins[np.add.reduceat(stays, begins, dtype=np.int64) == 0][:_EXAMPLES_OF_PART]
        ranked.append(RankedPart(one, np.packbits(stays), tuple(own[gone].tolist())))
    return ranked, shares, lost


BINS = (1, 2, 3, 5, 10, 20, 50, 100)
"""Upper ranks of the histogram's bins; a last bin holds all higher ranks."""

_ROUNDING = 1e-6
"""Tolerance for equal scores: rounding of a float32 cosine over several hundred dimensions."""

_ROWS_AT_ONCE = 65_536


def own_ranks(shard: RowShard, device: str = "cpu") -> np.ndarray:
    """int64 rank of each row's positives among the documents for the row's query, 1 for the
    best.

    The rank is one more than the number of documents that score higher. Each text counts once; not
    counted are equal scores, the row's other positives, which are correct too, and the query's own
    text, which is among the documents of symmetric pairs.

    Args:
        device: where to count, as in `top_k`.
    """
    row = np.repeat(np.arange(len(shard.row)), np.diff(shard.first))
    limits = _scores(shard, row, shard.place) + np.float32(_ROUNDING)
    # Queries are what is large: they are copied only where a row has several positives.
    queries = shard.queries if len(row) == len(shard.row) else shard.queries[row]
    higher = count_above(queries, limits, shard.documents, device)
    return np.asarray(1 + higher - _no_rivals_above(shard, row, limits))


def count_above(
    queries: np.ndarray, limits: np.ndarray, documents: np.ndarray, device: str = "cpu"
) -> np.ndarray:
    """(Q,) int64 number of documents whose inner product with the query exceeds a limit.

    Args:
        queries: (Q, D), any float type; products are made in float32.
        limits: (Q,).
        documents: (N, D), any float type, read part by part.
        device: where to count, as in `top_k`.
    """
    wanted = torch.from_numpy(queries).to(device).float()
    counts = torch.zeros(len(queries), dtype=torch.int64, device=device)
    above = torch.from_numpy(np.asarray(limits, dtype=np.float32)).to(device)[:, None]
    tiles = tiles_of(wanted.device, wanted.shape[1])
    for start in range(0, len(documents), tiles.chunk):
        part = torch.from_numpy(documents[start : start + tiles.chunk]).to(device)
        for rows, _, scores in products(wanted, part, tiles):
            counts[rows] += (scores > above[rows]).sum(1)
        tell(min(start + tiles.chunk, len(documents)) / len(documents))
    return np.asarray(counts.cpu().numpy())


def _no_rivals_above(shard: RowShard, row: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """(m,) int64 number of texts that score above a limit but do not compete: the row's other
    positives and its query.

    Args:
        row: (m,) row of each positive.
        limits: (m,) score of each positive.
    """
    itself = np.flatnonzero(shard.itself != NOT_THERE)
    count = len(shard.documents)
    excluded = np.concatenate([row * count + shard.place, itself * count + shard.itself[itself]])
    rows, places = np.divmod(np.unique(excluded), count)
    # Scores and limits in one order, row after row, a limit behind the scores that it equals.
    values = np.concatenate([_scores(shard, rows, places), limits])
    is_limit = np.arange(len(values)) >= len(rows)
    order = np.lexsort((is_limit, values, np.concatenate([rows, row])))
    below = np.empty(len(values), dtype=np.int64)
    below[order] = np.cumsum(~is_limit[order])
    ends = np.cumsum(np.bincount(rows, minlength=len(shard.row)))
    return np.asarray(ends[row] - below[len(rows) :])


def _scores(shard: RowShard, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(m,) float32 inner products of m queries with one document each."""
    found = [np.empty(0, dtype=np.float32)]
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = slice(start, start + _ROWS_AT_ONCE)
        queries = shard.queries[rows[some]].astype(np.float32)
        found.append(np.einsum("ij,ij->i", queries, shard.documents[places[some]]))
    return np.concatenate(found)


def histogram(ranks: np.ndarray) -> dict[str, int]:
    """Count ranks in the bins `1`, `2`, `3`, `4-5`, … `51-100`, `>100`."""
    lows = [1, *(high + 1 for high in BINS[:-1])]
    names = [f"{a}" if a == b else f"{a}-{b}" for a, b in zip(lows, BINS, strict=True)]
    counts = np.bincount(np.searchsorted(BINS, ranks), minlength=len(BINS) + 1)
    return dict(zip([*names, f">{BINS[-1]}"], counts.tolist(), strict=True))


@dataclass(frozen=True)
class RankShard:
    """Task that ranks the positives of a shard's rows and stores the ranks for `read_ranks`."""

    folder: str
    buckets: Buckets

    def __call__(self, item: Bucket, device: str = "cpu") -> Result:
        """Run the task; its result has `ranks`, the histogram of the shard's ranks."""
        shard = gather(self.buckets, item.number)
        none = np.empty(0, dtype=np.int64)
        found, rows = {"part": none, "row": none, "text": none, "rank": none}, 0
        if shard is not None:
            rows, several = len(shard.row), np.diff(shard.first)
            within = np.arange(len(shard.place)) - np.repeat(shard.first[:-1], several)
            found = {
                "part": np.repeat(shard.part, several),
                "row": np.repeat(shard.row, several),
                "text": np.repeat(shard.text, several) + within,
                "rank": own_ranks(shard, device),
            }
        save_arrays(_path(self.folder, item.number), **found)
        counts = histogram(found["rank"])
        return {"rows_in": rows, "rows_out": rows, "rejected": {}, "ranks": counts}


def read_ranks(folder: str, number: int) -> Ranks:
    """Read the ranks of all positives of a shard's rows.

    Raises:
        ArtifactError: the file is missing or broken.
    """
    path = _path(folder, number)
    loaded = load_arrays(path, remedy(path))
    return loaded["part"], loaded["row"], loaded["text"], loaded["rank"]


def _path(folder: str, number: int) -> str:
    return join(folder, "ranks", f"{number}.npz")
