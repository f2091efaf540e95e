"""Compute MinHash signatures of rows in LSH bands, and pair the rows that share a band.

Two texts share a band of r hash values with the probability s^r, where s is the Jaccard similarity
of their n-grams, and one of b bands with 1 - (1 - s^r)^b (Leskovec, Rajaraman, Ullman: Mining of
Massive Datasets, section 3.4). N-grams of words are hashed (shingles).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
from datasketch import MinHash, MinHashLSH

from rayembed.assets.array_files import load_array, save_array
from rayembed.assets.storage import join
from rayembed.data.cleaning.evaluation_texts import GRAM_FACTOR, grams_of_lengths, hashed_words
from rayembed.data.cleaning.rows import RowsOfPart
from rayembed.data.engine.exchange import Buckets, Sent
from rayembed.data.engine.parts import read_table, remedy
from rayembed.data.engine.shuffle import Bucket
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import mixed, text_hash
from rayembed_extras.near_duplicates.settings import NearDuplicates

_MISSED_RATHER_THAN_COMPARED = (0.02, 0.98)
"""Weights of false positives and false negatives in the choice of bands. A false positive costs one
cheap exact comparison, so few pairs are missed: 2 % at the threshold 0.8, 0.1 % at 0.85."""

_HIGHEST_THRESHOLD = 0.98
"""Highest threshold for choosing bands; above it datasketch returns fewer
than its minimum of two."""

_PARTNERS = 8
"""Preceding rows that each row of a large band is compared with, besides the band's first row."""


def bands(config: NearDuplicates) -> tuple[int, int]:
    """Number of LSH bands, and number of hash values in each band."""
    index = MinHashLSH(
        threshold=min(config.threshold, _HIGHEST_THRESHOLD),
        num_perm=config.permutations,
        weights=_MISSED_RATHER_THAN_COMPARED,
    )
    return int(index.b), int(index.r)


def sides(table: pa.Table, of: str) -> list[list[list[str]]]:
    """Read the texts to compare of each row: the query, all positives, or both as two sides."""
    queries: list[list[str]] = [[text] for text in table["query"].to_pylist()]
    positives: list[list[str]] = table["positives"].to_pylist()
    return {"query": [queries], "positive": [positives], "pair": [queries, positives]}[of]


def grams_of(table: pa.Table, config: NearDuplicates) -> "Shingles":
    """Compute the word n-grams of the texts that are compared, row by row.

    Those of a row's positives are one set, so that a row with an answer that no other row has is
    no copy. Of a pair those of the query and of the positives are apart, as if of other words: a
    row and the same pair the other way round, which is another example, have none in common.
    """
    found, *further = [shingles_of_rows(rows, config.ngram) for rows in sides(table, config.of)]
    for other in further:
        found = found.beside(other)
    return found


@dataclass(frozen=True)
class BandPart:
    """Task that sends the bands of a data file's rows to the buckets in which equal bands meet."""

    config: NearDuplicates
    num_buckets: int

    def __call__(self, item: RowsOfPart) -> Sent:
        """Return the bands with the positions of their rows, and row counts."""
        columns = ["id", "query", "positives"]
        table = read_table(item.part.path, columns).take(pa.array(item.rows))
        keys = band_keys(grams_of(table, self.config), self.config)
        number = keys.shape[1]
        ids = np.array([text_hash(text) for text in table["id"].to_pylist()], dtype=np.int64)
        sent = pa.table(
            {
                "key": keys.reshape(-1),
                "id_hash": np.repeat(ids, number),
                "position": np.repeat(item.first + item.rows, number),
            }
        )
        bucket = keys.reshape(-1).view(np.uint64) % np.uint64(self.num_buckets)
        counts = {"rows_in": len(table), "rows_out": len(table), "rejected": {}}
        return Sent(sent, bucket.astype(np.int64), counts)


def band_keys(found: "Shingles", config: NearDuplicates) -> np.ndarray:
    """(n, bands) int64 band hashes of n texts; equal where two MinHash signatures share a band."""
    number, width = bands(config)
    # Half of each hash is enough for a minimum over at most some thousands.
    short = (found.hashes >> np.uint64(32)).astype(np.uint32)
    sets = np.split(short, found.first[1:-1])
    made = MinHash.generator(
        sets, num_perm=config.permutations, seed=1, hashfunc=int, scheme="affine32"
    )
    keys = np.empty((len(sets), number), dtype=np.int64)
    for row, sketch in enumerate(made):
        values = sketch.hashvalues
        for band in range(number):
            content = values[band * width : (band + 1) * width].tobytes()
            keys[row, band] = xxhash.xxh3_64_intdigest(content, seed=band) - 2**63
    return keys


