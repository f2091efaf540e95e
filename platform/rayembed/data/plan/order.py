"""Row order of a plan: selects usable rows and assigns each to steps and slots."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from rayembed.config.loss import LossConfig, Need
from rayembed.data.parts import Part, PartIndex, read_index, read_table
from rayembed.data.plan.policies import blended, clustered, homogeneous, large_enough
from rayembed.data.plan.sampling import DatasetRows
from rayembed.errors import DataError

log = logging.getLogger(__name__)

MAX_SHARE_WITHOUT_NEGATIVES = 0.5
"""Maximum share of rows without hard negatives, where a stage learns from hard negatives alone.
Such rows are left out and counted; a larger share indicates wrong settings. Typical shares: of
Wikipedia's descriptions 3 and of its sentences 7 percent have a positive that scores so low that
all 100 candidates exceed the limit."""

_COLUMNS: Mapping[Need, str] = {
    "similarity": "similarity",
    "teacher_scores": "positive_cross_score",
}
"""Need of a loss → its column of records that not every plan has."""

NO_NEGATIVE = "no negative"
SMALL_LANGUAGE = "fewer rows of its language than a batch"


@dataclass(frozen=True)
class PlanConfig:
    """Settings that decide a plan, besides the rows."""

    weights: Mapping[str, float]
    """Sampling weight of each data set."""
    global_pairs: int
    num_negatives: int
    num_steps: int
    seed: int
    in_batch_negatives: bool
    """Whether the stage uses in-batch negatives; if not, every row needs hard negatives."""
    key: str = ""
    """Name of the stage; separates the random draws of stages with equal seeds."""
    policy: Literal["blended", "homogeneous", "clustered"] = "blended"
    temperature: float | None = None
    """Temperature T of `BatchConfig`."""
    columns: tuple[str, ...] = ()
    """Columns of `parts.OPTIONAL` that the stage's loss asks for; see `columns_for`."""
    teachers: tuple[str, ...] = ()
    """Names of the folders with vectors of the rows' texts, one of each of the stage's teachers;
    see `vectors.store`."""

    def values(self) -> dict[str, Any]:
        """The settings as plain values; no columns are not named, as in plans without any."""
        kept = {name: value for name, value in vars(self).items() if value != ()}
        return {**kept, "weights": dict(sorted(self.weights.items()))}


@dataclass(frozen=True)
class UsableRows:
    """Usable rows of one data set."""

    index: PartIndex
    place: np.ndarray
    """(n,) int64 index positions, in an order that only the rows' content decides."""
    rejected: dict[str, int]
    """Reason → number of rows left out."""

    @property
    def num_negatives(self) -> np.ndarray:
        """(n,) int32 number of hard negatives."""
        return np.asarray(self.index.num_negatives[self.place])

    @property
    def language_hash(self) -> np.ndarray:
        """(n,) int64 hash of the language code."""
        return np.asarray(self.index.language_hash[self.place])


@dataclass(frozen=True)
class Order:
    """Assignment of rows to the slots of each step."""

    dataset: np.ndarray
    """(steps, G) int32 data set numbers."""
    row: np.ndarray
    """(steps, G) int64 positions among the data set's usable rows."""


def columns_for(loss: LossConfig) -> tuple[str, ...]:
    """Columns of `parts.OPTIONAL` that a plan carries for a loss, by what this `needs`."""
    return tuple(column for need, column in _COLUMNS.items() if need in loss.needs)


