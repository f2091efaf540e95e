"""Choose the usable rows for a plan, and assign them to steps and slots."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rayembed.config.loss import LossConfig, Need
from rayembed.config.stage import steps_of
from rayembed.data.engine.index import PartIndex, index_chunks
from rayembed.data.engine.parts import Part, read_table
from rayembed.data.plan.policies import blended, clustered, homogeneous
from rayembed.data.plan.sampling import DatasetRows
from rayembed.data.plan.scratch import SortedRows, sorted_rows
from rayembed.data.plan.teacher_scores import SCORES_COLUMN
from rayembed.errors import DataError

log = logging.getLogger(__name__)

MAX_SHARE_WITHOUT_NEGATIVES = 0.5
"""Maximum share of rows without hard negatives, where a stage learns from hard negatives alone.
Such rows are left out and counted; a larger share indicates wrong settings. Typical shares: of
Wikipedia's descriptions 3 and of its sentences 7 percent have a positive that scores so low that
all 100 candidates exceed the limit."""

_COLUMNS: Mapping[Need, str] = {
    "similarity": "similarity",
    "teacher_scores": SCORES_COLUMN,
}
"""Need of a loss → optional record column that provides it."""

NO_NEGATIVE = "no negative"
SMALL_LANGUAGE = "fewer rows of its language than a batch"


@dataclass(frozen=True)
class PlanConfig:
    """Settings that determine a batch plan, together with the data sets' rows."""

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
    epochs: float | None = None
    """Passes over the usable rows, which decide `num_steps`; None: `num_steps` is what it says."""
    columns: tuple[str, ...] = ()
    """Columns of `parts.OPTIONAL` that the stage's loss needs; see `columns_for`."""
    teachers: tuple[str, ...] = ()
    """Names of the folders with vectors of texts, one of each of the stage's teachers."""
    num_positives: int = 1
    """Positives that a place of a row trains, from that of its turn on."""

    def values(self) -> dict[str, Any]:
        """Return the settings as plain values, for the plan's manifest and fingerprint."""
        kept = dict(vars(self))
        del kept["epochs" if self.epochs is None else "num_steps"]
        if self.num_positives == 1:
            del kept["num_positives"]
        return {**kept, "weights": dict(sorted(self.weights.items()))}

    def steps_of(self, rows: int) -> int:
        """Number of training steps that the given number of usable rows fills."""
        if self.epochs is None:
            return self.num_steps
        return steps_of(self.epochs, rows, self.global_pairs)


