"""Price the roads to a new model in texts, tokens, hours, bytes and money, by their measurement."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rayembed_extras.index_upgrades.settings import UpgradeRun
    from rayembed_extras.indexing.manifest import TableRecord

_SECONDS_AN_HOUR = 3600
_BYTES = {"float32": 4.0, "float16": 2.0, "int8": 1.0, "bits": 0.125}


@dataclass(frozen=True)
class Rate:
    """Measured speed of a model on the index's texts, in one process."""

    texts: int
    seconds: float
    tokens_per_text: float
    """Mean over a sample, prompts and special tokens included."""


@dataclass(frozen=True)
class MeasuringCost:
    """Texts and time that a measurement of roads took."""

    texts: int
    """Distinct texts that either model embedded: documents, and sentences and words as queries."""
    tokens: float
    seconds: float
    """From the start to the last search, with loading the models and fitting the maps."""
    fit_seconds: float
    """Seconds of these for fitting all maps."""


@dataclass(frozen=True)
class RoadPrice:
    """Price of a road to a new model."""

    road: str
    texts: int
    """Texts to embed: for an adapter those of the measurement, for a backfill all of the index."""
    tokens: float
    hours: float
    """Hours of one process like the one that measured."""
    stored_bytes: float
    """Bytes of vectors and maps that the store holds afterwards."""
    money: float | None = None
    """Price in the user's currency; None: no price per hour is stated."""

    def with_money(self, price_per_hour: float | None) -> "RoadPrice":
        """Return the price in money, too, where a price per hour is stated."""
        money = None if price_per_hour is None else self.hours * price_per_hour
        return replace(self, money=money)


def measured_texts(run: "UpgradeRun", record: "TableRecord") -> str:
    """Say how many texts of a table a measurement embeds, and by which model."""
    documents = record.documents_read or record.rows
    fits = min(run.fit_documents, documents // 2) if run.fits_maps else 0
    texts = round(min(documents, fits + run.searched_documents) * record.rows / documents)
    queries = run.sampled_queries * (2 if run.queries is None else 1)
    if run.fit_on != "documents":
        queries += 2 * fits
    judged = "" if run.queries is None else " and the judged queries"
    return (
        f"{texts:,} texts by the new model, and up to {queries:,} of their sentences and words as "
        f"queries{judged} by both models"
    )


def vector_bytes(rows: int, dimensions: int, number_type: str) -> float:
    """Bytes of stored vectors, without the store's own index, ids and texts."""
    return rows * dimensions * _BYTES[number_type]


def price_roads(
    rate: Rate,
    *,
    rows: int,
    measuring: MeasuringCost,
    old_bytes: float,
    new_bytes: float,
    map_bytes: int,
) -> list[RoadPrice]:
    """Price an adapter, a backfill, and a backfill behind an adapter.

    Args:
        rate: of the new model.
        rows: texts of the index.
        measuring: cost of the measurement, which a backfill alone can do without.
        old_bytes, new_bytes: of the old and the new table's vectors.
    """
    measured = (measuring.texts, measuring.tokens, measuring.seconds)
    embedded = (rows, rows * rate.tokens_per_text, rows * rate.seconds / max(1, rate.texts))
    both = (rows + measuring.texts, measured[1] + embedded[1], measured[2] + embedded[2])

    def price(road: str, spent: tuple[int, float, float], stored: float) -> RoadPrice:
        return RoadPrice(road, spent[0], spent[1], spent[2] / _SECONDS_AN_HOUR, stored)

    return [
        price("adapter", measured, old_bytes + map_bytes),
        price("backfill", embedded, old_bytes + new_bytes),
        price("adapter, then backfill", both, old_bytes + new_bytes + map_bytes),
    ]
