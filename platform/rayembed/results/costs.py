"""Measured costs of a model's vectors: documents per second, bytes per document, and their
price.

They lie beside the results in `costs.yaml`, by task.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from rayembed.config.document import read_yaml, write_yaml

COSTS_FILE = "costs.yaml"
"""File next to the results that holds the costs; other tools' results lack it."""

_MILLION = 1_000_000
_SECONDS_AN_HOUR = 3600


@dataclass(frozen=True)
class Cost:
    """Time, size and price of the vectors of a corpus, or of its index of words."""

    documents: int = 0
    """Documents that were embedded or indexed; what a store had already does not count."""
    seconds: float = 0.0
    """Seconds of one worker for these documents; those of several workers are summed."""
    bytes_per_document: float | None = None
    """Bytes that a search keeps of a document: its vector at its width and number type, or its
    share of an index; None: not measured."""
    price_per_hour: float | None = None
    """Price of an hour of one worker, in the user's currency; None: not stated."""

    @property
    def documents_per_second(self) -> float | None:
        """Documents embedded per second by one worker; None if not measured."""
        return self.documents / self.seconds if self.documents and self.seconds > 0 else None

    @property
    def price_of_a_million(self) -> float | None:
        """Price of embedding a million documents; None without a measured speed or a price per
        hour.
        """
        rate = self.documents_per_second
        if rate is None or self.price_per_hour is None:
            return None
        return _MILLION / rate / _SECONDS_AN_HOUR * self.price_per_hour

    def __add__(self, other: "Cost") -> "Cost":
        """Add up the costs of one model on different documents."""
        known = [c.bytes_per_document for c in (self, other) if c.bytes_per_document is not None]
        price = self.price_per_hour if other.price_per_hour is None else other.price_per_hour
        return Cost(
            self.documents + other.documents,
            self.seconds + other.seconds,
            known[-1] if known else None,
            price,
        )

    def with_index(self, index: "Cost") -> "Cost":
        """Return the cost of the same documents if a second index stores them, too."""
        rate = index.documents_per_second
        parts = self.bytes_per_document, index.bytes_per_document
        return replace(
            self,
            seconds=self.seconds + (self.documents / rate if rate else 0.0),
            bytes_per_document=None if None in parts else sum(filter(None, parts)),
        )


def costs_yaml(costs: Mapping[str, Cost]) -> str:
    """Serialise the costs by task as YAML, for `read_costs`."""
    return write_yaml({task: asdict(cost) for task, cost in sorted(costs.items())})


def read_costs(text: str) -> dict[str, Cost]:
    """Read the costs by task from YAML written by `costs_yaml`."""
    return {task: _cost(values) for task, values in (read_yaml(text) or {}).items()}


def _cost(values: Mapping[str, str | None]) -> Cost:
    """Convert the texts read from YAML to a `Cost`."""
    numbers = {name: None if text is None else float(text) for name, text in values.items()}
    return Cost(int(numbers.pop("documents") or 0), numbers.pop("seconds") or 0.0, **numbers)


def total(costs: Mapping[str, Cost]) -> Cost:
    """Sum the costs of several tasks."""
    return sum(costs.values(), Cost())


def cost_columns(costs: Sequence[Cost]) -> dict[str, list[str | None]]:
    """Make table columns of costs by heading: documents per second, bytes per document, the price
    of a million documents.

    Headings without any number are left out.
    """
    columns = {
        "Documents/s": [_shown(cost.documents_per_second, 1) for cost in costs],
        "Bytes/document": [_shown(cost.bytes_per_document, 0) for cost in costs],
        "Price of 1M": [_shown(cost.price_of_a_million, 2) for cost in costs],
    }
    return {head: texts for head, texts in columns.items() if any(texts)}


def _shown(number: float | None, digits: int) -> str | None:
    if number is None:
        return None
    return f"{number:,.{0 if digits == 1 and number >= 10 else digits}f}"