@dataclass(frozen=True)
class PairsOfBucket:
    """Task that finds the pairs of rows in a bucket that share a band."""

    folder: str
    bands: Buckets

    def __call__(self, item: Bucket) -> Result:
        """Run the task; its result has the number of `pairs`, and `read_pairs` reads the stored
        pairs.
        """
        tables = self.bands.read(item.number)
        pairs = np.empty((0, 2), dtype=np.int64)
        if tables:
            rows = pa.concat_tables(tables)
            columns = (rows[name].to_numpy() for name in ("key", "id_hash", "position"))
            pairs = pairs_of(*columns)
        save_array(_pairs_path(self.folder, item.number), pairs)
        return {"pairs": len(pairs)}


@dataclass(frozen=True)
class SendPairs:
    """Task that sends a bucket's pairs to the tasks that will compare them."""

    folder: str
    tasks: int

    def __call__(self, item: Bucket) -> Sent:
        """Return the pairs and the task for each; copies of a pair from several buckets go to the
        same task.
        """
        pairs = read_pairs(self.folder, item.number)
        key = mixed(pairs[:, 0].view(np.uint64) ^ mixed(pairs[:, 1]))
        table = pa.table({"first": pairs[:, 0], "second": pairs[:, 1]})
        return Sent(table, (key % np.uint64(self.tasks)).astype(np.int64), {})


def pairs_of(key: np.ndarray, id_hash: np.ndarray, position: np.ndarray) -> np.ndarray:
    """(pairs, 2) int64 positions of rows that have a key in common, each pair once.

    All pairs of small groups; in large ones each row is paired with the first and with the eight
    before it in id order, so that pairs depend on content only and are not quadratic in the copies
    of a text. The row with the lower id hash comes first.
    """
    order = np.lexsort((position, id_hash, key))
    key, position = key[order], position[order]
    starts = np.concatenate([[True], key[1:] != key[:-1]]) if len(key) else np.empty(0, bool)
    start = np.flatnonzero(starts)[np.cumsum(starts) - 1]
    found = []
    for back in range(1, _PARTNERS + 1):
        later = np.flatnonzero(np.arange(len(key)) - back >= start)
        found.append(np.stack([position[later - back], position[later]], axis=1))
    far = np.flatnonzero(np.arange(len(key)) - _PARTNERS > start)
    found.append(np.stack([position[start[far]], position[far]], axis=1))
    return np.unique(np.concatenate(found), axis=0)


def read_pairs(folder: str, bucket: int) -> np.ndarray:
    """(pairs, 2) int64 positions of a bucket's candidate pairs.

    Raises:
        ArtifactError: the file is missing or broken.
    """
    path = _pairs_path(folder, bucket)
    return np.asarray(load_array(path, remedy(path)), dtype=np.int64)


def _pairs_path(folder: str, bucket: int) -> str:
    return join(folder, f"{bucket}.pairs.npy")


@dataclass(frozen=True)
class Shingles:
    """Hashed word n-grams of n texts, concatenated."""

    hashes: np.ndarray
    """uint64 hashes, text after text, in text order."""
    first: np.ndarray
    """(n + 1,) int64: text i has `hashes[first[i]:first[i + 1]]`, at least one."""

    def of(self, text: int) -> np.ndarray:
        """Return the n-grams of the text at an index."""
        return self.hashes[self.first[text] : self.first[text + 1]]

    def beside(self, other: "Shingles") -> "Shingles":
        """Append the n-grams of each text's other side, hashed so that they never equal this
        side's.
        """
        sizes = np.stack([np.diff(self.first), np.diff(other.first)], axis=1).reshape(-1)
        side = np.repeat(np.arange(len(sizes)) % 2, sizes)
        hashes = np.empty(len(side), np.uint64)
        hashes[side == 0] = self.hashes
        hashes[side == 1] = mixed(other.hashes ^ GRAM_FACTOR)
        return Shingles(hashes, np.concatenate([[0], np.cumsum(sizes)])[::2])


def shingles_of_rows(rows: Sequence[Sequence[str]], ngram: int) -> Shingles:
    """Compute all word n-grams of each row's texts; every row has at least one."""
    found = shingles([text for texts in rows for text in texts], ngram)
    return Shingles(found.hashes, found.first[np.cumsum([0, *map(len, rows)])])


def shingles(texts: Sequence[str], ngram: int) -> Shingles:
    """Compute all word n-grams of each text; a text with fewer words is a single n-gram."""
    hashes, counts = hashed_words(texts)
    grams, text = grams_of_lengths(hashes, counts, np.minimum(counts, ngram))
    order = np.argsort(text, kind="stable")
    return Shingles(grams[order], np.searchsorted(text[order], np.arange(len(texts) + 1)))
