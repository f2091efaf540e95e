"""How mining is cut into units of queries and shards of the corpus, and what a cut costs.

A unit reads all vectors of the corpus once, so that the bytes that mining reads fall with the
queries of a unit. Small sources are cut finer, so that a cluster has something to share out, and
where few units search a large corpus, that is cut into shards too, whose results are merged. The
cut depends on numbers of rows alone, and never on the cluster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rayembed.data.engine.parts import ROWS_PER_PART, rows_per_part
from rayembed.search.exact import SHARD_STEP

UNIT_QUERIES = 131_072
"""Queries for which the corpus is read once. A GPU of 400 TFLOP/s is busy with a unit as long as it
takes to read the corpus at 6 GB/s, whatever the width of the vectors."""

LARGE_SOURCE_UNITS = 1024
"""Units beyond which they grow, up to `LARGEST_UNIT_QUERIES`: a billion queries would otherwise
read a corpus of theirs for longer than they multiply."""

LARGEST_UNIT_QUERIES = 4 * UNIT_QUERIES
"""Queries of a unit of a very large source; they and their results (100 each, 768 dimensions) take
1.4 GB in a process."""

PARTS_OF_TEXTS = 4
"""Fewest parts of queries for which candidates' texts are read together; see `parts_of_texts`."""

UNITS = 32
"""Units that small sources are cut into, about, as far as they have parts and the corpus shards."""

SHARD_DOCUMENTS = 8 * SHARD_STEP
"""Fewest documents of a shard. The results of a unit in it (100 for each query, 12 bytes each,
written and read) are then a fifth of the vectors that are read (768 dimensions), or less."""


@dataclass(frozen=True)
class Shard:
    """Documents of the corpus by id."""

    first: int
    stop: int | None
    """First id behind the shard; None: the last shard, to the end of the corpus."""


@dataclass(frozen=True)
class MiningCut:
    """Units of consecutive parts, and the shards that each of them searches."""

    units: tuple[range, ...]
    """Numbers of the parts of each unit."""
    shards: tuple[Shard, ...]


def cut_mining(rows: Sequence[int], documents: int, *, indexed: bool = False) -> MiningCut:
    """Cut of parts of queries with so many rows, to be mined from so many documents.

    Args:
        documents: about; what a few less or more change is the size of the last shard.
        indexed: every shard has an index of its own that all units use, so that shards are as small
            as an index should be.
    """
    parts = len(rows)
    if parts == 0:
        return MiningCut((), (Shard(0, None),))
    of_part = max(ROWS_PER_PART, *rows)
    most = max(
        UNIT_QUERIES // of_part,
        min(LARGEST_UNIT_QUERIES // of_part, parts // LARGE_SOURCE_UNITS),
        1,
    )
    whole = -(-parts // most)
    shards = max(documents // SHARD_DOCUMENTS, 1)
    if not indexed:
        shards = min(shards, max(UNITS // whole, 1))
    at_once = max(1, min(most, round(parts * (1 if indexed else shards) / UNITS)))
    edges = [number * documents // shards // SHARD_STEP * SHARD_STEP for number in range(shards)]
    return MiningCut(
        tuple(range(first, min(first + at_once, parts)) for first in range(0, parts, at_once)),
        tuple(Shard(*ends) for ends in zip(edges, [*edges[1:], None], strict=True)),
    )


def parts_of_texts(parts: int) -> int:
    """Parts of queries for which candidates' texts are read together, in a unit of so many.

    The negatives of one part are spread over nearly all parts of a corpus, so that fewer would read
    all texts more often. With 7 negatives of a kilobyte, the texts of four parts take some 300 MB.
    """
    return max(PARTS_OF_TEXTS, parts // 4)


@dataclass(frozen=True)
class MiningCost:
    """What an exact search costs all workers together."""

    products: int
    """Products of a query with a document."""
    bytes_read: int
    """Vectors of queries and documents, and results of shards, in bytes."""
    bytes_written: int
    """Results of shards."""
    units: int
    """Units that workers share out, searches of shards included."""
    text_parts_read: int
    """Parts whose texts are read for negatives, if these are spread evenly over the corpus."""


def cost_of(
    cut: MiningCut, rows: Sequence[int], documents: int, width: int, k: int, negatives: int = 7
) -> MiningCost:
    """Cost of a cut by one teacher.

    Args:
        width: of the vectors, of 2 bytes a number.
        k: results of each query.
        negatives: of each query.
    """
    queries = sum(rows)
    parts, text_parts = documents / rows_per_part(documents), 0.0
    for unit in cut.units:
        together = parts_of_texts(len(unit))
        for first in range(unit.start, unit.stop, together):
            wanted = negatives * sum(rows[first : min(first + together, unit.stop)])
            text_parts -= parts * math.expm1(-wanted / parts)
    found = 12 * queries * k * len(cut.shards) if len(cut.shards) > 1 else 0
    return MiningCost(
        products=queries * documents,
        bytes_read=2 * width * (len(cut.units) * documents + len(cut.shards) * queries) + found,
        bytes_written=found,
        units=len(cut.units) * (len(cut.shards) + (len(cut.shards) > 1)),
        text_parts_read=round(text_parts),
    )
