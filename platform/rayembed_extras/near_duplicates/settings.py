"""Settings of the removal of near-duplicates."""

from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from rayembed.config.data_steps import Cleaner
from rayembed.config.table import load
from rayembed.config.types import Share
from rayembed.errors import require_packages


class NearDuplicates(Cleaner):
    """Removal of rows whose text nearly equals that of an earlier row (MinHash)."""

    kind: ClassVar[str] = "near_duplicates"
    reason: ClassVar[str] = "near-duplicate"

    threshold: Share = 0.8
    """Jaccard similarity of word n-grams from which two texts count as duplicates."""
    ngram: PositiveInt = 5
    """Words of an n-gram; a shorter text is one n-gram."""
    permutations: int = Field(default=128, ge=16)
    """Number of hash functions of a signature; more of them detect similarities near the threshold
    more reliably."""
    of: Literal["pair", "query", "positive"] = "pair"
    """Texts to compare: the query and all positives, or one of the two sides."""

    def check(self, setting: str) -> None:
        """Check that datasketch is installed."""
        require_packages(setting, "near-duplicates", "datasketch")

    def find(self, *rows: Any) -> Any:
        """Find near-duplicate rows and list them."""
        return load("rayembed_extras.near_duplicates.find:find_near_duplicates")(self, *rows)
