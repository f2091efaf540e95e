"""Verify candidate pairs: compute the exact Jaccard similarity of the n-grams of both rows.

The n-grams of candidate rows are sent to the task that compares the pair. So a task holds the rows
of some ten thousand pairs, and rows without candidates never leave their part.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from rayembed.assets.array_files import load_array, save_array
from rayembed.assets.arrow_files import parquet_bytes
from rayembed.assets.storage import join, write_atomic
from rayembed.data.cleaning.rows import shown, write_removed
from rayembed.data.engine.exchange import Buckets, Sent
from rayembed.data.engine.parts import PartItem, read_table, remedy
from rayembed.data.engine.shuffle import Bucket
from rayembed.data.engine.work_items import Result
from rayembed_extras.near_duplicates.settings import NearDuplicates
from rayembed_extras.near_duplicates.signatures import grams_of, sides

_SIDES = ("first", "second")


@dataclass(frozen=True)
class SendTexts:
    """Task that requests from the data files the rows that one comparison task needs."""

    folder: str
    pairs: Buckets
    firsts: np.ndarray
    """(parts,) int64 global position of each part's first row."""

    def __call__(self, item: Bucket) -> Sent:
        """Return the positions of the needed rows, addressed to their data files; store the pairs
        in a file.
        """
        sent = self.pairs.read(item.number)
        pairs = np.empty((0, 2), np.int64)
        if sent:
            rows = pa.concat_tables(sent)
            both = (rows[name].to_numpy() for name in _SIDES)
            pairs = np.unique(np.stack(list(both), axis=1), axis=0)
        save_array(_compared_path(self.folder, item.number), pairs)
        position = np.unique(pairs)
        table = pa.table({"position": position, "task": np.full(len(position), item.number)})
        return Sent(table, np.searchsorted(self.firsts, position, side="right") - 1, {})


def _compared_path(folder: str, number: int) -> str:
    return join(folder, f"{number}.compared.npy")


@dataclass(frozen=True)
class CandidatePart(PartItem):
    """Work item: a data file with rows that comparison tasks need."""

    number: int
    first: int
    """Global position of the part's first row."""


@dataclass(frozen=True)
class SendCandidates:
    """Task that sends the n-grams of a data file's requested rows to the comparison tasks."""

    config: NearDuplicates
    rows: Buckets

    def __call__(self, item: CandidatePart) -> Sent:
        """Return n-grams and excerpts of the requested rows, addressed to the tasks that
        need them.
        """
        asked = self.rows.read(item.number)
        if not asked:
            return Sent(_SENT.empty_table(), np.empty(0, np.int64), {})
        wanted = pa.concat_tables(asked)
        rows, task = wanted["position"].to_numpy() - item.first, wanted["task"].to_numpy()
        distinct, back = np.unique(rows, return_inverse=True)
        columns = ["id", "query", "positives", "origin"]
        table = read_table(item.part.path, columns).take(pa.array(distinct))
        rows_of_texts = zip(*sides(table, self.config.of), strict=True)
        texts = ("\n".join(text for side in row for text in side) for row in rows_of_texts)
        grams = grams_of(table, self.config)
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
        return Sent(sent.take(pa.array(back)), task, {})


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
    """Task that selects the pairs above the similarity threshold, with excerpts of both rows."""

    folder: str
    threshold: float
    candidates: Buckets

    def __call__(self, item: Bucket) -> Result:
        """Compare candidate pairs exactly; count the `pairs` compared and the `similar` ones, which
        `read_similar` reads.
        """
        rows = pa.concat_tables([_SENT.empty_table(), *self.candidates.read(item.number)])
        path = _compared_path(self.folder, item.number)
        pairs = load_array(path, remedy(path))
        positions = rows["position"].to_numpy()
        order = np.argsort(positions)
        places = order[np.searchsorted(positions, pairs, sorter=order)]
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
        return {"pairs": len(pairs), "similar": len(stays)}


def jaccard(a: np.ndarray, b: np.ndarray) -> float:
    """Compute the Jaccard similarity of two sets, given as sorted arrays without repetitions."""
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
    """Work item: similar pairs of one comparison task, with the removed row of each pair."""

    number: int
    rows: np.ndarray
    """(n,) int32 indices of the similar pairs."""
    side: np.ndarray
    """(n,) int8 side (0 or 1) of the removed row in its pair."""

    @property
    def key(self) -> str:
        """Number of the comparison task."""
        return str(self.number)


@dataclass(frozen=True)
class ListRemoved:
    """Task that writes the list of removed rows, each with its most similar other row."""

    folder: str
    scratch: str

    def __call__(self, item: RemovedPairs) -> Result:
        """Run the task; its result has the number of listed `rows` and some `examples`."""
        similar = read_table(_similar_path(self.scratch, item.number)).take(pa.array(item.rows))
        listed = []
        for side in range(2):
            here, there = _SIDES[side], _SIDES[1 - side]
            rows = similar.filter(pa.array(item.side == side))
            columns = {
                name: rows[f"{here}_{name}"] for name in ("id", "query", "positive", "origin")
            }
            columns["reason"] = pa.array([NearDuplicates.reason] * len(rows), pa.string())
            columns["matched"] = rows[f"{there}_id"]
            columns["matched_text"] = rows[f"{there}_text"]
            listed.append(pa.table({**columns, "similarity": rows["similarity"]}))
        name = f"near-duplicates-{item.number}"
        examples = write_removed(self.folder, name, pa.concat_tables(listed))
        return {"rows": len(item.rows), "examples": examples}


def _similar_path(folder: str, number: int) -> str:
    return join(folder, f"{number}.similar.parquet")