@dataclass(frozen=True)
class UsableRows:
    """Rows of one data set that can be drawn, in an order that depends only on their content."""

    total: int
    """Number of all rows, including those left out."""
    count: int
    rejected: dict[str, int]
    """Reason → number of rows left out."""
    negatives: dict[str, int]
    """Histogram of the rows' available hard negatives, up to the number requested."""
    rows: SortedRows | None
    """The rows where policies draw single ones."""
    batches: np.ndarray
    """(n / G,) int64 numbers of whole batches of G consecutive rows, where a policy draws these."""

    def places(self, row: np.ndarray) -> np.ndarray:
        """Row numbers of the usable rows, (m,) int64, numbered consecutively across all parts."""
        if self.rows is not None:
            return np.asarray(self.rows.place[row], np.int64)
        batch, slot = np.divmod(row, self.count // len(self.batches))
        return np.asarray(self.batches[batch] * (self.count // len(self.batches)) + slot)

    def drawn(self, name: str, weight: float) -> DatasetRows:
        """Convert the rows to the form that batching policies draw from."""
        if self.rows is not None:
            weight = weight if self.count else 0.0
            return DatasetRows(name, weight, self.rows.query_hash, self.rows.rows_of)
        return DatasetRows(name, weight, np.broadcast_to(np.int64(0), self.count))


@dataclass(frozen=True)
class Draws:
    """Counts of the rows and steps drawn from each data set, by data set number."""

    rows: list[int]
    steps: list[int]
    """Steps whose first row is of the data set: all of it, where batches are of one."""
    languages: list[Counter[int]]
    """Steps by hash of the first row's language."""


def columns_for(loss: LossConfig) -> tuple[str, ...]:
    """Columns of `parts.OPTIONAL` that a batch plan stores for a loss, given its `needs`."""
    return tuple(column for need, column in _COLUMNS.items() if need in loss.needs)


def usable_rows(
    parts: Mapping[str, Sequence[Part]],
    config: PlanConfig,
    batch_pairs: Mapping[str, int],
    scratch: Path,
) -> dict[str, UsableRows]:
    """Find the rows of each data set that the stage can train on, and sort them.

    Args:
        batch_pairs: as in `write_plan`.
        scratch: a folder on this machine, where the rows stay; see `sorted_rows`.

    Raises:
        DataError: as `write_plan`.
    """
    found = {}
    for number, name in enumerate(sorted(config.weights)):
        if not sum(part.rows for part in parts[name]):
            raise DataError(f"data set {name!r} is empty: it has no usable row")
        if config.policy == "clustered":
            found[name] = _of_whole_batches(name, parts[name], config, batch_pairs.get(name))
            continue
        folder = scratch / str(number)
        folder.mkdir()
        found[name] = _of_single_rows(name, parts[name], config, folder)
    if config.policy == "homogeneous" and not any(rows.count for rows in found.values()):
        counts = ", ".join(f"{name!r} {of.total}" for name, of in found.items())
        raise DataError(
            f"stage {config.key!r} fills each batch of {config.global_pairs} pairs from one "
            "language of one data set, but no language has that many rows (all rows of each data "
            f"set: {counts}); lower batch.global_pairs, add rows, or set batch.policy to 'blended'"
        )
    total = sum(usable.count for usable in found.values())
    if total < config.global_pairs:
        raise DataError(
            f"stage {config.key!r}: its data sets have {total} rows in all, fewer than one global "
            f"batch of {config.global_pairs} pairs; lower batch.global_pairs or add rows"
        )
    _check_negatives(found, config)
    return found


def draw_rows(
    usable: Mapping[str, UsableRows],
    config: PlanConfig,
    place: Callable[[np.ndarray, np.ndarray], None],
) -> Draws:
    """Draw the rows of all steps by the stage's batching policy, and call `place` for each
    row.

    Args:
        place: takes (G,) int64 row numbers of each step, that count through the parts of all data
            sets, and their (G,) int64 positions: the step times G plus the slot.

    Raises:
        DataError: a data set has too few rows.
    """
    rows = [of.drawn(name, config.weights[name]) for name, of in usable.items()]
    sets = list(usable.values())
    before = np.cumsum([0, *(of.total for of in sets)])
    starts = [np.cumsum(list((r.rows_of or {}).values())) for r in rows]
    hashes = [list(r.rows_of or {}) for r in rows]
    policy = {"blended": blended, "homogeneous": homogeneous, "clustered": clustered}[config.policy]
    batches = policy(
        *(rows, config.global_pairs, config.num_steps, config.seed, config.key, config.temperature)
    )
    draws = Draws([0] * len(sets), [0] * len(sets), [Counter() for _ in sets])
    slots = np.arange(config.global_pairs)
    for step, batch in enumerate(batches):
        numbers = np.empty(config.global_pairs, np.int64)
        for number in np.unique(batch.dataset).tolist():
            mine = batch.dataset == number
            numbers[mine] = before[number] + sets[number].places(batch.row[mine])
            draws.rows[number] += int(mine.sum())
        first = int(batch.dataset[0])
        draws.steps[first] += 1
        if hashes[first]:
            language = np.searchsorted(starts[first], batch.row[0], side="right")
            draws.languages[first][hashes[first][int(language)]] += 1
        place(numbers, step * config.global_pairs + slots)
    return draws


def describe(
    usable: Mapping[str, UsableRows],
    draws: Draws,
    config: PlanConfig,
    parts: Mapping[str, Sequence[Part]],
) -> dict[str, dict[str, Any]]:
    """Make the manifest entry of each data set: rows, draws, epochs, steps, languages."""
    told: dict[str, dict[str, Any]] = {}
    for number, (name, usable_of) in enumerate(usable.items()):
        drawn = draws.rows[number]
        told[name] = {
            "rows": usable_of.count,
            "rejected": usable_of.rejected,
            "drawn": drawn,
            "epochs": round(drawn / max(usable_of.count, 1), 3),
        }
        if config.num_negatives:
            told[name]["negatives"] = usable_of.negatives
        if drawn == 0 and usable_of.count:
            log.warning(
                "stage %s: its %d steps draw no row of data set %s, because its share of the "
                "batches is too small",
                *(config.key, config.num_steps, name),
            )
        if config.policy == "blended":
            continue
        told[name]["steps"] = draws.steps[number]
        if config.policy == "homogeneous":
            assert usable_of.rows is not None
            rows_of = usable_of.rows.rows_of
            firsts = np.cumsum([0, *rows_of.values()])[:-1].tolist()
            told[name]["languages"] = [
                {
                    "language": _language(parts[name], int(usable_of.rows.place[first])),
                    "rows": count,
                    "steps": draws.languages[number][language],
                }
                for first, (language, count) in zip(firsts, rows_of.items(), strict=True)
            ]
    return told


def _check_negatives(usable: Mapping[str, UsableRows], config: PlanConfig) -> None:
    """Raise if the stage requests hard negatives but no row of its data sets has any.

    Raises:
        DataError: it asks for some, and there is none.
    """
    if not config.num_negatives or any(of.count > of.negatives["none"] for of in usable.values()):
        return
    counts = ", ".join(f"0 of {of.count:,} rows of {name}" for name, of in usable.items())
    raise DataError(
        f"stage {config.key!r} asks for {config.num_negatives} hard negatives of each query "
        f"(batch.num_negatives), but none of its rows has any ({counts}): name the column of hard "
        "negatives (source.negatives), mine hard negatives (mining.teacher; if the rule refused "
        f"all of them, loosen mining.rule), or set stages.{config.key}.batch.num_negatives=0"
    )


@dataclass
class _Group:
    """Counts of usable rows, of one language or of the whole data set."""

    first: int
    """Global row number of its first row."""
    rows: int = 0
    none: int = 0
    enough: int = 0


class _Tally:
    """Counts usable rows by group while their index is read."""

    def __init__(self, asked: int) -> None:
        self.groups: dict[int, _Group] = {}
        self._asked = asked

    def add(self, group: np.ndarray, negatives: np.ndarray, place: np.ndarray) -> None:
        """Count (m,) rows, given the group and the number of hard negatives of each."""
        found, firsts, of = np.unique(group, return_index=True, return_inverse=True)
        rows = np.bincount(of, minlength=len(found)).tolist()
        none = np.bincount(of[negatives == 0], minlength=len(found)).tolist()
        enough = np.bincount(of[negatives >= self._asked], minlength=len(found)).tolist()
        for number, name in enumerate(found.tolist()):
            told = self.groups.setdefault(name, _Group(int(place[firsts[number]])))
            told.rows += rows[number]
            told.none += none[number]
            told.enough += enough[number]

    def negatives(self, kept: Iterable[int]) -> dict[str, int]:
        """Count the groups' rows without, with some, and with enough hard negatives."""
        groups = [self.groups[name] for name in kept]
        rows, none = sum(of.rows for of in groups), sum(of.none for of in groups)
        enough = sum(of.enough for of in groups)
        return {"none": none, "fewer": rows - none - enough, "enough": enough}


def _learns(index: PartIndex, config: PlanConfig) -> np.ndarray:
    """(rows,) bool mask of rows with negatives to learn from, or with a graded similarity."""
    if "similarity" in config.columns:  # rows are compared with each other by their similarity
        return np.ones(len(index.id_hash), dtype=bool)
    negatives = np.minimum(index.num_negatives, config.num_negatives)
    return np.asarray((index.in_batch & config.in_batch_negatives) | (negatives > 0))


def _check_learning(name: str, missing: int, count: int, config: PlanConfig) -> None:
    """Log how many rows have no negatives to learn from, and raise if there are too many.

    Raises:
        DataError: too many.
    """
    if missing > MAX_SHARE_WITHOUT_NEGATIVES * count:
        raise DataError(
            f"data set {name!r}: {missing} of {count} rows have no hard negatives, and in-batch "
            f"negatives are off for them in stage {config.key!r}, so the model could learn "
            "nothing from these rows; set mining for the data set, name its negatives column, or "
            "set in_batch_negatives=true for the stage and the data set"
        )
    if missing:
        log.warning(
            "stage %s: %d of %d rows of data set %s have no hard negatives and %s",
            *(config.key, missing, count, name),
            "give no training signal in their batches"
            if config.policy == "clustered"
            else "are left out",
        )


def _of_single_rows(
    name: str, parts: Sequence[Part], config: PlanConfig, scratch: Path
) -> UsableRows:
    """Usable rows for drawing single rows; `homogeneous` drops languages too small for a batch."""
    total = sum(part.rows for part in parts)
    by_language = config.policy == "homogeneous"
    tally = _Tally(config.num_negatives)

    def chunks() -> Iterator[tuple[PartIndex, np.ndarray, np.ndarray]]:
        first = 0
        for index in index_chunks(parts):
            learns = _learns(index, config)
            group = index.language_hash if by_language else np.zeros(len(learns), np.int64)
            tally.add(group[learns], index.num_negatives[learns], first + np.flatnonzero(learns))
            first += len(learns)
            yield index, learns, group

    def kept() -> dict[int, int]:
        rows = {language: of.rows for language, of in tally.groups.items()}
        _check_learning(name, total - sum(rows.values()), total, config)
        least = config.global_pairs if by_language else 0
        return {language: count for language, count in rows.items() if count >= least}

    rows = sorted_rows(scratch, chunks(), total, kept)
    small = {key: of for key, of in tally.groups.items() if key not in rows.rows_of}
    rejected = {
        NO_NEGATIVE: total - sum(of.rows for of in tally.groups.values()),
        SMALL_LANGUAGE: sum(of.rows for of in small.values()),
    }
    if small:
        names = sorted(str(_language(parts, of.first)) for of in small.values())
        log.warning(
            "stage %s: %d rows of data set %s are in languages with fewer rows than a batch of %d "
            "pairs and are left out: %s",
            *(config.key, rejected[SMALL_LANGUAGE], name, config.global_pairs, ", ".join(names)),
        )
    return UsableRows(
        total,
        sum(rows.rows_of.values()),
        {reason: count for reason, count in rejected.items() if count},
        tally.negatives(rows.rows_of),
        rows,
        np.empty(0, np.int64),
    )


def _of_whole_batches(
    name: str, parts: Sequence[Part], config: PlanConfig, batch_pairs: int | None
) -> UsableRows:
    """Take all rows as the batches that clustering made; batches are ordered by the smallest id
    hash in each.
    """
    if batch_pairs != config.global_pairs:
        has = f"batches of {batch_pairs} pairs" if batch_pairs else "no clusters"
        raise DataError(
            f"stage {config.key!r} needs clustered batches of {config.global_pairs} pairs, but "
            f"data set {name!r} has {has}; set clusters.batch_pairs={config.global_pairs} for it"
        )
    total = sum(part.rows for part in parts)
    lowest = np.full(total // batch_pairs, np.iinfo(np.int64).max)
    tally, first, missing = _Tally(config.num_negatives), 0, 0
    for index in index_chunks(parts):
        place = first + np.arange(len(index.id_hash))
        batch = place // batch_pairs
        starts = np.flatnonzero(np.diff(batch, prepend=-1))
        found = np.minimum.reduceat(index.id_hash, starts)
        lowest[batch[starts]] = np.minimum(lowest[batch[starts]], found)
        tally.add(np.zeros(len(place), np.int64), index.num_negatives, place)
        missing += int((~_learns(index, config)).sum())
        first += len(place)
    _check_learning(name, missing, total, config)
    order = np.argsort(lowest, kind="stable")
    return UsableRows(total, total, {}, tally.negatives(tally.groups), None, order)


def _language(parts: Sequence[Part], place: int) -> str | None:
    """Read the language of a row, given its number counted through all parts."""
    for part in parts:
        if place < part.rows:
            return read_table(part.path, ["language"])["language"][place].as_py()  # type: ignore[no-any-return]
        place -= part.rows
    raise AssertionError(place)
