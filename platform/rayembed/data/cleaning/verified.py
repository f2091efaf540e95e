"""Exact verification of candidate pairs: Jaccard similarity of all n-grams of both texts.

The n-grams of candidate rows are sent to the task that compares the pair. So a task holds the rows
of some ten thousand pairs, and rows without candidates never leave their part.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash

from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.config.mining import NearDuplicates
from rayembed.data.cleaning.rows import NEAR_DUPLICATE, shown, write_removed
from rayembed.data.cleaning.signatures import compared, shingles
from rayembed.data.exchange import Buckets, Sent
from rayembed.data.parts import Part, read_table
from rayembed.data.work_items import Result

_PAIRS_COMPARED = 32_768
"""Pairs that one task compares."""

_SIDES = ("first", "second")


@dataclass(frozen=True)
class Candidates:
    """Rows of a part with the tasks that compare them; a row may occur several times."""

    part: Part
    first: int
    """Global position of the part's first row."""
    rows: np.ndarray
    """(n,) int64 row numbers within the part."""
    bucket: np.ndarray
    """(n,) int64 number of the task that compares the row."""

    @property
    def key(self) -> str:
        """Unique name from part, rows and destinations."""
        sent = self.rows.tobytes() + self.bucket.tobytes()
        return f"{self.part.digest}-{xxhash.xxh3_64_hexdigest(sent)}"


@dataclass(frozen=True)
class Pairs:
    """Candidate pairs for one comparison task."""

    number: int
    pairs: np.ndarray
    """(m, 2) int64 global row positions."""

    @property
    def key(self) -> str:
        """Number of the task."""
        return str(self.number)


def split_pairs(
    pairs: np.ndarray, parts: list[Part], firsts: np.ndarray
) -> tuple[list[Pairs], list[Candidates]]:
    """Split pairs into work items, with the rows of each part that they need.

    Args:
        pairs: (m, 2) int64 positions.
        firsts: (parts,) position of each part's first row.
    """
    starts = range(0, len(pairs), _PAIRS_COMPARED)
    items = [Pairs(n, pairs[s : s + _PAIRS_COMPARED]) for n, s in enumerate(starts)]
    bucket = np.repeat(np.arange(len(pairs)) // _PAIRS_COMPARED, 2)
    sent = np.unique(np.stack([pairs.reshape(-1), bucket], axis=1), axis=0)
    edges = np.searchsorted(sent[:, 0], [*firsts[1:], firsts[-1] + parts[-1].rows])
    split = np.split(sent, edges[:-1])
    candidates = [
        Candidates(part, int(first), some[:, 0] - first, some[:, 1])
        for part, first, some in zip(parts, firsts, split, strict=True)
        if len(some)
    ]
    return items, candidates


@dataclass(frozen=True)
class SendCandidates:
    """Task: send the n-grams of a part's candidate rows to the tasks that compare them."""

    config: NearDuplicates

    def __call__(self, item: Candidates) -> Sent:
        """N-grams and excerpts of the rows."""
        distinct, back = np.unique(item.rows, return_inverse=True)
        columns = ["id", "query", "positives", "origin"]
        table = read_table(item.part.path, columns).take(pa.array(distinct))
        texts = compared(table, self.config.of)
        grams = shingles(texts, self.config.ngram)
        sent = pa.table(
            {
                "position": item.first + distinct,
                "grams": [np.unique(grams.of(row)) for row in range(len(distinct))],
                "id": table["id"],
                "query": [shown(text) for text in table["query"].to_pylist()],
                "positive": [shown(texts[0]) for texts in table["positives"].to_pylist()],
                "origin": table["origin"],
                "text": [shown(text) for text in texts],
            },
            schema=_SENT,
        )
        return Sent(sent.take(pa.array(back)), item.bucket, {})


_SHOWN = [
    ("id", pa.string()),
    ("query", pa.string()),
    ("positive", pa.string()),
    ("origin", pa.list_(pa.string())),
    ("text", pa.string()),
]
_SENT = pa.schema([("position", pa.int64()), ("grams", pa.list_(pa.uint64())), *_SHOWN])


@dataclass(frozen=True)
class ComparePairs:
    """Task: select the pairs above the similarity threshold, with excerpts of both rows."""

    folder: str
    threshold: float
    candidates: Buckets

    def __call__(self, item: Pairs) -> Result:
        """Report `pairs` compared and `similar` pairs; `read_similar` reads the latter."""
        rows = pa.concat_tables([_SENT.empty_table(), *self.candidates.read(item.number)])
        positions = rows["position"].to_numpy()
        order = np.argsort(positions)
        places = order[np.searchsorted(positions, item.pairs, sorter=order)]
        grams = rows["grams"].combine_chunks()
        flat, offsets = grams.values.to_numpy(), grams.offsets.to_numpy()
        similarity = np.array(
            [
                jaccard(flat[offsets[a] : offsets[a + 1]], flat[offsets[b] : offsets[b + 1]])
                for a, b in places.tolist()
            ]
        )
        stays = np.flatnonzero(similarity >= self.threshold)
        columns = {"similarity": similarity[stays].astype(np.float32)}
        for side, name in enumerate(_SIDES):
            taken = rows.drop_columns(["grams"]).take(pa.array(places[stays, side]))
            columns |= {f"{name}_{column}": taken[column] for column in taken.column_names}
        write_atomic(_similar_path(self.folder, item.number), parquet_bytes(pa.table(columns)))
        return {"pairs": len(item.pairs), "similar": len(stays)}


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Jaccard similarity of two sets, given as sorted arrays without repetition."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / (len(a) + len(b) - common)


def read_similar(folder: str, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(m, 2) int64 positions of similar pairs and their (m,) float32 similarities.

    Raises:
        ArtifactError: the file is missing or broken.
    """
    names = [f"{side}_position" for side in _SIDES]
    table = read_table(_similar_path(folder, number), [*names, "similarity"])
    pairs = np.stack([table[name].to_numpy() for name in names], axis=1)
    return pairs, table["similarity"].to_numpy()


@dataclass(frozen=True)
class RemovedPairs:
    """Similar pairs of one comparison task, with the row of each that is removed."""

    number: int
    rows: np.ndarray
    """(n,) int64 indices of the similar pairs."""
    side: np.ndarray
    """(n,) int64 side (0 or 1) of the removed row in its pair."""

    @property
    def key(self) -> str:
        """Number of the task."""
        return str(self.number)


@dataclass(frozen=True)
class ListRemoved:
    """Task: write the listing of removed rows, each with its most similar other row."""

    folder: str
    scratch: str

    def __call__(self, item: RemovedPairs) -> Result:
        """Report the number of listed `rows` and some `examples`."""
        similar = read_table(_similar_path(self.scratch, item.number)).take(pa.array(item.rows))
        listed = []
        for side in range(2):
            here, there = _SIDES[side], _SIDES[1 - side]
            rows = similar.filter(pa.array(item.side == side))
            columns = {
                name: rows[f"{here}_{name}"] for name in ("id", "query", "positive", "origin")
            }
            columns["reason"] = pa.array([NEAR_DUPLICATE] * len(rows), pa.string())
            columns["matched"] = rows[f"{there}_id"]
            columns["matched_text"] = rows[f"{there}_text"]
            listed.append(pa.table({**columns, "similarity": rows["similarity"]}))
        name = f"near-duplicates-{item.number}"
        examples = write_removed(self.folder, name, pa.concat_tables(listed))
        return {"rows": len(item.rows), "examples": examples}


def _similar_path(folder: str, number: int) -> str:
    return join(folder, f"{number}.similar.parquet")
