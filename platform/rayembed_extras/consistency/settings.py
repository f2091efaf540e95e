"""Settings of the consistency filter."""

from typing import ClassVar

from pydantic import PositiveInt

from rayembed.config.mining import TeacherStep


class ConsistencyConfig(TeacherStep):
    """Settings of the filter that keeps pairs whose document a small model retrieves (Nomic Embed
    v2, section 4.2).
    """

    kind: ClassVar[str] = "consistency"
    folder: ClassVar[str] = "filtered"
    after: ClassVar[str] = "records"
    heading: ClassVar[str] = "filter"
    done: ClassVar[str] = "filtered for consistency"
    made_by: ClassVar[str] = "rayembed_extras.consistency.filter:make_filtered"

    top_k: PositiveInt = 2
    """Maximum rank of a pair's document within its query's shard (2 in Nomic Embed v2, 20 in Arctic
    Embed)."""
    shard_rows: PositiveInt = 1_000_000
    """Rows of a shard, from one data set and one language."""

    @property
    def summary(self) -> str:
        """Describe the filter in one line: the largest rank that it keeps, and its teacher."""
        return f"top {self.top_k} by {self.teacher}"
