"""Search the corpus for candidates of hard negatives: tasks that index shards of the corpus, search
them, and measure recall.

Where a large corpus is searched by few units, each searches one shard after the other on as many
workers, and the results are merged. They are those of one search bit for bit on a CPU, because
shards are cut where it cuts too, and every list keeps the k best by falling score and rising id.

Q queries, k candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from rayembed.assets.array_files import load_array, load_arrays, save_array, save_arrays
from rayembed.assets.local_copies import read_copied
from rayembed.assets.storage import file_name, join
from rayembed.config.mining import MiningSearch
from rayembed.data.engine.index import read_column
from rayembed.data.engine.parts import ROWS_PER_PART, Part, remedy
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import seeded_keys
from rayembed.data.mining.corpus import CorpusFiles, open_corpus
from rayembed.data.vectors.embed import Vectors
from rayembed.search.exact import SHARD_STEP, TopK, merged_top_k, top_k, top_k_of_blocks
from rayembed.search.order import NO_RESULT

UNIT_QUERIES = 131_072
"""Queries for which the corpus is read once. A GPU of 400 TFLOP/s is busy with a unit as long as it
takes to read the corpus at 6 GB/s, whatever the width of the vectors."""

LARGE_SOURCE_UNITS = 1024
"""Number of units above which units grow, up to `LARGEST_UNIT_QUERIES`: a billion queries would
otherwise read a corpus of theirs for longer than they multiply."""

LARGEST_UNIT_QUERIES = 4 * UNIT_QUERIES
"""Queries of a unit of a very large source; they and their results (100 each, 768 dimensions) take
1.4 GB in a process."""

PARTS_OF_TEXTS = 4
"""Minimum number of parts whose candidates' texts are read together; see `parts_of_texts`."""

UNITS = 32
"""Approximate number of units of a small source, as far as its parts and the corpus allow."""

SHARD_DOCUMENTS = 8 * SHARD_STEP
"""Minimum number of documents in a shard. The results of a unit in it (100 for each query, 12 bytes
each, written and read) are then a fifth of the vectors that are read (768 dimensions), or less."""


@dataclass(frozen=True)
class Shard:
    """A range of document ids of the corpus."""

    first: int
    stop: int | None
    """First id after the shard; None: the last shard, to the end of the corpus."""


@dataclass(frozen=True)
class MiningCut:
    """Division of the mining work into units of consecutive parts and into shards of the corpus."""

    units: tuple[range, ...]
    """Part numbers of each unit."""
    shards: tuple[Shard, ...]


def cut_mining(rows: Sequence[int], documents: int, *, indexed: bool = False) -> MiningCut:
    """Divide the parts of queries into units of work, and the documents of the corpus into
    shards.

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
    """Number of Parquet parts whose candidates' texts are read together, for a mining unit of the
    given number of parts.

    The negatives of one part are spread over nearly all parts of a corpus, so that fewer would read
    all texts more often. With 7 negatives of a kilobyte, the texts of four parts take some 300 MB.
    """
    return max(PARTS_OF_TEXTS, parts // 4)


RECALL_QUERIES = 1024
"""Number of queries by which recall is measured: a recall of 0.95 is measured to within 0.01."""

_RECALL_PARTS = 16
"""Number of parts that these queries are sampled from."""

_NEAREST = 10
"""Number of best candidates whose recall is logged in addition to that of all."""


@dataclass(frozen=True)
class MineUnit:
    """Work item: consecutive parts of queries, which are mined in one pass over the corpus."""

    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        """Content hash of the unit's parts, which identifies the work item."""
        if len(self.parts) == 1:
            return self.parts[0].digest
        return xxhash.xxh3_128_hexdigest("".join(part.digest for part in self.parts).encode())


@dataclass(frozen=True)
class SearchItem:
    """Work item: search one shard for the candidates of a unit's queries."""

    unit: MineUnit
    shard: int

    @property
    def key(self) -> str:
        """Unique name from the unit's key and the number of the shard."""
        return f"{self.unit.key}-{self.shard}"


@dataclass(frozen=True)
class IndexItem:
    """Work item: index one shard with the vectors of one teacher."""

    vectors: Vectors
    shard: int

    @property
    def key(self) -> str:
        """Unique name from the folder of the teacher's vectors and the number of the shard."""
        return f"{file_name(self.vectors.folder)}-{self.shard}"


