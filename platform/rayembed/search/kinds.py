"""Search methods of hard-negative mining: exact, or approximate with one of two kinds of FAISS
index.

An index is made and searched by one thread, so that it is the same whatever runs beside it. Vectors
are kept in float16, as they are given, so that scores are those of the exact search but for the
order of summation.

n documents of a shard, Q queries, D embedding width, k results.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rayembed.config.mining import MiningSearch
from rayembed.search.faiss_library import require_faiss

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

_NEEDS = "approximate searches (mining.search)"

_ROWS_AT_ONCE = 65_536
"""Number of vectors converted to float32 at a time while an index is filled."""

_POINTS_PER_LIST = 64
"""Number of training vectors for each list's centroid."""


class Exact(MiningSearch):
    """Exact search, which compares all queries with all documents."""

    kind: Literal["exact"] = "exact"


class _Indexed(MiningSearch):
    """Methods that both kinds of FAISS index share."""

    @property
    def approximate(self) -> bool:
        """Always true, since an index finds only most of the best documents."""
        return True

    def check(self) -> None:
        """Raise `ConfigError` if FAISS is not installed."""
        require_faiss(_NEEDS)

    def open(self, index: bytes) -> Any:
        """Open a serialised FAISS index."""
        import numpy as np

        return require_faiss(_NEEDS).deserialize_index(np.frombuffer(index, np.uint8))

    def find(self, opened: Any, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Search the index; return scores and indices (Q, k), best first."""
        import numpy as np

        from rayembed.search.order import NO_RESULT

        if not len(queries):
            return np.empty((0, k), np.float32), np.empty((0, k), np.int64)
        with _one_thread(require_faiss(_NEEDS)):
            scores, places = opened.search(np.ascontiguousarray(queries, np.float32), k)
        scores[places < 0] = -np.inf
        places[places < 0] = NO_RESULT
        order = np.lexsort((places, -scores), axis=1)
        return np.take_along_axis(scores, order, 1), np.take_along_axis(places, order, 1)


class Ivf(_Indexed):
    """Inverted file (IVF) that groups documents into lists by nearest centroid, and searches only
    some lists.
    """

    kind: Literal["ivf"] = "ivf"
    lists: int | None = Field(default=None, ge=1, le=2**31 - 1)
    """Number of lists of a corpus shard; None: 4·√n for its n documents."""
    probes: int = Field(default=64, ge=1, le=2**31 - 1)
    """Number of lists that are searched for a query; more find more of the best and take longer."""

    def index(self, vectors: np.ndarray, seed: int) -> bytes:
        """Build the index of (n, D) vectors, with lists from k-means over a seeded sample."""
        import numpy as np

        faiss = require_faiss(_NEEDS)
        count, width = vectors.shape
        lists = min(self.lists or math.ceil(4 * math.sqrt(count)), count)
        with _one_thread(faiss):
            index = faiss.IndexIVFScalarQuantizer(
                faiss.IndexFlatIP(width),
                width,
                lists,
                faiss.ScalarQuantizer.QT_fp16,
                faiss.METRIC_INNER_PRODUCT,
                False,  # the vectors themselves, not their differences from the centroids
            )
            index.cp.seed = seed % 2**31
            index.cp.spherical = True
            index.cp.min_points_per_centroid = 1
            index.cp.max_points_per_centroid = count
            rng = np.random.Generator(np.random.PCG64(seed))
            sample = rng.permutation(count)[: _POINTS_PER_LIST * lists]
            index.train(vectors[np.sort(sample)].astype(np.float32))
            _fill(index, vectors)
        return _bytes(faiss, index)

    def open(self, index: bytes) -> Any:
        """Open a serialised FAISS index, and set it to search `probes` lists."""
        opened = super().open(index)
        opened.nprobe = self.probes
        return opened


class Hnsw(_Indexed):
    """Graph of neighbouring documents (HNSW), in which a search moves from neighbour to neighbour
    towards the query.
    """

    kind: Literal["hnsw"] = "hnsw"
    neighbours: int = Field(default=32, ge=2, le=512)
    """Number of neighbours of a document in the graph, twice that in its lowest layer."""
    ef_construction: int = Field(default=80, ge=1, le=2**31 - 1)
    """Number of candidates for a document's neighbours while the graph is built."""
    ef_search: int = Field(default=256, ge=1, le=2**31 - 1)
    """Number of documents kept while the graph is searched; at least the number of candidates."""

    def index(self, vectors: np.ndarray, seed: int) -> bytes:
        """Build the index of (n, D) vectors; FAISS assigns documents to graph layers by its own
        fixed seed.
        """
        faiss = require_faiss(_NEEDS)
        with _one_thread(faiss):
            index = faiss.IndexHNSWSQ(
                vectors.shape[1],
                faiss.ScalarQuantizer.QT_fp16,
                self.neighbours,
                faiss.METRIC_INNER_PRODUCT,
            )
            index.hnsw.efConstruction = self.ef_construction
            index.train(vectors[:1].astype("float32"))  # the type needs none, FAISS asks for it
            _fill(index, vectors)
        return _bytes(faiss, index)

    def find(self, opened: Any, queries: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Search the index; return scores and indices (Q, k), best first."""
        opened.hnsw.efSearch = max(self.ef_search, k)
        return super().find(opened, queries, k)


def _fill(index: Any, vectors: np.ndarray) -> None:
    for first in range(0, len(vectors), _ROWS_AT_ONCE):
        index.add(vectors[first : first + _ROWS_AT_ONCE].astype("float32"))


def _bytes(faiss: Any, index: Any) -> bytes:
    content: bytes = faiss.serialize_index(index).tobytes()
    return content


@contextmanager
def _one_thread(faiss: Any) -> Iterator[None]:
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
