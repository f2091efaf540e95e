"""Searches of mining: how candidates are found, and the table of kinds."""

from typing import TYPE_CHECKING, Any

from rayembed.config.settings import Settings
from rayembed.config.table import Table


class MiningSearch(Settings):
    """How the candidates of a query are found in the corpus.

    Base class of the members of `MINING_SEARCHES`. This class finds the exact ones. A member that
    overrides the functions searches an index of each shard of the corpus, which is made once.
    """

    if TYPE_CHECKING:
        kind: str
        """Name in the table."""

    @property
    def approximate(self) -> bool:
        """Whether it searches an index; its recall is then measured and kept in the manifest."""
        return False

    def check(self) -> None:
        """Raise before any work starts.

        Raises:
            ConfigError: a library is missing that the search needs.
        """

    def index(self, vectors: Any, seed: int) -> bytes:
        """Index of a shard, the same for the same vectors and seed whatever the machine's load.

        Args:
            vectors: (n, D) float16 unit vectors, n at least 1.
        """
        raise TypeError(f"{type(self).__name__} has no index")

    def open(self, index: bytes) -> Any:
        """What `find` searches, from the bytes of an index."""
        raise TypeError(f"{type(self).__name__} has no index")

    def find(self, opened: Any, queries: Any, k: int) -> tuple[Any, Any]:
        """Scores (Q, k) float32 and places in the shard (Q, k) int64, best first, ties by the lower
        place; `-inf` and -1 where fewer are found.

        Args:
            queries: (Q, D) of any float type.
        """
        raise TypeError(f"{type(self).__name__} has no index")


MINING_SEARCHES = Table(
    "rayembed.mining_searches",
    MiningSearch,
    (
        "rayembed.search.kinds:Exact",
        "rayembed.search.kinds:Ivf",
        "rayembed.search.kinds:Hnsw",
    ),
    default="exact",
)
"""Kinds of searches. Their modules import numpy, torch and FAISS inside functions: settings are
read before they are needed."""