@dataclass(frozen=True)
class CorpusSearch:
    """Candidate search for units of queries: the corpus, its shards, the search method and the
    number of candidates.
    """

    folder: str
    """Scratch folder of indexes and of search results in shards."""
    files: CorpusFiles
    shards: tuple[Shard, ...]
    search: MiningSearch
    candidates: int
    """Number k of candidates for each query."""
    seed: int

    @property
    def in_shards(self) -> bool:
        """Whether separate tasks search the shards first, so that `search_unit` only merges their
        results.
        """
        return len(self.shards) > 1 and not self.search.approximate

    def search_unit(self, unit: MineUnit, vectors: Vectors, device: str) -> list[TopK]:
        """Search candidates for the queries of a unit with one teacher; returns scores and ids for
        each part.
        """
        corpus = open_corpus(self.files)
        if self.in_shards:
            return self._merged(unit, vectors)
        queries = [vectors.queries(part) for part in unit.parts]
        if self.search.approximate:
            return self.approximate(queries, vectors)
        return top_k_of_blocks(
            queries, corpus.shards(vectors), self.candidates, device, of=corpus.num_documents
        )

    def _merged(self, unit: MineUnit, vectors: Vectors) -> list[TopK]:
        best: TopK | None = None
        for number in range(len(self.shards)):
            path = self.path_of_results(unit, number, vectors)
            loaded = load_arrays(path, remedy(path))
            found = loaded["scores"], loaded["ids"]
            best = found if best is None else merged_top_k(best, found)
        assert best is not None
        edges = np.cumsum([part.rows for part in unit.parts])[:-1]
        return list(zip(np.split(best[0], edges), np.split(best[1], edges), strict=True))

    def approximate(self, queries: Sequence[np.ndarray], vectors: Vectors) -> list[TopK]:
        """Search the indexes of all shards for the candidates of each block of queries."""
        shape = [(len(block), self.candidates) for block in queries]
        best: list[TopK] = [
            (np.full(one, -np.inf, np.float32), np.full(one, NO_RESULT)) for one in shape
        ]
        for number, shard in enumerate(self.shards):
            path = self.path_of_index(number, vectors)
            index = read_copied(path, partial(load_array, remedy=remedy(path)))
            if not len(index):  # texts that stand in several parts leave the last shards empty
                continue
            opened = self.search.open(index.tobytes())
            for place, block in enumerate(queries):
                scores, ids = self.search.find(opened, block, self.candidates)
                ids[ids != NO_RESULT] += shard.first
                best[place] = merged_top_k(best[place], (scores, ids))
        return best

    def path_of_results(self, unit: MineUnit, shard: int, vectors: Vectors) -> str:
        """Path of the file with a unit's search results in one shard."""
        name = f"{unit.key}-{shard}-{file_name(vectors.folder)}.npz"
        return join(self.folder, "found", name)

    def path_of_index(self, shard: int, vectors: Vectors) -> str:
        """Path of the file with one shard's index of a teacher's vectors."""
        return join(self.folder, "index", f"{file_name(vectors.folder)}-{shard}.npy")


@dataclass(frozen=True)
class SearchShard:
    """Task: search one shard with every teacher for the candidates of a unit's queries."""

    search: CorpusSearch
    teachers: tuple[Vectors, ...]

    def __call__(self, item: SearchItem, device: str = "cpu") -> Result:
        """Run the task; its result is empty, since the candidates are written to files."""
        shard, corpus = self.search.shards[item.shard], open_corpus(self.search.files)
        for vectors in self.teachers:
            found = top_k_of_blocks(
                [vectors.queries(part) for part in item.unit.parts],
                corpus.shards(vectors, shard.first, shard.stop),
                self.search.candidates,
                device,
                first_id=shard.first,
                of=(corpus.num_documents if shard.stop is None else shard.stop) - shard.first,
            )
            scores, ids = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
            path = self.search.path_of_results(item.unit, item.shard, vectors)
            save_arrays(path, scores=scores, ids=ids)
        return {}


@dataclass(frozen=True)
class IndexShard:
    """Task: build the index of one shard from one teacher's vectors."""

    search: CorpusSearch

    def __call__(self, item: IndexItem) -> Result:
        """Build and save the index; return the number of its `documents`."""
        shard, search = self.search.shards[item.shard], self.search
        vectors = open_corpus(search.files).shards(item.vectors, shard.first, shard.stop)
        documents = [np.empty((0, 0), np.float16), *vectors][1:]
        made = search.search.index(np.concatenate(documents), search.seed) if documents else b""
        save_array(search.path_of_index(item.shard, item.vectors), np.frombuffer(made, np.uint8))
        return {"documents": sum(map(len, documents))}


@dataclass(frozen=True)
class MeasureRecall:
    """Task: measure the recall of an approximate search by comparing it with exact search."""

    search: CorpusSearch
    teachers: tuple[Vectors, ...]

    def __call__(self, item: MineUnit, device: str = "cpu") -> Result:
        """Return the `recall` of each teacher's search, over a sample of the queries."""
        return {"recall": [self._of(item.parts, one, device) for one in self.teachers]}

    def _of(self, parts: Sequence[Part], vectors: Vectors, device: str) -> dict[str, Any]:
        """Measure one teacher's recall over a sample of queries: the share of exact candidates that
        the approximate search finds.
        """
        some = np.unique(np.linspace(0, len(parts) - 1, _RECALL_PARTS).astype(int))
        sample = []
        for part in (parts[number] for number in some if parts[number].rows):
            keys = seeded_keys(read_column([part], "id_hash"), self.search.seed, "recall")
            rows = np.sort(np.argsort(keys, kind="stable")[: RECALL_QUERIES // _RECALL_PARTS])
            sample.append(vectors.queries(part)[rows])
        queries = np.concatenate(sample)
        documents, candidates = open_corpus(self.search.files), self.search.candidates
        exact = top_k(queries, documents.shards(vectors), candidates, device)[1]
        found = self.search.approximate([queries], vectors)[0][1]
        nearest = min(_NEAREST, candidates)
        return {
            "queries": len(queries),
            "candidates": candidates,
            "recall": _share(exact, found),
            f"recall_of_{nearest}_best": _share(exact[:, :nearest], found),
        }


def _share(exact: np.ndarray, found: np.ndarray) -> float:
    """Share of the exact search's ids that the other search found for the same query."""
    wanted = exact != NO_RESULT
    met = [np.isin(one, other) for one, other in zip(exact, found, strict=True)]
    return round(float((np.array(met) & wanted).sum() / max(wanted.sum(), 1)), 6)