def usable_rows(
    parts: Mapping[str, Sequence[Part]], config: PlanConfig, batch_pairs: Mapping[str, int]
) -> dict[str, UsableRows]:
    """Usable rows of each data set of `config.weights`.

    Args:
        batch_pairs: as in `write_plan`.

    Raises:
        DataError: as `write_plan`.
    """
    found = {}
    for name in sorted(config.weights):
        index = read_index(parts[name])
        if len(index.id_hash) == 0:
            raise DataError(f"data set {name!r} is empty: it has no usable row")
        learns = _learning(name, index, config)
        if config.policy == "clustered":
            found[name] = _of_whole_batches(name, index, config, batch_pairs.get(name))
        else:
            found[name] = _of_single_rows(name, index, learns, config, parts[name])
    if config.policy == "homogeneous" and not any(len(rows.place) for rows in found.values()):
        counts = ", ".join(f"{name!r} {len(of.index.id_hash)}" for name, of in found.items())
        raise DataError(
            f"stage {config.key!r} fills each batch of {config.global_pairs} pairs from one "
            f"language of one data set, and none has so many rows (in all: {counts}); lower "
            "batch.global_pairs, add rows or take policy 'blended'"
        )
    total = sum(len(usable.place) for usable in found.values())
    if total < config.global_pairs:
        raise DataError(
            f"stage {config.key!r}: its data sets have {total} rows in all, fewer than one global "
            f"batch of {config.global_pairs} pairs; lower batch.global_pairs or add rows"
        )
    _check_negatives(found, config)
    return found


def order_rows(usable: Mapping[str, UsableRows], config: PlanConfig) -> Order:
    """Order the rows by the stage's policy.

    Raises:
        DataError: a data set has too few rows.
    """
    rows = [
        DatasetRows(
            name,
            config.weights[name] if len(of.place) else 0.0,
            of.index.query_hash[of.place],
            of.language_hash,
        )
        for name, of in usable.items()
    ]
    policy = {"blended": blended, "homogeneous": homogeneous, "clustered": clustered}[config.policy]
    shape = (config.num_steps, config.global_pairs)
    order = Order(np.empty(shape, np.int32), np.empty(shape, np.int64))
    batches = policy(rows, *shape[::-1], config.seed, config.key, config.temperature)
    for step, batch in enumerate(batches):
        order.dataset[step], order.row[step] = batch.dataset, batch.row
    return order


def describe(
    usable: Mapping[str, UsableRows],
    order: Order,
    config: PlanConfig,
    parts: Mapping[str, Sequence[Part]],
) -> dict[str, dict[str, Any]]:
    """Manifest entries of each data set: rows, draws, epochs, steps, languages."""
    told: dict[str, dict[str, Any]] = {}
    for number, (name, rows) in enumerate(usable.items()):
        drawn = int((order.dataset == number).sum())
        told[name] = {
            "rows": len(rows.place),
            "rejected": rows.rejected,
            "drawn": drawn,
            "epochs": round(drawn / max(len(rows.place), 1), 3),
        }
        if config.num_negatives:
            told[name]["negatives"] = _negatives(rows, config.num_negatives)
        if drawn == 0 and len(rows.place):
            log.warning(
                "stage %s: its %d steps draw nothing of %s, whose share is too small",
                *(config.key, config.num_steps, name),
            )
        if config.policy == "blended":
            continue
        mine = order.dataset[:, 0] == number
        told[name]["steps"] = int(mine.sum())
        if config.policy == "homogeneous":
            languages = rows.language_hash
            of_step = languages[order.row[mine, 0]]
            told[name]["languages"] = [
                {
                    "language": _language(parts[name], int(rows.place[first])),
                    "rows": int(count),
                    "steps": int((of_step == language).sum()),
                }
                for language, first, count in zip(
                    *np.unique(languages, return_index=True, return_counts=True), strict=True
                )
            ]
    return told


def _check_negatives(usable: Mapping[str, UsableRows], config: PlanConfig) -> None:
    """Raise when the stage requests hard negatives and no row of its data sets has any.

    Raises:
        DataError: it asks for some, and there is none.
    """
    if not config.num_negatives or any((of.num_negatives > 0).any() for of in usable.values()):
        return
    counts = ", ".join(f"0 of {len(of.place):,} rows of {name}" for name, of in usable.items())
    raise DataError(
        f"stage {config.key!r} asks for {config.num_negatives} hard negatives of each query "
        f"(batch.num_negatives), and none of its rows has one ({counts}): name the column that "
        "holds them (source.negatives), have them mined (mining.teacher; where the rule left none, "
        f"loosen mining.rule), or set stages.{config.key}.batch.num_negatives=0"
    )


