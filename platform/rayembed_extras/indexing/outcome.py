"""Result of an index job."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rayembed_extras.indexing.manifest import Manifest, TableRecord
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
