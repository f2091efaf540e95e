"""Price the roads to a new model in texts, tokens, hours, bytes and money, by this run's rates."""

from dataclasses import dataclass

from rayembed.results.costs import Cost

_SECONDS_AN_HOUR = 3600
_BYTES = {"float32": 4.0, "float16": 2.0, "int8": 1.0, "bits": 0.125}


@dataclass(frozen=True)
class Rate:
    """Measured speed of a model on the index's texts, in one process."""

    texts: int
    seconds: float
    tokens_per_text: float
    """Mean over a sample, prompts and special tokens included."""

    @property
    def cost(self) -> Cost:
        """The same as the cost of vectors."""
        return Cost(documents=self.texts, seconds=self.seconds)


@dataclass(frozen=True)
class RoadPrice:
    """Price of a road to a new model."""

    road: str
    texts: int
    """Texts that the new model embeds, those of this measurement included."""
    tokens: float
    hours: float
    """Hours of one process like the one that measured."""
    stored_bytes: float
    """Bytes of vectors and maps that the store holds afterwards."""
    money: float | None
    """Price in the user's currency; None: no price per hour is stated."""


def vector_bytes(rows: int, dimensions: int, number_type: str) -> float:
    """Bytes of stored vectors, without the store's own index, ids and texts."""
    return rows * dimensions * _BYTES[number_type]


def price_roads(
    rate: Rate,
    *,
    rows: int,
    sample_texts: int,
    old_bytes: float,
    new_bytes: float,
    map_bytes: int,
    price_per_hour: float | None,
) -> list[RoadPrice]:
    """Price an adapter, a backfill, and a backfill behind an adapter.

    Args:
        rate: of the new model.
        rows: texts of the index.
        sample_texts: texts of the sample, which each road has embedded already.
        old_bytes, new_bytes: of the old and the new table's vectors.
    """
    seconds = rate.seconds / max(1, rate.texts)

    def price(road: str, texts: int, stored: float) -> RoadPrice:
        hours = texts * seconds / _SECONDS_AN_HOUR
        money = None if price_per_hour is None else hours * price_per_hour
        return RoadPrice(road, texts, texts * rate.tokens_per_text, hours, stored, money)

    return [
        price("adapter", sample_texts, old_bytes + map_bytes),
        price("backfill", sample_texts + rows, old_bytes + new_bytes),
        price("adapter, then backfill", sample_texts + rows, old_bytes + new_bytes + map_bytes),
    ]