def _negatives(rows: UsableRows, asked: int) -> dict[str, int]:
    """Histogram of the rows' available hard negatives, up to the number requested."""
    none = int((rows.num_negatives == 0).sum())
    enough = int((rows.num_negatives >= asked).sum())
    return {"none": none, "fewer": len(rows.place) - none - enough, "enough": enough}


def _learning(name: str, index: PartIndex, config: PlanConfig) -> np.ndarray:
    """(rows,) bool mask of rows that have negatives to learn from.

    Raises:
        DataError: too few rows have.
    """
    count = len(index.id_hash)
    negatives = np.minimum(index.num_negatives, config.num_negatives)
    learns = (index.in_batch & config.in_batch_negatives) | (negatives > 0)
    if "similarity" in config.columns:  # rows are compared with each other by their similarity
        learns = np.ones(count, dtype=bool)
    missing = int((~learns).sum())
    if missing > MAX_SHARE_WITHOUT_NEGATIVES * count:
        raise DataError(
            f"data set {name!r}: {missing} of {count} rows have no hard negatives, and "
            f"in-batch negatives are off for them in stage {config.key!r}, so they could learn "
            "from nothing; set mining for the data set, name its negatives column, or set "
            "in_batch_negatives=true for the stage and the data set"
        )
    if missing:
        log.warning(
            "stage %s: %d of %d rows of %s have no hard negatives and %s",
            *(config.key, missing, count, name),
            "learn from nothing in their batches" if config.policy == "clustered" else "are out",
        )
    return np.asarray(learns)


def _of_single_rows(
    name: str, index: PartIndex, learns: np.ndarray, config: PlanConfig, parts: Sequence[Part]
) -> UsableRows:
    """Usable rows of policies that draw single rows; `homogeneous` drops languages too small for a
    batch.
    """
    order = np.lexsort((np.arange(len(learns)), index.id_hash))
    place = order[learns[order]]
    rejected = {NO_NEGATIVE: len(order) - len(place)}
    if config.policy == "homogeneous":
        large = large_enough(index.language_hash[place], config.global_pairs)
        small = place[~large]
        place = place[large]
        rejected[SMALL_LANGUAGE] = len(small)
        if len(small):
            firsts = np.unique(index.language_hash[small], return_index=True)[1]
            names = sorted(str(_language(parts, int(small[first]))) for first in firsts)
            log.warning(
                "stage %s: %d rows of %s are in languages with fewer rows than a batch of %d and "
                "are out: %s",
                *(config.key, len(small), name, config.global_pairs, ", ".join(names)),
            )
    return UsableRows(index, place, {reason: n for reason, n in rejected.items() if n})


def _of_whole_batches(
    name: str, index: PartIndex, config: PlanConfig, batch_pairs: int | None
) -> UsableRows:
    """All rows in whole batches; batches ordered by the smallest id hash in them."""
    if batch_pairs != config.global_pairs:
        has = f"batches of {batch_pairs} pairs" if batch_pairs else "no clusters"
        raise DataError(
            f"stage {config.key!r} takes clustered batches of {config.global_pairs} pairs, and "
            f"data set {name!r} has {has}; set clusters.batch_pairs={config.global_pairs} for it"
        )
    batches = index.id_hash.reshape(-1, batch_pairs)
    order = np.argsort(batches.min(1), kind="stable")
    return UsableRows(index, np.arange(batches.size).reshape(batches.shape)[order].ravel(), {})


def _language(parts: Sequence[Part], place: int) -> str | None:
    """Language of a row, by global row number."""
    for part in parts:
        if place < part.rows:
            return read_table(part.path, ["language"])["language"][place].as_py()  # type: ignore[no-any-return]
        place -= part.rows
    raise AssertionError(place)
