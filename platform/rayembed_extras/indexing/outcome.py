"""Result of an index job."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayembed.data.engine.work_items import Result
from rayembed_extras.indexing.manifest import Manifest, TableRecord
from rayembed_extras.indexing.rows import DUPLICATE
from rayembed_extras.indexing.settings import StoreSettings


@dataclass(frozen=True)
class Indexed:
    """Result of a job: the index's table and what was done."""

    name: str
    manifest: Manifest
    storage: str
    store: StoreSettings

    @property
    def table(self) -> str:
        """Table that the index's name refers to."""
        return str(self.manifest.current)

    @property
    def record(self) -> TableRecord:
        """Record of the table."""
        return self.manifest.tables[self.table]

    @property
    def counts(self) -> Mapping[str, Any]:
        """Counts of the job: `in`, `new`, `changed`, `unchanged`, `deleted`, `rejected`, `texts`,
        `tokens`, `seconds`.
        """
        return self.record.counts

    def open(self) -> Any:
        """Connect to the store, a `store.VectorStore`."""
        return self.store.open()

    def __repr__(self) -> str:
        written = self.counts["new"] + self.counts["changed"]
        return (
            f"Indexed({self.name!r}, {self.record.rows:,} rows in {self.store.kind}, "
            f"{written:,} documents written, {self.counts['deleted']:,} deleted)"
        )


def counts_of(
    rows: int,
    rejected: Mapping[str, int],
    compared: Sequence[Result],
    earlier: Sequence[Result],
    results: Sequence[Result],
    seconds: float,
) -> dict[str, Any]:
    """Add up the counts of documents, and check that no row is lost.

    Args:
        rows: of the files.
        compared: differences of all parts.
        earlier: parts that earlier tries of the job finished.
        results: parts that this one finished.
        seconds: that it took for these.
    """
    counts: dict[str, Any] = {"in": rows}
    for name in ("new", "changed", "unchanged", "deleted"):
        counts[name] = sum(result[name] for result in compared)
    counts["rejected"] = dict(rejected)
    if duplicates := sum(result["duplicates"] for result in compared):
        counts["rejected"][DUPLICATE] = duplicates
    kept = counts["new"] + counts["changed"] + counts["unchanged"]
    assert rows == kept + sum(counts["rejected"].values()), (rows, counts)
    counts["texts"] = sum(result["write"] for result in compared)
    counts["seconds"] = round(seconds, 3)
    for name, speed in (("embedded", "texts_per_second"), ("tokens", "tokens_per_second")):
        here, before = (sum(one.get(name, 0) for one in some) for some in (results, earlier))
        counts[name] = here + before
        counts[speed] = round(here / max(seconds, 1e-9), 1)
    return counts
