"""The search of mining: tasks that index shards of the corpus, search them, and measure recall.

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
from rayembed.data.engine.parts import Part, remedy
from rayembed.data.engine.work_items import Result
from rayembed.data.hashes import seeded_keys
from rayembed.data.mining.corpus import CorpusFiles, open_corpus
from rayembed.data.mining.cut import Shard
from rayembed.data.vectors.embed import Vectors
from rayembed.search.exact import TopK, merged_top_k, top_k, top_k_of_blocks
from rayembed.search.order import NO_RESULT

RECALL_QUERIES = 1024
"""Queries by which recall is measured: a recall of 0.95 is told to a hundredth or better."""

_RECALL_PARTS = 16
"""Parts that these queries are taken from."""

_NEAREST = 10
"""Best candidates whose recall is told beside that of all."""


@dataclass(frozen=True)
class MineUnit:
    """Work item: consecutive parts of queries, for which the corpus is read once."""

    parts: tuple[Part, ...]

    @property
    def key(self) -> str:
        """Content hash of the parts."""
        if len(self.parts) == 1:
            return self.parts[0].digest
        return xxhash.xxh3_128_hexdigest("".join(part.digest for part in self.parts).encode())


@dataclass(frozen=True)
class SearchItem:
    """Work item: a unit's queries in one shard."""

    unit: MineUnit
    shard: int

    @property
    def key(self) -> str:
        """The unit and the number of the shard."""
        return f"{self.unit.key}-{self.shard}"


@dataclass(frozen=True)
class IndexItem:
    """Work item: one shard by one teacher."""

    vectors: Vectors
    shard: int

    @property
    def key(self) -> str:
        """The teacher's settings and the number of the shard."""
        return f"{file_name(self.vectors.folder)}-{self.shard}"


@dataclass(frozen=True)
class CorpusSearch:
    """Search for the candidates of units of queries."""

    folder: str
    """Scratch folder of indexes and of what is found in shards."""
    files: CorpusFiles
    shards: tuple[Shard, ...]
    search: MiningSearch
    candidates: int
    """Candidates k of each query."""
    seed: int

    @property
    def in_shards(self) -> bool:
        """Whether shards are searched by tasks of their own, before `found`."""
        return len(self.shards) > 1 and not self.search.approximate

    def found(self, unit: MineUnit, vectors: Vectors, device: str) -> list[TopK]:
        """Candidates of each part of a unit by one teacher."""
        corpus = open_corpus(self.files)
        if self.in_shards:
            return self._merged(unit, vectors)
        queries = [vectors.queries(part) for part in unit.parts]
        if self.search.approximate:
            return self._approximate(queries, vectors)
        return top_k_of_blocks(
            queries, corpus.shards(vectors), self.candidates, device, of=corpus.num_documents
        )

    def search_shard(self, item: SearchItem, vectors: Vectors, device: str) -> None:
        """Keep the candidates that a shard has for a unit, by one teacher."""
        shard, corpus = self.shards[item.shard], open_corpus(self.files)
        found = top_k_of_blocks(
            [vectors.queries(part) for part in item.unit.parts],
            corpus.shards(vectors, shard.first, shard.stop),
            self.candidates,
            device,
            first_id=shard.first,
            of=(corpus.num_documents if shard.stop is None else shard.stop) - shard.first,
        )
        scores, ids = (np.concatenate(arrays) for arrays in zip(*found, strict=True))
        save_arrays(self._found(item.unit, item.shard, vectors), scores=scores, ids=ids)

    def make_index(self, item: IndexItem) -> int:
        """Keep the index of a shard by one teacher; its number of documents."""
        shard = self.shards[item.shard]
        vectors = open_corpus(self.files).shards(item.vectors, shard.first, shard.stop)
        documents = [np.empty((0, 0), np.float16), *vectors][1:]
        made = self.search.index(np.concatenate(documents), self.seed) if documents else b""
        save_array(self._index(item.shard, item.vectors), np.frombuffer(made, np.uint8))
        return sum(map(len, documents))

    def recall(self, parts: Sequence[Part], vectors: Vectors, device: str) -> dict[str, Any]:
        """Share of the exact candidates that are found, over a sample of the queries."""
        some = np.unique(np.linspace(0, len(parts) - 1, _RECALL_PARTS).astype(int))
        sample = []
        for part in (parts[number] for number in some if parts[number].rows):
            keys = seeded_keys(read_column([part], "id_hash"), self.seed, "recall")
            rows = np.sort(np.argsort(keys, kind="stable")[: RECALL_QUERIES // _RECALL_PARTS])
            sample.append(vectors.queries(part)[rows])
        queries = np.concatenate(sample)
        corpus = open_corpus(self.files)
        exact = top_k(queries, corpus.shards(vectors), self.candidates, device)[1]
        found = self._approximate([queries], vectors)[0][1]
        nearest = min(_NEAREST, self.candidates)
        return {
            "queries": len(queries),
            "candidates": self.candidates,
            "recall": _share(exact, found),
            f"recall_of_{nearest}_best": _share(exact[:, :nearest], found),
        }

    def _merged(self, unit: MineUnit, vectors: Vectors) -> list[TopK]:
        best: TopK | None = None
        for number in range(len(self.shards)):
            path = self._found(unit, number, vectors)
            loaded = load_arrays(path, remedy(path))
            found = loaded["scores"], loaded["ids"]
            best = found if best is None else merged_top_k(best, found)
        assert best is not None
        edges = np.cumsum([part.rows for part in unit.parts])[:-1]
        return list(zip(np.split(best[0], edges), np.split(best[1], edges), strict=True))

    def _approximate(self, queries: Sequence[np.ndarray], vectors: Vectors) -> list[TopK]:
        shape = [(len(block), self.candidates) for block in queries]
        best: list[TopK] = [
            (np.full(one, -np.inf, np.float32), np.full(one, NO_RESULT)) for one in shape
        ]
        for number, shard in enumerate(self.shards):
            path = self._index(number, vectors)
            index = read_copied(path, partial(load_array, remedy=remedy(path)))
            if not len(index):  # texts that stand in several parts leave the last shards empty
                continue
            opened = self.search.open(index.tobytes())
            for place, block in enumerate(queries):
                scores, ids = self.search.find(opened, block, self.candidates)
                ids[ids != NO_RESULT] += shard.first
                best[place] = merged_top_k(best[place], (scores, ids))
        return best

    def _found(self, unit: MineUnit, shard: int, vectors: Vectors) -> str:
        name = f"{unit.key}-{shard}-{file_name(vectors.folder)}.npz"
        return join(self.folder, "found", name)

    def _index(self, shard: int, vectors: Vectors) -> str:
        return join(self.folder, "index", f"{file_name(vectors.folder)}-{shard}.npy")


@dataclass(frozen=True)
class SearchShard:
    """Task: search a shard for the candidates of a unit, by all teachers."""

    search: CorpusSearch
    teachers: tuple[Vectors, ...]

    def __call__(self, item: SearchItem, device: str = "cpu") -> Result:
        """Report nothing; what is found stands in files."""
        for vectors in self.teachers:
            self.search.search_shard(item, vectors, device)
        return {}


@dataclass(frozen=True)
class IndexShard:
    """Task: make the index of a shard by a teacher."""

    search: CorpusSearch

    def __call__(self, item: IndexItem) -> Result:
        """Report the number of `documents`."""
        return {"documents": self.search.make_index(item)}


@dataclass(frozen=True)
class MeasureRecall:
    """Task: measure by exact search what an approximate one finds."""

    search: CorpusSearch
    teachers: tuple[Vectors, ...]

    def __call__(self, item: MineUnit, device: str = "cpu") -> Result:
        """Report `recall` of each teacher, over a sample of all parts, which the item has."""
        return {"recall": [self.search.recall(item.parts, one, device) for one in self.teachers]}


def _share(exact: np.ndarray, found: np.ndarray) -> float:
    """Share of the exact ids that are among those found for the same query."""
    wanted = exact != NO_RESULT
    met = [np.isin(one, other) for one, other in zip(exact, found, strict=True)]
    return round(float((np.array(met) & wanted).sum() / max(wanted.sum(), 1)), 6)
